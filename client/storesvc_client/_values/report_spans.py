"""Projects reports of saves and restores to spans of a trace.

A span repeats what a report says and adds nothing, so the two cannot disagree. A phase
is one span from its first start to its last end, however many threads worked in it; the
attribute ``storesvc.busy_seconds`` is the sum over the threads. Attributes have the
names of the fields of the report.

Example:
    >>> span = restore_span(report, process=0)
    >>> span.name, [child.name for child in span.children]
    ('storesvc.restore', ['plan', 'read', 'verify', 'place', 'rebuild'])
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from storesvc_client._values.reports import PhaseSpan, RestoreReport, SaveReport

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
