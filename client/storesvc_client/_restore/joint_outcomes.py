"""Outcomes that processes of a job publish about a joint restore."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from storesvc_client._job.job import Outcome
from storesvc_client._values.reports import ProcessReading
from storesvc_client.errors import PeerFailedError, UnavailableError

_SHOWN: Final = 4
"""Maximum processes listed in a message."""


def outcome_of(reading: ProcessReading) -> Outcome:
    """Returns the outcome of a process that has restored successfully."""
    return Outcome(name=json.dumps(asdict(reading)))


def failed(what: str, failures: Sequence[str]) -> Outcome:
    """Returns the verdict if processes have failed.

    Args:
        what: What was to be restored.
        failures: Failures of those processes.
    """
    return Outcome(
        failure=f"restore of {what} failed in another process of the job: "
        f"{listed(failures)}",
        kind=PeerFailedError.__name__,
    )


def absent(what: str, process: str, seconds: float) -> Outcome:
    """Returns the verdict if a process does not call restore in time."""
    return Outcome(
        failure=f"restore of {what}: {process} has not called it within {seconds:g} s; "
        "restore in all processes of the job, or with Distributed(processes='this')",
        kind=UnavailableError.__name__,
    )


def late(what: str, process: str, seconds: float, progress: str) -> Outcome:
    """Returns the verdict if a process has called restore but is not ready in time.

    Args:
        what: What is to be restored.
        process: The process that is not ready.
        seconds: Time waited for it.
        progress: Its last progress after a colon, or "".
    """
    return Outcome(
        failure=f"restore of {what}: {process} is not ready to read after {seconds:g} s"
        f"{progress}; check that process, or pass a longer deadline=",
        kind=UnavailableError.__name__,
    )


def listed(failures: Sequence[str]) -> str:
    """Returns the first few failures as one text, for messages."""
    more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
    return "; ".join(failures[:_SHOWN]) + more
