"""A lease expires by the observations of one process, not by other clocks."""

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from storesvc.catalog.slots import MARGIN, Observations

START = datetime(2030, 1, 1, tzinfo=UTC)
LENGTH = timedelta(seconds=60)
DAYS = timedelta(days=1)

skews = st.timedeltas(-400 * DAYS, 400 * DAYS)
shares = st.floats(0.01, 0.99)


@dataclass
class Watcher:
    """A process that looks at one lease from time to time."""

    observations: Observations = field(default_factory=Observations)
    renewals: int = 0
    renew_time: datetime = START
    seconds: float = 1000.0

    def renew(self, at: datetime) -> None:
        """The holder renews it, by its own clock."""
        self.renewals += 1
        self.renew_time = at

    def is_over(self, *, after: float, clock_now: datetime = START) -> bool:
        """Looks, some seconds after the last look."""
        self.seconds += after
        return self.observations.is_over(
            "lease",
            str(self.renewals).encode(),
            length=LENGTH,
            renew_time=self.renew_time,
            clock_now=clock_now,
            elapsed=self.seconds,
        )


@given(st.lists(st.tuples(shares, skews, skews), max_size=20))
def test_a_lease_that_changes_in_time_is_never_over_however_the_clocks_jump(
    looks: list[tuple[float, timedelta, timedelta]],
) -> None:
    watcher = Watcher()
    assert not watcher.is_over(after=0)

    for share, of_holder, of_watcher in looks:
        seconds = share * LENGTH.total_seconds()
        assert not watcher.is_over(after=seconds, clock_now=START + of_watcher)
        watcher.renew(START + of_holder)
        assert not watcher.is_over(after=0, clock_now=START + of_watcher)


@given(
    st.timedeltas(-400 * DAYS, MARGIN),
    st.lists(st.tuples(shares, skews), min_size=1, max_size=20),
)
def test_one_that_does_not_change_is_over_after_its_length_and_not_before(
    behind: timedelta, looks: list[tuple[float, timedelta]]
) -> None:
    watcher = Watcher()
    watcher.is_over(after=0, clock_now=START + behind)

    passed = 0.0
    for share, skew in looks:
        seconds = share * LENGTH.total_seconds()
        passed += seconds
        is_over = watcher.is_over(after=seconds, clock_now=START + skew)
        assert (passed >= LENGTH.total_seconds()) == is_over or (
            abs(passed - LENGTH.total_seconds()) < 1e-6
        )
    assert watcher.is_over(after=LENGTH.total_seconds())


@given(st.timedeltas(timedelta(seconds=1), 400 * DAYS))
def test_one_that_ended_longer_ago_than_any_clock_is_wrong_is_over_at_first_sight(
    longer: timedelta,
) -> None:
    watcher = Watcher()

    assert watcher.is_over(after=0, clock_now=START + LENGTH + MARGIN + longer)


def test_one_that_was_over_and_is_renewed_lives_again() -> None:
    watcher = Watcher()
    assert watcher.is_over(after=0, clock_now=START + 9 * DAYS)

    watcher.renew(START + 9 * DAYS)

    assert not watcher.is_over(after=0, clock_now=START + 9 * DAYS)
    assert not watcher.is_over(after=59, clock_now=START + 99 * DAYS)
    assert watcher.is_over(after=1, clock_now=START)


def test_what_is_forgotten_is_seen_for_the_first_time_again() -> None:
    watcher = Watcher()
    watcher.is_over(after=0)

    watcher.observations.forget("le", but={"lease"})
    watcher.observations.forget("other", but=())
    assert watcher.is_over(after=60)
    watcher.observations.forget("le", but={"another"})
    assert not watcher.is_over(after=0)


def test_leases_of_other_runs_are_not_looked_at_to_forget_those_of_one() -> None:
    observations = Observations()
    runs = [f"data/many/{number:05d}/" for number in range(20_000)]
    for run in runs:
        observations.is_over(
            f"{run}lease",
            b"",
            length=LENGTH,
            renew_time=START,
            clock_now=START,
            elapsed=0,
        )

    began = time.process_time()
    for run in runs:
        observations.forget(run, but=())

    # a look at each of 20,000 for each of 20,000 takes 20 s
    assert time.process_time() - began < 5
    assert not observations._keys
    assert not observations._leases
