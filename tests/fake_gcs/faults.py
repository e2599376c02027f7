"""Faults: errors, delays and broken connections in place of normal responses.

    faults.add(r"POST /upload.*manifest", Status(503), times=2, after=1)

applies to the second and third of the requests in whose "METHOD target" the regular
expression is found. The target is percent-decoded. If several faults match a request,
the oldest one applies.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeAlias

ALWAYS: Final = sys.maxsize
"""So many times that it is an outage."""


@dataclass(frozen=True, slots=True)
class Status:
    """Nothing is done, and this is answered."""

    code: int
    retry_after_seconds: int | None = None
    message: str = "A fault of the emulator."

    def __post_init__(self) -> None:
        HTTPStatus(self.code)  # refuses what is none


@dataclass(frozen=True, slots=True)
class Reset:
    """Nothing is done, and the connection breaks."""


@dataclass(frozen=True, slots=True)
class Lost:
    """It is done, and the connection breaks: the client cannot know."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """It is done, and the connection breaks after some bytes of the answer's body."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """It is done, and one bit of the answer's body is another."""


@dataclass(frozen=True, slots=True)
class Delay:
    """It is done later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Late:
    """It is done, and answered later."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing is done, and nothing answered for as long as the client waits."""


@dataclass(frozen=True, slots=True)
class Mute:
    """It is done, and nothing answered for as long as the client waits."""


Action: TypeAlias = (
    Status | Reset | Lost | Truncate | Corrupt | Delay | Late | Stall | Mute
)

_ACTIONS: Final[Mapping[str, type[Action]]] = {
    "status": Status,
    "reset": Reset,
    "lost": Lost,
    "truncate": Truncate,
    "corrupt": Corrupt,
    "delay": Delay,
    "late": Late,
    "stall": Stall,
    "mute": Mute,
}


def parse_action(document: Mapping[str, Any]) -> Action:
    """Returns an action from its JSON: its name under "kind", and its fields."""
    fields = dict(document)
    return _ACTIONS[fields.pop("kind")](**fields)


@dataclass(slots=True, kw_only=True)
class _Fault:
    pattern: re.Pattern[str]
    action: Action
    times: int
    after: int
    matches: int = 0

    def meets(self, line: str) -> bool:
        """Whether it becomes due with a request."""
        if not self.pattern.search(line):
            return False
        self.matches += 1
        return self.matches > self.after and self.times > 0


class Faults:
    """The faults that are still to come."""

    def __init__(self) -> None:
        self._faults: list[_Fault] = []

    def add(
        self, pattern: str, action: Action, *, times: int = 1, after: int = 0
    ) -> None:
        """Adds a fault.

        Args:
            pattern: Finds something in the "METHOD target" of the requests meant.
            action: What becomes of them.
            times: Of how many.
            after: How many go unharmed before.
        """
        fault = _Fault(
            pattern=re.compile(pattern), action=action, times=times, after=after
        )
        self._faults.append(fault)

    def clear(self) -> None:
        """Forgets all."""
        self._faults.clear()

    def next_for(self, line: str) -> Action | None:
        """Returns what becomes of a request, or None where it goes unharmed."""
        # every fault counts the request, whichever of them it meets
        due = [fault for fault in self._faults if fault.meets(line)]
        if not due:
            return None
        due[0].times -= 1
        return due[0].action
