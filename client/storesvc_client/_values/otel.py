"""Emits spans and measurements where the process uses OpenTelemetry.

Nothing is imported here: a process that has not imported ``opentelemetry.trace`` has no
tracer provider, and its spans would go nowhere; likewise for ``opentelemetry.metrics``.
The spans of a save belong to the trace of its upload (``storesvc.format.names``),
so the spans of all processes and servers join. A restore belongs to the current span of
its caller, or begins a trace; its span is the current one while it lasts, and calls
carry the current span to the server. Measurements are the events of ``report_events``.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

from storesvc.format.names import TraceIds, trace_of_upload, traceparent
from storesvc_client._values.report_events import Event
from storesvc_client._values.report_spans import Span

_OWN: Final = "/jax/storesvc/"


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


def current_traceparent() -> str:
    """Returns the ``traceparent`` of the current span; "" if it is not sampled, or
    there is none."""
    # the attribute is missing while another thread is still importing the module
    current = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current is None:
        return ""
    found = current().get_span_context()
    if not (found.is_valid and found.trace_flags.sampled):
        return ""
    return traceparent(TraceIds(found.trace_id, found.span_id))


class OpenSpan:
    """A span that has begun; nothing where the process does not use OpenTelemetry."""

    def __init__(self, name: str, start: float) -> None:
        """Begins the span within the current one.

        Args:
            name: Name of the span.
            start: Seconds since the epoch.
        """
        self._trace: Any = sys.modules.get("opentelemetry.trace")
        self._span: Any = None
        if self._trace is not None:
            tracer = self._trace.get_tracer("storesvc_client")
            self._span = tracer.start_span(name, start_time=_nanoseconds(start))

    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which the span is the current one."""
        if self._span is None:
            return nullcontext()
        context: AbstractContextManager[object] = self._trace.use_span(
            self._span, record_exception=False, set_status_on_exception=False
        )
        return context

    def end(self, span: Span) -> None:
        """Ends the span with attributes, events, children and end of another one."""
        if self._span is not None:
            tracer = self._trace.get_tracer("storesvc_client")
            _end(self._trace, tracer, self._span, span)


def measure(events: Iterable[Event]) -> None:
    """Records events: durations in histograms, the others in counters.

    ``/jax/storesvc/save/total_duration_secs`` is ``storesvc.save.total_duration`` in
    seconds, ``/jax/storesvc/save/sent_bytes`` is ``storesvc.save.sent_bytes``.
    """
    if "opentelemetry.metrics" not in sys.modules:
        return
    for event in events:
        if event.name.startswith(_OWN):
            _instrument(event.kind, event.name)(event.value, dict(event.tags))


@cache
def _instrument(kind: str, name: str) -> Any:
    """Returns the method of an instrument that records a value."""
    meter = sys.modules["opentelemetry.metrics"].get_meter("storesvc_client")
    own = name.removeprefix("/jax/").replace("/", ".")
    if kind == "duration":
        return meter.create_histogram(own.removesuffix("_secs"), unit="s").record
    unit = "By" if name.endswith("_bytes") else "1"
    return meter.create_counter(own, unit=unit).add


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
    )
    _end(trace, tracer, emitted, span)


def _end(trace: Any, tracer: Any, begun: Any, span: Span) -> None:
    """Ends a span that has begun as another one describes it."""
    begun.set_attributes(span.attributes)
    inside = trace.set_span_in_context(begun)
    for child in span.children:
        _emit(trace, tracer, child, inside)
    for name, attributes in span.events.items():
        begun.add_event(name, attributes, timestamp=_nanoseconds(span.end))
    if span.error:
        begun.set_status(trace.StatusCode.ERROR, span.error)
    begun.end(_nanoseconds(span.end))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
