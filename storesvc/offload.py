"""Runs computations over tables without blocking the event loop for long."""

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SMALL_ROWS: Final = 1_000
"""Rows up to which a computation runs in the event loop: it takes at most some
milliseconds there. A thread would cost 0.1 ms of CPU time, mostly to wake it and the
event loop, and a small save makes twenty such calls."""

ROW_BYTES: Final = 32
"""Estimated least bytes of a row of a serialised table."""


async def offload(
    rows: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Returns the result of a computation, which runs in a thread if there are many
    rows.

    Args:
        rows: Chunks or leaves that it works on.
        function: The computation; it must not wait for anything.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if rows <= SMALL_ROWS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def rows_in(data: bytes) -> int:
    """Returns an upper estimate of the rows of a serialised table."""
    return len(data) // ROW_BYTES
