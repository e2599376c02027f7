"""Projects reports of saves and restores to events for monitoring.

An event repeats what a report says and adds nothing, so the two cannot disagree.
Durations are in seconds, and scalars are plain numbers. Orbax defines the names
``/jax/orbax/...`` and the keys of the step statistics, which dashboards and
ml-goodput-measurement read.

Example:
    >>> events = restore_events(report)
    >>> events[0]
    Event(kind='event', name='/jax/storesvc/restore/success', value=1, tags={})
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from storesvc_client._values.reports import RestoreReport, SaveReport
from storesvc_client._values.values import Checkpoint

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
    """Returns the events of a save that was committed."""
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
    """Returns the events of a restore that succeeded."""
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
