"""Projects reports of saves and restores to spans of a trace.

A span repeats what a report says and adds nothing, so the two cannot disagree. A phase
is one span from its first start to its last end, however many threads worked in it; the
attribute ``storesvc.busy_seconds`` is the sum over the threads. Attributes have the
names of the fields of the report. An operation that failed has the phases that it came
to, and the reason of its error; never the text of the error, which may have names and
values of the user.

Example:
    >>> span = restore_span(report, process=0)
    >>> span.name, [child.name for child in span.children]
    ('storesvc.restore', ['plan', 'read', 'verify', 'place', 'rebuild'])
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeAlias

from storesvc_client._values.report_events import Operation
from storesvc_client._values.reports import PhaseSpan, RestoreReport, SaveReport
from storesvc_client.errors import StoreError

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
    """Returns the span of a committed save.

    Args:
        report: The report of this process.
        process: Index of this process in its job.
    """
    start = report.start_time.timestamp()
    events: dict[str, Mapping[str, Attribute]] = {}
    if report.slowest:
        events["slowest part"] = _slowest(report.slowest, report.slowest_seconds)
    if report.last_process:
        events["last process"] = {"storesvc.last_process": report.last_process}
    return Span(
        name="storesvc.save",
        start=start,
        end=start + report.seconds,
        attributes={
            "storesvc.run": report.run,
            "storesvc.step": report.step,
            "storesvc.process": process,
            "storesvc.upload": report.upload,
            "storesvc.total_bytes": report.total_bytes,
            "storesvc.sent_bytes": report.sent_bytes,
            "storesvc.reused_bytes": report.reused_bytes,
            "storesvc.blocking_seconds": report.blocking_seconds,
        },
        events=events,
        children=tuple(_phases(start, report.timeline)),
    )


def restore_span(report: RestoreReport, *, process: int) -> Span:
    """Returns the span of a restore that succeeded; arguments as of ``save_span``."""
    start = report.start_time.timestamp()
    events: dict[str, Mapping[str, Attribute]] = {}
    if report.slowest:
        events["slowest part"] = _slowest(report.slowest, report.slowest_seconds)
    if (other := report.slowest_process) is not None:
        events["slowest process"] = {
            "storesvc.slowest_process": other.process,
            "storesvc.seconds": other.seconds,
        }
    for step, damage in report.damaged.items():
        events[f"damaged step {step}"] = {"storesvc.damage": damage}
    return Span(
        name="storesvc.restore",
        start=start,
        end=start + report.seconds,
        attributes={
            "storesvc.run": report.run,
            "storesvc.step": report.step,
            "storesvc.process": process,
            "storesvc.read_bytes": report.read_bytes,
            "storesvc.received_bytes": report.received_bytes,
            "storesvc.returned_bytes": report.returned_bytes,
        },
        events=events,
        children=tuple(_phases(start, report.timeline)),
    )


def failed_span(what: Operation, failed: Unfinished, error: BaseException) -> Span:
    """Returns the span of a save or a restore that failed.

    Args:
        what: The operation.
        failed: Its measurements.
        error: The error that ended it.
    """
    start, reason = failed.start_time.timestamp(), error_type(error)
    attributes: dict[str, Attribute] = {
        "storesvc.run": failed.run,
        "storesvc.step": failed.step,
        "storesvc.process": failed.process,
        "error.type": reason,
    }
    if failed.upload:
        attributes["storesvc.upload"] = failed.upload
    return Span(
        name=f"storesvc.{what}",
        start=start,
        end=start + failed.seconds,
        attributes=attributes,
        children=tuple(_phases(start, failed.timeline)),
        error=reason,
    )


def error_type(error: BaseException) -> str:
    """Returns the reason of an error, or the name of its class if it has none."""
    reason = error.reason if isinstance(error, StoreError) else ""
    return reason or type(error).__name__


def _slowest(name: str, seconds: float) -> Mapping[str, Attribute]:
    return {"storesvc.slowest": name, "storesvc.slowest_seconds": seconds}


def _phases(start: float, timeline: Iterable[PhaseSpan]) -> Iterable[Span]:
    for phase in timeline:
        yield Span(
            name=phase.name,
            start=start + phase.start_seconds,
            end=start + phase.end_seconds,
            attributes={"storesvc.busy_seconds": phase.busy_seconds},
        )
