"""The claims of the demo: each one fails when it is false."""

import signal

import pytest

from storesvc_client.demo.job import History, make_claims
from storesvc_client.demo.processes import (
    Committed,
    Event,
    Restored,
    SaveBegun,
    Step,
    line,
    parse,
)

LOSSES = {step: 6.0 / step for step in range(1, 13)}


def steps(first: int, last: int, factor: float = 1.0) -> list[Event]:
    return [
        Step(step=step, loss=LOSSES[step] * factor, mesh="x=8")
        for step in range(first, last + 1)
    ]


def save(step: int) -> list[Event]:
    return [
        SaveBegun(step=step, blocked_seconds=0.1),
        Committed(step=step, size_bytes=8),
    ]


def restored(step: int = 6, digest: str = "d") -> Event:
    return Restored(
        step=step, mesh="x=8", leaf_count=1, size_bytes=8, seconds=0.1, digest=digest
    )


def killed(exit_code: int = -signal.SIGKILL, last: int = 8) -> History:
    events = [*steps(1, 6), *save(6), *steps(7, last)]
    return History(events, exit_code=exit_code)


def resumed(*, digest: str = "d", step: int = 6, factor: float = 1.0) -> History:
    events = [restored(step, digest), *steps(step + 1, 12, factor)]
    return History(events, exit_code=0)


AS_CLAIMED = {
    "reference": History(steps(1, 12), exit_code=0),
    "killed": killed(),
    "moved": resumed(factor=1 + 1e-7),
    "stayed": resumed(),
}


def failing(**other: History) -> list[str]:
    """Returns the claims that fail for runs other than claimed."""
    claims = make_claims(**(AS_CLAIMED | other))
    return [claim.text for claim in claims if not claim.held]


def test_runs_that_are_as_claimed_fail_no_claim() -> None:
    assert [] == failing()


@pytest.mark.parametrize(
    ("run", "other", "expected"),
    [
        ("reference", History(steps(1, 12, 0.5), exit_code=0), "Before the kill"),
        ("killed", killed(exit_code=1), "died of SIGKILL"),
        ("killed", killed(last=7), "between two saves"),
        ("stayed", resumed(step=5), "last checkpoint"),
        ("stayed", resumed(digest="e"), "bitwise the saved one"),
        ("stayed", resumed(factor=1 + 2e-16), "Resumed on the same mesh"),
        ("moved", resumed(factor=1 + 1e-4), "Resumed on another mesh"),
    ],
)
def test_a_claim_fails_when_it_is_false(
    run: str, other: History, expected: str
) -> None:
    assert any(expected in text for text in failing(**{run: other}))


def test_a_model_that_does_not_learn_fails_its_claim() -> None:
    flat = History(
        [Step(step=step, loss=6.0, mesh="x=8") for step in range(1, 13)], exit_code=0
    )

    assert "The model learns" in failing(reference=flat)


@pytest.mark.parametrize("event", [*steps(3, 3, 1 / 3), *save(4), restored()])
def test_an_event_comes_back_from_its_line_bit_by_bit(event: Event) -> None:
    assert event == parse(line(event))


@pytest.mark.parametrize("text", ["", "a warning", "3", "{}", '{"event": "Other"}'])
def test_a_line_of_something_else_is_no_event(text: str) -> None:
    assert parse(text) is None
