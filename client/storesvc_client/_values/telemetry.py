"""Sends saves and restores to ``jax.monitoring``, OpenTelemetry and a step logger.

``report_events`` and ``report_spans`` decide
what is sent. Listeners and loggers are code of the
caller: an exception of theirs is logged once and never fails a save or a restore. They
run in the thread that ends the operation, before its result is returned.

Example:
    >>> telemetry = Telemetry("file:///tmp/ckpts", step_logger=logger)
    >>> telemetry.save_began()
"""

import logging
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any, Protocol, assert_never

from storesvc_client._values.otel import OpenSpan, emit, measure
from storesvc_client._values.report_events import (
    Event,
    failure_event,
    orbax_restore_events,
    orbax_save_events,
    restore_events,
    restore_statistics,
    save_events,
    save_statistics,
    start_event,
)
from storesvc_client._values.report_spans import (
    Span,
    Unfinished,
    error_type,
    failed_span,
    restore_span,
    save_span,
)
from storesvc_client._values.reports import RestoreReport, SaveReport
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import InvalidRequestError

_log = logging.getLogger("storesvc_client")


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
        """Creates the monitoring; nothing is sent yet.

        Args:
            root: Root of the store or address of its server, for people.
            orbax_events: Whether to send the events that dashboards of Orbax use, too.
            step_logger: Receives the step statistics; None: they are not sent.

        Raises:
            InvalidRequestError: ``orbax_events`` is no bool, or ``step_logger`` has no
                ``log_entry``.
        """
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
        """Sends the failure of a save."""
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
        """Sends the failure of a restore.

        Args:
            error: The error that it raises.
            failed: Its measurements.
            begun: What ``restore_began`` returned.
        """
        self._send([failure_event("restore", error)])
        self._end(begun, failed_span("restore", failed, error))

    @contextmanager
    def tracing(self, name: str, *, run: str) -> Generator[None]:
        """Emits a span around several operations, which has their error.

        Args:
            name: Name of the span.
            run: Name of the run.
        """
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
        """Sends the report of a committed save.

        Args:
            report: The report of this process.
            checkpoint: The committed checkpoint.
            process: Index of this process in its job; as in Orbax, only process 0 sends
                Orbax's events.
        """
        directory = self._root + report.run
        events = save_events(report)
        if self._orbax_events and process == 0:
            events += orbax_save_events(report, checkpoint, directory)
        self._send(events)
        self._emit(save_span(report, process=process), upload=report.upload)
        self._log_step(save_statistics, report, directory)

    def restored(
        self, report: RestoreReport, *, process: int, begun: OpenSpan | None
    ) -> None:
        """Sends the report of a restore that succeeded.

        Args:
            report: The report of this process.
            process: As for ``saved``.
            begun: What ``restore_began`` returned.
        """
        directory = self._root + report.run
        events = restore_events(report)
        if self._orbax_events and process == 0:
            events += orbax_restore_events(report, directory)
        self._send(events)
        self._end(begun, restore_span(report, process=process))
        self._log_step(restore_statistics, report, directory)

    def _log_step(
        self, statistics: Callable[[Any, str], dict[str, object]], *of: object
    ) -> None:
        if self._step_logger is None:
            return
        try:
            self._step_logger.log_entry(statistics(*of))  # type: ignore[arg-type]
        except Exception as e:  # noqa: BLE001 - code of the caller
            self._warn("the step logger", e)

    def _emit(self, span: Span, *, upload: str = "") -> None:
        try:
            emit(span, upload=upload)
        except Exception as e:  # noqa: BLE001 - exporters are code of the caller
            self._warn("a tracer of OpenTelemetry", e)

    def _open(self, name: str, start: float) -> OpenSpan | None:
        try:
            return OpenSpan(name, start)
        except Exception as e:  # noqa: BLE001 - samplers are code of the caller
            self._warn("a tracer of OpenTelemetry", e)
            return None

    def _end(self, begun: OpenSpan | None, span: Span) -> None:
        try:
            if begun is not None:
                begun.end(span)
        except Exception as e:  # noqa: BLE001 - exporters are code of the caller
            self._warn("a tracer of OpenTelemetry", e)

    def _send(self, events: Sequence[Event]) -> None:
        """Passes events to OpenTelemetry, and to the listeners of jax, each if this
        process has imported it."""
        try:
            measure(events)
        except Exception as e:  # noqa: BLE001 - readers are code of the caller
            self._warn("a meter of OpenTelemetry", e)
        monitoring = sys.modules.get("jax.monitoring")
        if monitoring is None:
            return
        for event in events:
            try:
                _record(monitoring, event)
            except Exception as e:  # noqa: BLE001 - listeners are code of the caller
                self._warn("a listener of jax.monitoring", e)

    def _warn(self, receiver: str, error: Exception) -> None:
        if receiver not in self._failed:
            self._failed.add(receiver)
            _log.warning(
                "%s failed, which affects no save or restore; later failures are not "
                "logged: %r",
                receiver,
                error,
            )


def _record(monitoring: Any, event: Event) -> None:
    match event.kind:
        case "event":
            monitoring.record_event(event.name, **event.tags)
        case "duration":
            monitoring.record_event_duration_secs(event.name, event.value, **event.tags)
        case "scalar":
            monitoring.record_scalar(event.name, event.value, **event.tags)
        case _:
            assert_never(event.kind)
