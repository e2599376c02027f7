"""Of many lines that tell alike, the log gets one in a while."""

from storesvc.storage.log_throttle import PAUSE_SECONDS, LogThrottle


def test_of_lines_that_tell_alike_one_in_a_while_is_admitted() -> None:
    lines = LogThrottle()
    told = [now for now in range(100) if lines.admits("late", now=float(now))]

    assert list(range(0, 100, int(PAUSE_SECONDS))) == told


def test_lines_that_tell_something_else_are_admitted_beside_them() -> None:
    lines = LogThrottle()

    assert lines.admits("late", now=0.0)
    assert lines.admits("denied", now=1.0)
    assert not lines.admits("late", now=1.0)
