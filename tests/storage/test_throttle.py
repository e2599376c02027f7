"""The window of requests in flight: it shrinks when a storage rejects requests, and a
storage that rejects everything gets few."""

import pytest

from storesvc.storage.throttle import (
    FIRST_PAUSE_SECONDS,
    FULL_SECONDS,
    MAX_PAUSE_SECONDS,
    MAX_RETRY_AFTER_SECONDS,
    SLOW_LIMIT,
    STALLED_SECONDS,
    Outcome,
    Window,
    classify,
)

STORM_SECONDS = 60.0


def answer(window: Window, count: int, *, now: float, seconds: float = 0.1) -> None:
    """Has requests answered one after another."""
    for _ in range(count):
        assert 0.0 == window.admit(now=now)
        window.release(Outcome.ANSWERED, began=now, now=now + seconds)
        now += seconds


def reject(window: Window, *, now: float, retry_after_seconds: float = 0.0) -> None:
    assert 0.0 == window.admit(now=now)
    window.release(
        Outcome.OVERLOADED, began=now, now=now, retry_after_seconds=retry_after_seconds
    )


def test_a_window_admits_as_many_requests_as_its_ceiling() -> None:
    window = Window(3)

    assert [0.0, 0.0, 0.0] == [window.admit(now=0) for _ in range(3)]
    assert FULL_SECONDS == window.admit(now=0)
    window.release(Outcome.DROPPED, began=0, now=1)
    assert 0.0 == window.admit(now=1)


def test_a_request_that_may_have_stalled_does_not_hold_up_its_retry() -> None:
    window = Window(1)
    window.admit(now=0)
    assert FULL_SECONDS == window.admit(now=STALLED_SECONDS - 0.1)

    assert 0.0 == window.admit(now=STALLED_SECONDS)
    assert FULL_SECONDS == window.admit(now=STALLED_SECONDS)
    window.release(Outcome.DROPPED, began=0, now=20)
    assert FULL_SECONDS == window.admit(now=20)


def test_the_rejections_of_one_window_halve_it_once() -> None:
    window = Window(8)
    for _ in range(8):
        window.admit(now=0)

    for at in range(8):
        window.release(Outcome.OVERLOADED, began=0, now=1 + at / 100)

    assert 4 == window.limit


def test_an_answer_after_rejections_opens_the_window_again() -> None:
    window = Window(64)
    reject(window, now=0)
    assert window.is_rejecting
    assert 0.0 == window.admit(now=10)
    assert 0.25 == window.admit(now=10)  # one after each pause

    window.release(Outcome.ANSWERED, began=10, now=11)

    assert not window.is_rejecting
    assert [0.0] * 32 == [window.admit(now=11) for _ in range(32)]


def test_the_window_grows_by_one_for_each_window_of_answers() -> None:
    window = Window(64)
    reject(window, now=0)

    answer(window, 33, now=10)
    assert 32.9 < window.limit < 33.1
    answer(window, 64 * 64, now=100)
    assert 64 == window.limit


def test_the_window_recovers_from_an_outage_faster_than_from_load() -> None:
    window = Window(128)
    for at in range(20):
        reject(window, now=at * 10)
    assert 1 == window.limit

    answer(window, 64, now=1000)

    assert window.limit >= 64


def test_a_storage_that_rejects_everything_gets_less_than_a_request_a_second() -> None:
    window, now, sent = Window(128), 0.0, 0
    while window.admit(now=now) == 0.0:  # all at once, as a save does
        sent += 1
    for _ in range(sent):
        window.release(Outcome.OVERLOADED, began=now, now=now + 0.01)
    initial = sent
    while now < STORM_SECONDS:
        if wait := window.admit(now=now):
            now += wait
            continue
        sent += 1
        window.release(Outcome.OVERLOADED, began=now, now=now)

    assert sent - initial <= 12
    assert window.admit(now=now) <= MAX_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("asked", "pause"), [(30, 30), (3600, MAX_RETRY_AFTER_SECONDS), (0, 0.25)]
)
def test_a_pause_is_as_long_as_the_storage_asks_for(asked: float, pause: float) -> None:
    window = Window(8)
    reject(window, now=0, retry_after_seconds=asked)

    assert pause == window.admit(now=0)


def test_rising_latency_shrinks_the_window_and_its_floor_holds() -> None:
    window = Window(128)
    answer(window, 100, now=100, seconds=0.2)
    assert 128 == window.limit

    for at in range(100):
        answer(window, 1, now=200 + 10 * at, seconds=5)

    assert SLOW_LIMIT <= window.limit < 2 * SLOW_LIMIT


def test_slow_responses_of_a_storage_that_is_always_slow_are_usual() -> None:
    window = Window(128)
    answer(window, 1000, now=100, seconds=5)

    assert 128 == window.limit


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("ABORTED: All 0 retry [http_response_code='503']", Outcome.OVERLOADED),
        ("non-2xx status code: 429 Too Many Requests", Outcome.OVERLOADED),
        ("Timeout of 0.0s exceeded, last exception: 503 GET", Outcome.OVERLOADED),
        ("ABORTED: All 0 retry: CURL error [curl_code='56']", Outcome.BROKEN),
        ("Generic S3 error: HTTP error: error sending request", Outcome.BROKEN),
        (
            "ABORTED: All: rate limit for object mutation [http_response_code='429']",
            Outcome.BROKEN,
        ),
        (
            "OUT_OF_RANGE: Requested byte range [0, 9) was not [...] total size 9",
            Outcome.BROKEN,
        ),
        (
            "OUT_OF_RANGE: Requested byte range [0, 9) was not [...] total size 5",
            Outcome.ANSWERED,
        ),
        ("PERMISSION_DENIED: [http_response_code='403']", Outcome.ANSWERED),
        ("non-2xx status code: 412 Precondition Failed", Outcome.ANSWERED),
        (
            "non-2xx status code: 404\n\nDebug source: elapsed: 512.3µs",
            Outcome.ANSWERED,
        ),
    ],
)
def test_an_error_says_how_a_request_ended(text: str, outcome: Outcome) -> None:
    assert outcome is classify(ValueError(text))
    assert Outcome.ANSWERED is classify(None)


def test_a_probe_that_is_answered_lets_one_request_pass_and_ends_no_rejection() -> None:
    window = Window(8)
    reject(window, now=0, retry_after_seconds=30)

    assert 30 == window.admit(now=0)
    assert 0.0 == window.admit(now=30)
    window.release(Outcome.PROBED, began=30, now=31)
    assert [0.0, FIRST_PAUSE_SECONDS] == [window.admit(now=31) for _ in range(2)]
    assert window.is_rejecting
