"""The log throttle admits one line per key every ten seconds."""

from storesvc.storage.hedging import PAUSE_SECONDS, LogThrottle


def test_one_line_per_key_is_admitted_every_ten_seconds() -> None:
    lines = LogThrottle()
    reported = [now for now in range(100) if lines.admits("late", now=float(now))]

    assert list(range(0, 100, int(PAUSE_SECONDS))) == reported


def test_lines_of_another_key_are_admitted_in_between() -> None:
    lines = LogThrottle()

    assert lines.admits("late", now=0.0)
    assert lines.admits("denied", now=1.0)
    assert not lines.admits("late", now=1.0)
