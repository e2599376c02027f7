"""Removes from tracebacks what users do not need: frames of intermediate libraries, and
the variables of our own frames.

Users read a traceback from its end: the message, then the line of this library that
raised it. The frames by which a retry library or a thread pool passes an error from one
thread to another add nothing to that.
"""

from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Final

_CARRIERS: Final = ("concurrent.futures", "contextlib", "tenacity")
"""Packages whose frames are removed."""

_OWN: Final = ("storesvc", *_CARRIERS)
"""Packages whose frames refer to nothing of the caller."""


def trim(error: BaseException) -> None:
    """Removes the frames of those packages from the traceback of an error."""
    entries = _entries(error.__traceback__)
    kept = [each for each in entries if not _belongs_to(each, _CARRIERS)]
    trace = None
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = trace


def clear_variables(error: BaseException) -> None:
    """Clears the variables of our frames that an error, or a cause of it, passed.

    A frame with a variable for the error is a cycle with it: without this, the buffers
    of a failed save or restore wait for Python's garbage collector, which restores
    pause.
    """
    seen: set[BaseException] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        waiting += (one.__cause__, one.__context__)
        for each in _entries(one.__traceback__):
            if _belongs_to(each, _OWN):
                with suppress(RuntimeError):  # it is still running
                    each.tb_frame.clear()


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _belongs_to(entry: TracebackType, packages: tuple[str, ...]) -> bool:
    name = str(entry.tb_frame.f_globals.get("__name__", ""))
    return name.startswith(packages)
