"""Projects events to spans, and exports them to a collector by OTLP.

The spans of an upload belong to the trace of its id (``storesvc.format.names``),
with a root span from its begin to its commit; other calls belong to the trace that the
caller names (W3C Trace Context). Each of these calls has a span; within it, the commit
and slow requests to the storage have one each. A call without a trace has a span of its
own if it failed or was slow. Attributes follow OpenTelemetry's conventions for RPC, and
ours begin with ``storesvc.``.

Spans are exported by a thread, in batches; if the collector does not answer, they are
dropped, and calls do not wait.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeAlias, cast

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from storesvc.format.names import TraceIds, parse_traceparent, upload_trace
from storesvc.telemetry.events import (
    CallEnded,
    Committed,
    Event,
    Retried,
    RunCollected,
    Stalled,
    StorageRequested,
    StoreCollected,
    parse_subject,
    scope,
)

SLOW_SECONDS: Final = 0.25
"""Duration above which a request to the storage, or a call without a trace, has a
span."""

MAX_PARTS: Final = 64
"""Maximum spans and events within one call."""

MAX_RUNS: Final = 1000
"""Maximum spans of runs within one pass of the garbage collection."""

_FLUSH_MILLIS: Final = 2000
"""Maximum time at the end of the process for the export of the last spans."""

_Attribute: TypeAlias = str | int | float | bool


class Spans:
    """The spans of a server, as a subscriber of its events. Thread-safe."""

    def __init__(self, endpoint: str, *, version: str) -> None:
        """Begins to export.

        Args:
            endpoint: URL of the collector; spans go to its ``/v1/traces``.
            version: Version of the service, an attribute of all spans.
        """
        self._ids = _ChosenIds()
        self._provider = TracerProvider(
            id_generator=self._ids,
            resource=Resource.create(
                {"service.name": "storesvc", "service.version": version}
            ),
            shutdown_on_exit=False,
            span_limits=SpanLimits(max_attribute_length=1024),
        )
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("storesvc", version)
        self._runs: list[RunCollected] = []
        """Runs of the pass of the garbage collection in progress."""

    def close(self) -> None:
        """Exports the last spans, for a short time at most."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(_FLUSH_MILLIS / 1000)

    def _close(self) -> None:
        self._provider.force_flush(_FLUSH_MILLIS)
        self._provider.shutdown()

    def __call__(self, event: Event) -> None:
        """Emits the spans of a call or of a pass when it ends."""
        match event:
            case CallEnded():
                self._emit_call(event)
            case StorageRequested() if event.seconds >= SLOW_SECONDS:
                _keep(event)
            case Retried() | Stalled():
                _keep((time.time(), event))
            case Committed():
                self._emit_upload(event)
                _keep(event)
            case RunCollected() if scope.get() is None:
                if len(self._runs) < MAX_RUNS:
                    self._runs.append(event)
            case RunCollected():
                _keep(event)
            case StoreCollected():
                self._emit_pass(event)
            case _:
                pass

    def _emit_upload(self, event: Committed) -> None:
        """Emits the root span of an upload, the parent of all others of its trace."""
        ids = upload_trace(event.upload)
        if ids is None:
            return
        with self._ids.chosen(ids):
            span = self._span(
                "storesvc.upload",
                event.upload_start,
                Context(),
                {
                    "storesvc.run": event.run,
                    "storesvc.step": event.step,
                    "storesvc.upload": event.upload,
                    "storesvc.stored_bytes": event.stored_bytes,
                    "storesvc.own_bytes": event.own_bytes,
                    "storesvc.chunk_count": event.chunk_count,
                },
            )
        span.end(_nanoseconds(event.start + event.seconds))

    def _emit_call(self, event: CallEnded) -> None:
        if event.method.startswith("grpc.health."):
            return
        subject = parse_subject(event.subject.get("name", ""))
        ids = upload_trace(subject.get("upload", "")) or parse_traceparent(event.parent)
        context = None
        if ids is not None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            parent = SpanContext(ids.trace, ids.span, is_remote=True, trace_flags=flags)
            context = set_span_in_context(NonRecordingSpan(parent), Context())
        is_usual = event.status == "OK" and event.seconds < SLOW_SECONDS
        if context is None and is_usual:
            return
        span = self._span(
            event.method,
            event.start,
            context or Context(),
            _make_attributes(event, subject),
            kind=SpanKind.SERVER,
        )
        if event.status != "OK":
            span.set_status(StatusCode.ERROR, event.reason or event.status)
        inside = set_span_in_context(span)
        found = scope.get()
        for part in found.parts if found is not None else ():
            self._emit_part(part, span, inside)
        span.end(_nanoseconds(event.start + event.seconds))

    def _emit_part(self, part: object, call: Span, inside: Context) -> None:
        match part:
            case StorageRequested():
                name = f"storage.{part.operation}"
                attributes: dict[str, _Attribute] = {
                    "storesvc.storage": part.storage,
                    "storesvc.path": part.path,
                }
                if part.error:
                    attributes["error.type"] = part.error
            case Committed():
                name = "commit"
                attributes = {"storesvc.chunk_count": part.chunk_count}
            case RunCollected():
                name = "gc.run"
                attributes = {
                    "storesvc.run": part.run,
                    "storesvc.deleted_objects": part.deleted_objects,
                    "storesvc.purged_checkpoints": part.purged_checkpoints,
                    "storesvc.aborted_uploads": part.aborted_uploads,
                }
            case (float() as moment, Stalled() as stalled):
                attributes = {"storesvc.storage": stalled.storage}
                call.add_event("stall", attributes, _nanoseconds(moment))
                return
            case (float() as moment, Retried() as retried):
                call.add_event(
                    retried.kind,
                    {"storesvc.operation": retried.operation},
                    _nanoseconds(moment),
                )
                return
            case _:
                return
        span = self._span(name, part.start, inside, attributes)
        span.end(_nanoseconds(part.start + part.seconds))

    def _emit_pass(self, event: StoreCollected) -> None:
        runs, self._runs = self._runs, []
        span = self._span(
            "gc.pass",
            event.start,
            Context(),
            {
                "storesvc.runs": len(event.runs),
                "storesvc.is_complete": event.is_complete,
            },
        )
        for run in runs:
            self._emit_part(run, span, set_span_in_context(span))
        span.end(_nanoseconds(event.start + event.seconds))

    def _span(
        self,
        name: str,
        start: float,
        context: Context,
        attributes: Mapping[str, _Attribute],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        span = self._tracer.start_span(
            name, context, kind, attributes=attributes, start_time=_nanoseconds(start)
        )
        return cast("Span", span)  # of our own provider


class _ChosenIds(IdGenerator):
    """Random ids, except for the root spans of uploads."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._own = threading.local()

    @contextmanager
    def chosen(self, ids: TraceIds) -> Iterator[None]:
        """Chooses the ids of the spans that this thread starts in the context."""
        self._own.ids = ids
        try:
            yield
        finally:
            self._own.ids = None

    def generate_trace_id(self) -> int:
        ids: TraceIds | None = getattr(self._own, "ids", None)
        return self._random.generate_trace_id() if ids is None else ids.trace

    def generate_span_id(self) -> int:
        ids: TraceIds | None = getattr(self._own, "ids", None)
        return self._random.generate_span_id() if ids is None else ids.span


def _keep(part: object) -> None:
    """Keeps a part for the span of its call."""
    found = scope.get()
    if found is not None and len(found.parts) < MAX_PARTS:
        found.parts.append(part)


def _make_attributes(
    event: CallEnded, subject: Mapping[str, str]
) -> dict[str, _Attribute]:
    found: dict[str, _Attribute] = {
        "rpc.system.name": "grpc",
        "rpc.method": event.method,
        "rpc.response.status_code": event.status,
        "storesvc.request_id": event.request_id,
        "storesvc.received_bytes": event.received_bytes,
        "storesvc.sent_bytes": event.sent_bytes,
        **{f"storesvc.{key}": value for key, value in subject.items()},
    }
    if event.principal:
        found["storesvc.principal"] = event.principal
    if event.reason:
        found["error.type"] = event.reason
    return found


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
