"""Outcomes of requests, with and without faults."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.fake_gcs.faults import (
    Action,
    Corrupt,
    Lost,
    Mute,
    Reset,
    Stall,
    Status,
    Truncate,
)
from tests.fake_gcs.messages import Answer


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
