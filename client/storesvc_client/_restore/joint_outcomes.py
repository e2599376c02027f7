"""What the processes of a job are told of a restore that all of them make."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from storesvc_client._job.job import Outcome
from storesvc_client._values.values import ProcessReading
from storesvc_client.errors import PeerFailedError, UnavailableError

_SHOWN: Final = 4
"""Processes that a message lists."""


def outcome_of(reading: ProcessReading) -> Outcome:
    """Returns what a process tells that has ended well."""
    return Outcome(name=json.dumps(asdict(reading)))


def failed(what: str, told: Sequence[str]) -> Outcome:
    """Returns the verdict where processes have failed.

    Args:
        what: Was to be restored.
        told: By each of them.
    """
    return Outcome(
        failure=f"restore of {what} was given up by another process of the job: "
        f"{listed(told)}",
        kind=PeerFailedError.__name__,
    )


def absent(what: str, who: str, seconds: float) -> Outcome:
    """Returns the verdict where a process does not ask in time."""
    return Outcome(
        failure=f"restore of {what}: {who} has not asked for it in {seconds:g} s; "
        "restore in all processes of the job, or with Distributed(processes='this')",
        kind=UnavailableError.__name__,
    )


def late(what: str, who: str, seconds: float, news: str) -> Outcome:
    """Returns the verdict where a process that has asked does not begin in time.

    Args:
        what: Is to be restored.
        who: Does not begin.
        seconds: How long it was waited for.
        news: Of it, behind a colon; "": there are none.
    """
    return Outcome(
        failure=f"restore of {what}: {who} is not ready to read after {seconds:g} s"
        f"{news}; look for what keeps it, or allow more time",
        kind=UnavailableError.__name__,
    )


def listed(told: Sequence[str]) -> str:
    """Returns what processes told, for messages."""
    more = f"; and {len(told) - _SHOWN} more" if len(told) > _SHOWN else ""
    return "; ".join(told[:_SHOWN]) + more
