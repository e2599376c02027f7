"""Ids of traces that client and service derive from the id of an upload.

All processes of a job and all servers emit the spans of a save into one trace, without
having to agree on it. The format is that of W3C Trace Context (16 bytes for a trace, 8
for a span): the trace has the id of the upload, and the span that is the parent of all
others has its second half.

Example:
    >>> ids = trace_of_upload("0d2f6c1e9a5b4c3d8e7f60718293a4b5")
    >>> f"{ids.trace:032x}", f"{ids.span:016x}"
    ('0d2f6c1e9a5b4c3d8e7f60718293a4b5', '8e7f60718293a4b5')
"""

import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_UPLOAD = re.compile(r"[0-9a-f]{32}")


class TraceIds(NamedTuple):
    """The ids of a span."""

    trace: int
    span: int


def trace_of_upload(upload: str) -> TraceIds | None:
    """Returns the ids of the root span of an upload; None if its id is no UUID."""
    return _valid(upload, upload[16:]) if _UPLOAD.fullmatch(upload) else None


def parse_traceparent(text: str) -> TraceIds | None:
    """Returns the ids of a ``traceparent``; None if it is malformed, or if its last bit
    states that the trace is not sampled."""
    found = _TRACEPARENT.fullmatch(text)
    return _valid(*found.groups()) if found else None


def traceparent(ids: TraceIds) -> str:
    """Returns the ``traceparent`` of a span that is sampled."""
    return f"00-{ids.trace:032x}-{ids.span:016x}-01"


def _valid(trace: str, span: str) -> TraceIds | None:
    ids = TraceIds(int(trace, 16), int(span, 16))
    return ids if ids.trace and ids.span else None
