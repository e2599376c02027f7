"""Sends saves and restores to ``jax.monitoring``, OpenTelemetry and a step logger.

Events and spans repeat what a report says and add nothing, so they cannot disagree with
it. Listeners and loggers are code of the caller: an exception of theirs is logged once
and never fails a save or a restore. They run in the thread that ends the operation,
before its result is returned.

Events: durations are in seconds, and scalars are plain numbers. Orbax defines the names
``/jax/orbax/...`` and the keys of the step statistics, which dashboards and
ml-goodput-measurement read.

Spans: a phase is one span from its first start to its last end, however many threads
worked in it; the attribute ``storesvc.busy_seconds`` is the sum over the threads.
Attributes have the names of the fields of the report. An operation that failed has the
phases that it came to, and the reason of its error; never the text of the error, which
may have names and values of the user.

OpenTelemetry is not imported here: a process that has not imported
``opentelemetry.trace`` has no tracer provider, and its spans would go nowhere; likewise
for ``opentelemetry.metrics``. The spans of a save belong to the trace of its upload
(``storesvc.format.names``), so the spans of all processes and servers join. A restore
belongs to the current span of its caller, or begins a trace; its span is the current
one while it lasts, and calls carry the current span to the server. Measurements are the
events.

Example:
    >>> events = restore_events(report)
    >>> events[0]
    Event(kind='event', name='/jax/storesvc/restore/success', value=1, tags={})
    >>> span = restore_span(report, process=0)
    >>> span.name, [child.name for child in span.children]
    ('storesvc.restore', ['plan', 'read', 'verify', 'place', 'rebuild'])
"""

import logging
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any, Final, Literal, Protocol, TypeAlias, assert_never

from storesvc.format.names import TraceIds, traceparent, upload_trace
from storesvc_client._telemetry.reports import PhaseSpan, RestoreReport, SaveReport
from storesvc_client._values.models import Checkpoint
from storesvc_client.errors import InvalidRequestError, StoreError

_log = logging.getLogger("storesvc_client")

Operation: TypeAlias = Literal["save", "restore"]

_GBYTE: Final = 1 << 30
"""Orbax counts its gbytes in GiB."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of ``jax.monitoring``."""

    kind: Literal["event", "duration", "scalar"]
    name: str
    value: float = 1
    """Seconds of a duration, number of a scalar; 1 for an event."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Keyword arguments for listeners, always in the same order."""


def start_event(what: Operation) -> Event:
    """Returns the event of an operation that begins."""
    return Event("event", f"/jax/storesvc/{what}/start")


def failure_event(what: Operation, error: BaseException) -> Event:
    """Returns the event of an operation that failed; its tag is the class of the
    error."""
    return Event(
        "event", f"/jax/storesvc/{what}/failure", tags={"error": type(error).__name__}
    )


def save_events(report: SaveReport) -> list[Event]:
    place = "/jax/storesvc/save"
    return [
        Event("event", f"{place}/success"),
        Event("duration", f"{place}/total_duration_secs", report.seconds),
        Event("duration", f"{place}/blocking_duration_secs", report.blocking_seconds),
        *_phase_events(place, report.timings),
        Event("scalar", f"{place}/total_bytes", report.total_bytes),
        Event("scalar", f"{place}/sent_bytes", report.sent_bytes),
        Event("scalar", f"{place}/reused_bytes", report.reused_bytes),
    ]


def restore_events(report: RestoreReport) -> list[Event]:
    place = "/jax/storesvc/restore"
    return [
        Event("event", f"{place}/success"),
        Event("duration", f"{place}/total_duration_secs", report.seconds),
        *_phase_events(place, report.timings),
        Event("scalar", f"{place}/read_bytes", report.read_bytes),
        Event("scalar", f"{place}/received_bytes", report.received_bytes),
        Event("scalar", f"{place}/returned_bytes", report.returned_bytes),
    ]


def orbax_save_events(
    report: SaveReport, checkpoint: Checkpoint, directory: str
) -> list[Event]:
    """Returns the events that dashboards of Orbax use, for a committed save."""
    place, tags = "/jax/orbax/write", _storage_type(directory)
    blocking = report.blocking_seconds
    return [
        Event("duration", f"{place}/blocking_duration_secs", blocking, tags),
        Event("duration", f"{place}/total_duration_secs", report.seconds, tags),
        Event("scalar", f"{place}/gbytes", checkpoint.size_bytes / _GBYTE),
    ]


def orbax_restore_events(report: RestoreReport, directory: str) -> list[Event]:
    """Returns the event that dashboards of Orbax use, for a restore."""
    name, tags = "/jax/orbax/read/total_duration_secs", _storage_type(directory)
    return [Event("duration", name, report.seconds, tags)]


def save_statistics(report: SaveReport, directory: str) -> dict[str, object]:
    """Returns the step statistics of a committed save, with the keys of Orbax.

    What is not measured is None, as in Orbax; old steps are never listed by a save.
    """
    start = report.start_time.timestamp()
    waited = report.timings.get("await previous", 0.0)
    return {
        "step": report.step,
        "event_type": "save",
        "directory": directory,
        "reached_preemption": False,
        "preemption_received_at": None,
        "synchronous": report.blocking_seconds >= report.seconds,
        "wait_for_prev_start_time": start,
        "wait_for_prev_duration_secs": waited,
        "time_between_consecutive_saves_sec": None,
        "checkpointer_blocking_start_time": start + waited,
        "checkpointer_blocking_duration_secs": report.blocking_seconds - waited,
        "get_old_steps_start_time": None,
        "get_old_steps_duration_secs": 0.0,
        "checkpoint_manager_blocking_start_time": start,
        "checkpoint_manager_blocking_duration_secs": report.blocking_seconds,
    }


def restore_statistics(report: RestoreReport, directory: str) -> dict[str, object]:
    """Returns the step statistics of a restore, with the keys of Orbax."""
    start = report.start_time.timestamp()
    return {
        "step": report.step,
        "event_type": "restore",
        "directory": directory,
        "checkpointer_start_time": start,
        "checkpointer_duration_secs": report.seconds,
        "checkpoint_manager_start_time": start,
        "checkpoint_manager_duration_secs": report.seconds,
    }


def _phase_events(place: str, timings: Mapping[str, float]) -> list[Event]:
    """Returns the durations of the phases, each summed over all threads."""
    return [
        Event("duration", f"{place}/{phase.replace(' ', '_')}_duration_secs", seconds)
        for phase, seconds in timings.items()
    ]


def _storage_type(directory: str) -> Mapping[str, str]:
    return {"storage_type": "gcs" if directory.startswith("gs://") else "other"}


Attribute: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended."""

    name: str
    start: float
    """Seconds since the epoch."""
    end: float
    """Seconds since the epoch."""
    attributes: Mapping[str, Attribute]
    events: Mapping[str, Mapping[str, Attribute]] = field(default_factory=dict)
    """Attributes of events by name; they have the time of the end."""
    children: "tuple[Span, ...]" = ()
    error: str = ""
    """Reason of the failure; "" if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """Measurements of a save or a restore that failed."""

    run: str
    """Name of the run, ``namespace/run``."""
    step: int
    """Step of the checkpoint."""
    start_time: datetime
    """Time of its start, in UTC."""
    seconds: float
    """Seconds until it failed."""
    timeline: tuple[PhaseSpan, ...] = ()
    """Phases that it came to, in the order of their start."""
    process: int
    """Index of this process in its job."""
    upload: str = ""
    """Id of the upload; "" for a restore, and for a save that did not begin one."""


def save_span(report: SaveReport, *, process: int) -> Span:
    events: dict[str, Mapping[str, Attribute]] = {}
    if report.last_process:
        events["last process"] = {"storesvc.last_process": report.last_process}
    fields = ("upload", "total_bytes", "sent_bytes", "reused_bytes", "blocking_seconds")
    return _report_span("save", report, process, fields, events)


def restore_span(report: RestoreReport, *, process: int) -> Span:
    events: dict[str, Mapping[str, Attribute]] = {}
    if (other := report.slowest_process) is not None:
        events["slowest process"] = {
            "storesvc.slowest_process": other.process,
            "storesvc.seconds": other.seconds,
        }
    for step, damage in report.damaged.items():
        events[f"damaged step {step}"] = {"storesvc.damage": damage}
    fields = ("read_bytes", "received_bytes", "returned_bytes")
    return _report_span("restore", report, process, fields, events)


def _report_span(
    what: Operation,
    report: SaveReport | RestoreReport,
    process: int,
    fields: Iterable[str],
    events: Mapping[str, Mapping[str, Attribute]],
) -> Span:
    """Returns the span of a report, with some of its fields as attributes."""
    slowest: dict[str, Mapping[str, Attribute]] = {}
    if report.slowest:
        slowest["slowest part"] = {
            "storesvc.slowest": report.slowest,
            "storesvc.slowest_seconds": report.slowest_seconds,
        }
    attributes = {f"storesvc.{name}": getattr(report, name) for name in fields}
    return _make_span(what, report, process, attributes, events={**slowest, **events})


def failed_span(what: Operation, failed: Unfinished, error: BaseException) -> Span:
    """Returns the span of a save or a restore that failed."""
    attributes = {"error.type": error_type(error)}
    if failed.upload:
        attributes["storesvc.upload"] = failed.upload
    return _make_span(
        what, failed, failed.process, attributes, error=attributes["error.type"]
    )


def _make_span(
    what: Operation,
    measured: SaveReport | RestoreReport | Unfinished,
    process: int,
    attributes: Mapping[str, Attribute],
    **more: Any,
) -> Span:
    start = measured.start_time.timestamp()
    return Span(
        name=f"storesvc.{what}",
        start=start,
        end=start + measured.seconds,
        attributes={
            "storesvc.run": measured.run,
            "storesvc.step": measured.step,
            "storesvc.process": process,
            **attributes,
        },
        children=tuple(_phases(start, measured.timeline)),
        **more,
    )


def error_type(error: BaseException) -> str:
    """Returns the reason of an error, or the name of its class if it has none."""
    reason = error.reason if isinstance(error, StoreError) else ""
    return reason or type(error).__name__


def _phases(start: float, timeline: Iterable[PhaseSpan]) -> Iterable[Span]:
    for phase in timeline:
        yield Span(
            name=phase.name,
            start=start + phase.start_seconds,
            end=start + phase.end_seconds,
            attributes={"storesvc.busy_seconds": phase.busy_seconds},
        )


_OWN: Final = "/jax/storesvc/"


def emit(span: Span, *, upload: str = "") -> None:
    """Emits a span and its children, in the trace of an upload or, without one, in the
    current one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return
    context = None  # the current one
    ids = upload_trace(upload)
    if ids is not None:
        parent = trace.SpanContext(
            ids.trace,
            ids.span,
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
    _emit(trace, trace.get_tracer("storesvc_client"), span, context)


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
        """Begins the span in the current one, at a time in seconds since the epoch."""
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


def _emit(trace: Any, tracer: Any, span: Span, context: Any) -> None:
    emitted = tracer.start_span(
        span.name, context=context, start_time=_nanoseconds(span.start)
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


class StepLogger(Protocol):
    """An object for ``connect(step_logger=)``, such as a logger of Orbax.

    >>> class Lines:
    ...     def log_entry(self, msg: dict[str, object]) -> None:
    ...         print(json.dumps(msg))
    """

    def log_entry(self, msg: dict[str, object], /) -> object:
        """Receives the statistics of one save or restore; the result is ignored."""


class Telemetry:
    """The monitoring of one client's saves and restores."""

    def __init__(
        self,
        root: str,
        *,
        orbax_events: bool = False,
        step_logger: StepLogger | None = None,
    ) -> None:
        """Creates the monitoring; nothing is sent yet."""
        if not isinstance(orbax_events, bool):
            raise InvalidRequestError(
                f"connect: orbax_events=: expected True or False, got {orbax_events!r}"
            )
        if step_logger is not None and not callable(
            getattr(step_logger, "log_entry", None)
        ):
            raise InvalidRequestError(
                "connect: step_logger=: expected an object with log_entry(dict), got "
                f"{step_logger!r}"
            )
        place = root.partition("?")[0]
        self._root = place if place.endswith("/") else f"{place}/"
        self._orbax_events = orbax_events
        self._step_logger = step_logger
        self._failed = set[str]()
        """Receivers whose failure was logged."""

    def save_began(self) -> None:
        """Sends the start of a save; ``saved`` or ``save_failed`` must follow."""
        self._send([start_event("save")])

    def save_failed(self, error: BaseException, failed: Unfinished) -> None:
        self._send([failure_event("save", error)])
        self._emit(failed_span("save", failed, error), upload=failed.upload)

    def restore_began(self, start_time: datetime) -> OpenSpan | None:
        """Sends the start of a restore; ``restored`` or ``restore_failed`` must follow.

        Returns:
            The span of the restore, which is to be the current one while it lasts; None
            if it could not begin.
        """
        self._send([start_event("restore")])
        return self._open("storesvc.restore", start_time.timestamp())

    def restore_failed(
        self, error: BaseException, failed: Unfinished, *, begun: OpenSpan | None
    ) -> None:
        self._send([failure_event("restore", error)])
        self._end(begun, failed_span("restore", failed, error))

    @contextmanager
    def tracing(self, name: str, *, run: str) -> Generator[None]:
        """Emits a span around several operations, which has their error."""
        start, error = time.time(), ""
        begun = self._open(name, start)
        try:
            with nullcontext() if begun is None else begun.current():
                yield
        except BaseException as e:
            error = error_type(e)
            raise
        finally:
            attributes = {"storesvc.run": run}
            if error:
                attributes["error.type"] = error
            span = Span(
                name=name,
                start=start,
                end=time.time(),
                attributes=attributes,
                error=error,
            )
            self._end(begun, span)

    def saved(
        self, report: SaveReport, checkpoint: Checkpoint, *, process: int
    ) -> None:
        """Sends the report of a committed save; as in Orbax, only process 0 sends the
        events of Orbax."""
        directory = self._root + report.run
        events = save_events(report)
        if self._orbax_events and process == 0:
            events += orbax_save_events(report, checkpoint, directory)
        self._send(events)
        self._emit(save_span(report, process=process), upload=report.upload)
        self._log_step(save_statistics(report, directory))

    def restored(
        self, report: RestoreReport, *, process: int, begun: OpenSpan | None
    ) -> None:
        """Sends the report of a restore that succeeded; see ``saved``."""
        directory = self._root + report.run
        events = restore_events(report)
        if self._orbax_events and process == 0:
            events += orbax_restore_events(report, directory)
        self._send(events)
        self._end(begun, restore_span(report, process=process))
        self._log_step(restore_statistics(report, directory))

    def _log_step(self, statistics: dict[str, object]) -> None:
        if self._step_logger is not None:
            with self._guard("the step logger"):
                self._step_logger.log_entry(statistics)

    def _emit(self, span: Span, *, upload: str = "") -> None:
        with self._guard("a tracer of OpenTelemetry"):
            emit(span, upload=upload)

    def _open(self, name: str, start: float) -> OpenSpan | None:
        with self._guard("a tracer of OpenTelemetry"):
            return OpenSpan(name, start)
        return None

    def _end(self, begun: OpenSpan | None, span: Span) -> None:
        with self._guard("a tracer of OpenTelemetry"):
            if begun is not None:
                begun.end(span)

    def _send(self, events: Sequence[Event]) -> None:
        """Passes events to OpenTelemetry, and to the listeners of jax, each if this
        process has imported it."""
        with self._guard("a meter of OpenTelemetry"):
            measure(events)
        monitoring = sys.modules.get("jax.monitoring")
        if monitoring is None:
            return
        for event in events:
            name, value, tags = event.name, event.value, event.tags
            with self._guard("a listener of jax.monitoring"):
                match event.kind:
                    case "event":
                        monitoring.record_event(name, **tags)
                    case "duration":
                        monitoring.record_event_duration_secs(name, value, **tags)
                    case "scalar":
                        monitoring.record_scalar(name, value, **tags)
                    case _:
                        assert_never(event.kind)

    @contextmanager
    def _guard(self, receiver: str) -> Generator[None]:
        """Logs an exception of a receiver, once."""
        try:
            yield
        except Exception as e:  # noqa: BLE001 - code of the caller
            if receiver not in self._failed:
                self._failed.add(receiver)
                _log.warning(
                    "%s failed, which affects no save or restore; later failures are "
                    "not logged: %r",
                    receiver,
                    e,
                )
