"""Faults: errors, delays and broken connections in place of normal responses.

    faults.add(r"POST /upload.*manifest", Status(503), times=2, after=1)

applies to the second and third of the requests in whose "METHOD target" the regular
expression is found. The target is percent-decoded. If several faults match a request,
the oldest one applies.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final, TypeAlias

from tests.fake_gcs.messages import Answer

ALWAYS: Final = sys.maxsize
"""Number of times for a fault that lasts until it is cleared."""


@dataclass(frozen=True, slots=True)
class Status:
    """The request is not executed, and gets this status."""

    code: int
    retry_after_seconds: int | None = None
    message: str = "A fault of the emulator."

    def __post_init__(self) -> None:
        HTTPStatus(self.code)  # raises ValueError for an unknown status


@dataclass(frozen=True, slots=True)
class Reset:
    """The request is not executed, and the connection breaks."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The request is executed, and the connection breaks before the response."""


@dataclass(frozen=True, slots=True)
class Truncate:
    """The request is executed, and the connection breaks within the response's body."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Short:
    """The request is executed, and the response's body ends early, as by a proxy that
    lost its stream: its length is that of what is sent."""

    body_bytes: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The request is executed, and one bit of the response's body is flipped."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The request is executed after a delay."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Late:
    """The request is executed at once, and answered after a delay."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The request is not executed, and never answered while the client waits."""


@dataclass(frozen=True, slots=True)
class Mute:
    """The request is executed, and never answered while the client waits."""


Action: TypeAlias = (
    Status | Reset | Lost | Truncate | Short | Corrupt | Delay | Late | Stall | Mute
)

_ACTIONS: Final[Mapping[str, type[Action]]] = {
    "status": Status,
    "reset": Reset,
    "lost": Lost,
    "truncate": Truncate,
    "short": Short,
    "corrupt": Corrupt,
    "delay": Delay,
    "late": Late,
    "stall": Stall,
    "mute": Mute,
}


def parse_action(document: Mapping[str, Any]) -> Action:
    """Returns an action from JSON: "kind" is its name, the rest are its fields."""
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
        """Counts a request; returns whether the fault applies to it."""
        if not self.pattern.search(line):
            return False
        self.matches += 1
        return self.matches > self.after and self.times > 0


class Faults:
    """The pending faults."""

    def __init__(self) -> None:
        self._faults: list[_Fault] = []

    def add(
        self, pattern: str, action: Action, *, times: int = 1, after: int = 0
    ) -> None:
        """Adds a fault.

        Args:
            pattern: Regular expression that is searched in "METHOD target".
            action: What happens to a matching request.
            times: Number of matching requests that it applies to.
            after: Number of matching requests to skip before.
        """
        fault = _Fault(
            pattern=re.compile(pattern), action=action, times=times, after=after
        )
        self._faults.append(fault)

    def clear(self) -> None:
        """Removes all faults."""
        self._faults.clear()

    def next_for(self, line: str) -> Action | None:
        """Returns the action for a request, or None if no fault applies."""
        # every matching fault counts the request, also if an older one applies
        due = [fault for fault in self._faults if fault.meets(line)]
        if not due:
            return None
        due[0].times -= 1
        return due[0].action


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The bytes to send, and the result of the request."""

    answer: Answer | None
    """Response, of which a prefix is sent; None: nothing is sent."""
    sent_bytes: int = 0
    """Bytes of its body to send."""
    stored_bytes: int = 0
    copied_bytes: int = 0
    breaks: bool = False
    """True if the connection then breaks."""


def outcome_of(
    action: Action | None,
    do: Callable[[], Answer],
    refuse: Callable[[int, str], Answer],
) -> Outcome:
    """Returns the outcome of a request.

    Args:
        action: Action of the fault that applies to it, if any.
        do: Executes the request; called unless the fault prevents it.
        refuse: Returns the response for a status and a message.
    """
    match action:
        case Reset() | Stall():
            return Outcome(answer=None, breaks=True)
        case Lost() | Mute():
            done = _sent(do())
            return replace(done, answer=None, sent_bytes=0, breaks=True)
        case Truncate(body_bytes):
            whole = _sent(do())
            sent_bytes = min(body_bytes, whole.sent_bytes)
            return replace(whole, sent_bytes=sent_bytes, breaks=True)
        case Short(body_bytes):
            answer = do()
            return _sent(replace(answer, body=answer.body[:body_bytes]))
        case Corrupt():
            return _sent(_corrupted(do()))
        case Status():
            return _sent(_injected(action, refuse))
    return _sent(do())


def _corrupted(answer: Answer) -> Answer:
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 1
    return replace(answer, body=bytes(body))


def _sent(answer: Answer) -> Outcome:
    return Outcome(
        answer=answer,
        sent_bytes=len(answer.body),
        stored_bytes=answer.stored_bytes,
        copied_bytes=answer.copied_bytes,
    )


def _injected(action: Status, refuse: Callable[[int, str], Answer]) -> Answer:
    answer = refuse(action.code, action.message)
    if action.retry_after_seconds is None:
        return answer
    headers = {**answer.headers, "retry-after": str(action.retry_after_seconds)}
    return replace(answer, headers=headers)
