"""Retries of calls to a server that does not answer."""

import time

import pytest

from storesvc_client import LimitError, UnavailableError
from storesvc_client._rpc import retry
from storesvc_client._values.arguments import Deadline


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.2)


class JointCalls:
    """Calls of which the first ones fail."""

    def __init__(self, error: Exception, *, fail: int, seconds: float = 0) -> None:
        self.made = 0
        self._error, self._fail, self._seconds = error, fail, seconds

    def make(self) -> None:
        """Calls with retries."""
        for attempt in retry.attempts():
            with attempt:
                self.made += 1
                if self.made <= self._fail:
                    time.sleep(self._seconds)
                    raise self._error


def test_a_call_that_a_stopping_server_held_is_retried() -> None:
    calls = JointCalls(UnavailableError("the server stops"), fail=1, seconds=0.3)
    calls.make()
    assert 2 == calls.made


def test_an_unavailable_server_is_reported_after_the_retries() -> None:
    calls = JointCalls(UnavailableError("there is none"), fail=1_000_000)
    with pytest.raises(UnavailableError):
        calls.make()
    assert calls.made > 1


def test_a_permanent_error_is_raised_at_once() -> None:
    calls = JointCalls(ValueError("wrong"), fail=1)
    with pytest.raises(ValueError, match="wrong"):
        calls.make()
    assert 1 == calls.made


def test_a_deadline_error_names_the_cause_of_the_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 60)
    deadline, made = Deadline.after(0.3), list[str]()

    def act() -> None:
        made.append("did not answer in time" if deadline.left <= 0 else "refused")
        raise UnavailableError(made[-1])

    def retry_act() -> None:
        for attempt in retry.attempts(deadline=deadline):
            with attempt:
                act()

    with pytest.raises(UnavailableError, match="refused"):
        retry_act()

    assert "did not answer in time" == made[-1]


@pytest.mark.slow
def test_resource_exhaustion_is_retried_longer_than_unavailability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "PATIENCE_SECONDS", 0.0)
    busy = LimitError("no room", reason="LIMIT_EXCEEDED", retry_seconds=0.1)
    calls, began = JointCalls(busy, fail=4), time.monotonic()
    calls.make()
    assert 5 == calls.made
    assert time.monotonic() - began >= 0.4


def test_lasting_resource_exhaustion_fails_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "BUSY_SECONDS", 0.3)
    busy = LimitError("no room", reason="LIMIT_EXCEEDED", retry_seconds=0.1)
    with pytest.raises(LimitError):
        JointCalls(busy, fail=1_000_000).make()


@pytest.mark.parametrize(
    "error",
    [
        LimitError("too large", reason="LIMIT_EXCEEDED"),
        LimitError("full", reason="STORAGE_FULL", retry_seconds=60.0),
    ],
)
def test_a_permanent_limit_is_not_retried(error: LimitError) -> None:
    calls = JointCalls(error, fail=1)
    with pytest.raises(LimitError):
        calls.make()
    assert 1 == calls.made
