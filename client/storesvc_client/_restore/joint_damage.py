"""Agrees, after a joint restore has failed, on whether damage was the cause.

Each process publishes what ended its part: damage that it found itself, the failure of
another process, or any other error. Process 0 waits for all of them and publishes its
verdict: the damage, if there is any and nothing else failed.
"""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final, Literal

from storesvc_client._job.job import Job
from storesvc_client.errors import DataLossError, PeerFailedError, StoreError

LEAST_SECONDS: Final = 60.0
"""Time that processes wait for each other even if the deadline of the restore is
nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The reason for which one process ended its part."""

    kind: Literal["damage", "peer", "other"]
    """Damage that it found, the failure of another process, or another error."""
    text: str = ""
    """The damage."""

    @classmethod
    def of(cls, error: StoreError) -> "Finding":
        """Returns the finding of a process that raises an error."""
        if isinstance(error, DataLossError):
            return cls(kind="damage", text=str(error))
        is_peer = isinstance(error, PeerFailedError)
        return cls(kind="peer" if is_peer else "other")


def damage_of(findings: Sequence[Finding]) -> str:
    """Returns the damage that ended a restore; "" if another error took part."""
    if any(finding.kind == "other" for finding in findings):
        return ""
    return next((each.text for each in findings if each.kind == "damage"), "")


def agreed_damage(
    job: Job, place: str, error: StoreError, *, seconds: float, is_final: bool
) -> str:
    """Returns the damage that ended a restore in all processes; "" if it was another
    error, or if processes do not answer.

    Args:
        job: The processes; each calls this.
        place: Key prefix of the restore on the board; "" if the processes did not meet.
        error: Error of this process.
        seconds: Time left for the restore.
        is_final: Whether no other checkpoint is left; process 0's counts.
    """
    if not place:
        return ""
    end = time.monotonic() + max(seconds, LEAST_SECONDS)
    own = Finding.of(error)
    with suppress(StoreError):  # the caller raises the original error
        if job.index != 0:
            job.post(_key(place, job.index), json.dumps(asdict(own)))
            if own.kind == "other":
                return ""
            # process 0 may wait as long for another process
            verdict = job.read(
                _key(place, 0), seconds=end + LEAST_SECONDS - time.monotonic()
            )
            return "" if verdict is None else json.loads(verdict)["text"]
        damage = ""
        if not is_final and own.kind != "other":
            damage = damage_of([own, *_gathered(job, place, end)])
        job.post(_key(place, 0), json.dumps({"text": damage}))
        return damage
    return ""


def _gathered(job: Job, place: str, end: float) -> list[Finding]:
    """Returns the findings of the other processes; an absent one counts as an error."""
    findings = []
    for index in range(1, job.count):
        text = job.read(_key(place, index), seconds=max(0.0, end - time.monotonic()))
        findings.append(Finding(kind="other") if text is None else _parsed(text))
    return findings


def _parsed(text: str) -> Finding:
    return Finding(**json.loads(text))


def _key(place: str, index: int) -> str:
    return f"{place}/damage/{index}"
