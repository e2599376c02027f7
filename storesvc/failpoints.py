"""Failpoints: named places in the service where a test can inject a fault.

There is one at each step of every operation that changes a store. If none is armed,
`reach` only looks at an empty dict. The environment of ``storectl serve`` arms them:

    STORESVC_FAILPOINTS="commit.before_record=kill,begin.before_slot=delay:0.5@2"

``@2`` injects the fault only the second time the point is reached; without it, every
time. The actions:

    kill           sends SIGKILL to the own process
    raise          raises the error of a storage that does not answer
    delay:SECONDS  waits
    drop_reply     completes the operation, but fails the call; only at points named
                   ``before_reply``

A released version refuses to start with any failpoint armed.
"""

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, assert_never

from storesvc.errors import InvalidFieldError, StorageUnavailableError

VARIABLE: Final = "STORESVC_FAILPOINTS"
"""Environment variable that arms failpoints."""

_FORM: Final = re.compile(
    r"(?P<point>[^=]+)=(?P<action>[a-z_]+)(:(?P<seconds>[0-9]{1,5}(\.[0-9]{1,5})?))?"
    r"(@(?P<time>[1-9][0-9]{0,8}))?"
)


class Failpoint(StrEnum):
    """A failpoint: the operation, and the step that comes next.

    ``delete`` covers every change of a committed checkpoint. ``write.before_reply`` is
    reached before the chunks of a batch are acknowledged.
    """

    BEGIN_BEFORE_RECORD = "begin.before_record"
    BEGIN_BEFORE_TREE = "begin.before_tree"
    BEGIN_BEFORE_SLOT = "begin.before_slot"
    BEGIN_BEFORE_REPLY = "begin.before_reply"
    WRITE_BEFORE_BATCH = "write.before_batch"
    WRITE_BEFORE_REPLY = "write.before_reply"
    FINISH_BEFORE_RECEIPT = "finish.before_receipt"
    FINISH_BEFORE_REPLY = "finish.before_reply"
    COMMIT_BEFORE_OBJECTS = "commit.before_objects"
    COMMIT_BEFORE_ANNOUNCEMENT = "commit.before_announcement"
    COMMIT_BEFORE_RECORD = "commit.before_record"
    COMMIT_BEFORE_DISCARD = "commit.before_discard"
    COMMIT_BEFORE_REPLY = "commit.before_reply"
    ABORT_BEFORE_SLOT = "abort.before_slot"
    ABORT_BEFORE_DISCARD = "abort.before_discard"
    ABORT_BEFORE_REPLY = "abort.before_reply"
    DELETE_BEFORE_ANNOUNCEMENT = "delete.before_announcement"
    DELETE_BEFORE_RECORD = "delete.before_record"
    DELETE_BEFORE_REPLY = "delete.before_reply"
    PURGE_BEFORE_MARK = "purge.before_mark"
    PURGE_AFTER_MARK = "purge.after_mark"
    PURGE_BEFORE_FREE = "purge.before_free"
    PURGE_BEFORE_REPLY = "purge.before_reply"
    COLLECT_BEFORE_LIST = "collect.before_list"
    COLLECT_BEFORE_ENDINGS = "collect.before_endings"
    COLLECT_BEFORE_MARKS = "collect.before_marks"
    COLLECT_BEFORE_DELETES = "collect.before_deletes"
    COLLECT_BEFORE_DELETE = "collect.before_delete"
    COLLECT_BEFORE_FLOOR = "collect.before_floor"
    COLLECT_BEFORE_EMPTYING = "collect.before_emptying"
    COLLECT_BEFORE_REPLY = "collect.before_reply"


class Action(StrEnum):
    """The fault that a failpoint injects."""

    KILL = "kill"
    RAISE = "raise"
    DELAY = "delay"
    DROP_REPLY = "drop_reply"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """An action, and the occurrence at which it is injected."""

    action: Action
    delay_seconds: float
    time: int | None
    """Occurrence, counted from 1; None: every one."""


_armed: dict[Failpoint, Fault] = {}
_reached: dict[Failpoint, int] = {}


async def reach(point: Failpoint) -> None:
    """Injects the fault that the point is armed with, if any."""
    if not _armed or point not in _armed:
        return
    fault = _armed[point]
    _reached[point] += 1
    if fault.time not in (None, _reached[point]):
        return
    match fault.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.DELAY:
            await asyncio.sleep(fault.delay_seconds)
        case Action.RAISE:
            raise StorageUnavailableError(f"failpoint {point}: the storage failed")
        case Action.DROP_REPLY:
            raise StorageUnavailableError(f"failpoint {point}: the reply was lost")
        case action:
            assert_never(action)


def times_reached(point: Failpoint) -> int:
    """Returns how often a point was reached since it was armed."""
    return _reached.get(point, 0)


def arm(faults: Mapping[Failpoint, Fault]) -> None:
    """Arms exactly these points of this process."""
    _armed.clear()
    _reached.clear()
    _reached.update(dict.fromkeys(faults, 0))
    _armed.update(faults)


@contextmanager
def arm_points(text: str) -> Iterator[None]:
    """Arms points while the context lasts."""
    arm(parse(text))
    try:
        yield
    finally:
        arm({})


def arm_from(environment: Mapping[str, str], *, version: str) -> None:
    """Arms the failpoints that the environment names."""
    text = environment.get(VARIABLE, "")
    if not text:
        return
    if not is_development(version):
        raise InvalidFieldError(
            f"{VARIABLE}: expected it unset, because storesvc {version} is a release "
            f"and failpoints are for tests, got {text!r}; unset it"
        )
    arm(parse(text))


def is_development(version: str) -> bool:
    """Returns whether a version (PEP 440) is a development version."""
    return re.search(r"\.dev[0-9]*(\+|$)", version) is not None


def parse(text: str) -> dict[Failpoint, Fault]:
    """Parses the value of the environment variable."""
    return dict(_parse_one(entry.strip()) for entry in text.split(",") if entry.strip())


def _parse_one(entry: str) -> tuple[Failpoint, Fault]:
    found = _FORM.fullmatch(entry)
    if found is None:
        raise InvalidFieldError(
            f"{VARIABLE}: expected POINT=ACTION or POINT=ACTION@TIME, got {entry!r}"
        )
    if found["point"] not in set(Failpoint):
        raise InvalidFieldError(
            f"{VARIABLE}: expected a point of {', '.join(Failpoint)}; got "
            f"{found['point']!r}"
        )
    point = Failpoint(found["point"])
    takes_seconds = found["action"] == Action.DELAY
    if (
        found["action"] not in set(Action)
        or (found["seconds"] is not None) != takes_seconds
    ):
        raise InvalidFieldError(
            f"{VARIABLE}: {point}: expected kill, raise, delay:SECONDS or drop_reply, "
            f"got {entry.partition('=')[2]!r}"
        )
    action = Action(found["action"])
    if action is Action.DROP_REPLY and not drops_reply(point):
        raise InvalidFieldError(
            f"{VARIABLE}: {point}: expected kill, raise or delay:SECONDS, because "
            "nothing is answered there, got drop_reply"
        )
    return point, Fault(
        action=action,
        delay_seconds=float(found["seconds"] or 0),
        time=int(found["time"]) if found["time"] else None,
    )


def drops_reply(point: Failpoint) -> bool:
    """Returns whether only the reply remains to be sent at this point."""
    return point.endswith(".before_reply")
