"""Emits spans where the process uses OpenTelemetry.

Nothing is imported here: a process that has not imported ``opentelemetry.trace`` has no
tracer provider, and its spans would go nowhere. The spans of a save belong to the trace
of its upload (``storesvc.format.trace_ids``), so that the spans of all processes and
servers join; a restore belongs to the current span of its caller.
"""

import sys
from typing import Any

from storesvc.format.trace_ids import trace_of_upload
from storesvc_client._values.report_spans import Span


def emit(span: Span, *, upload: str = "") -> None:
    """Emits a span and its children.

    Args:
        span: The span.
        upload: Id of the upload whose trace it belongs to; empty: the current one.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    tracer = trace.get_tracer("storesvc_client")
    _emit(trace, tracer, span, _context_of(trace, upload))


def _context_of(trace: Any, upload: str) -> Any:
    """Returns the context of the trace of an upload; None: the current one."""
    ids = trace_of_upload(upload)
    if ids is None:
        return None
    parent = trace.SpanContext(
        ids.trace,
        ids.span,
        is_remote=True,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def _emit(trace: Any, tracer: Any, span: Span, context: Any) -> None:
    emitted = tracer.start_span(
        span.name,
        context=context,
        start_time=_nanoseconds(span.start),
        attributes=span.attributes,
    )
    inside = trace.set_span_in_context(emitted)
    for child in span.children:
        _emit(trace, tracer, child, inside)
    for name, attributes in span.events.items():
        emitted.add_event(name, attributes, timestamp=_nanoseconds(span.end))
    emitted.end(_nanoseconds(span.end))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
