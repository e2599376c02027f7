"""Removes the frames of intermediate libraries from tracebacks.

Users read a traceback from its end: the message, then the line of this library that
raised it. The frames by which a retry library or a thread pool passes an error from one
thread to another add nothing to that.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Final

_CARRIERS: Final = ("concurrent.futures", "contextlib", "tenacity")
"""Packages whose frames are removed."""


def trim(error: BaseException) -> None:
    """Removes the frames of those packages from the traceback of an error."""
    kept = [each for each in _entries(error.__traceback__) if not _is_carrier(each)]
    trace = None
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = trace


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_carrier(entry: TracebackType) -> bool:
    name = str(entry.tb_frame.f_globals.get("__name__", ""))
    return name.startswith(_CARRIERS)
