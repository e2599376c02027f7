"""What lies on the shelf: what is read next, and what goes."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from storesvc.restore.read_scheduler import Need, Reader, Shelf


class Unit(NamedTuple):
    """A unit of a size."""

    number: int
    size: int = 10


def units(*numbers: int) -> list[Unit]:
    return [Unit(number) for number in numbers]


def put(shelf: Shelf[Unit], *numbers: int) -> None:
    """Reads units, for which there is room."""
    for unit in units(*numbers):
        assert [] == shelf.make_room(unit, Need.NOW)
        shelf.arrive(unit)


def test_a_reader_takes_what_is_here_before_what_comes_first() -> None:
    shelf: Shelf[Unit] = Shelf(100)
    shelf.join(units(1, 2, 3, 4))
    put(shelf, 3, 2)
    late = shelf.join(units(1, 2, 3, 4))

    taken = []
    while unit := shelf.take(late):
        taken.append(unit.number)
        shelf.finish(late)

    assert [3, 2] == taken
    assert Unit(1) == shelf.needed(late)


def test_what_a_reader_began_it_ends_though_it_must_be_read_again() -> None:
    shelf: Shelf[Unit] = Shelf(20)
    slow = shelf.join(units(1, 2))
    put(shelf, 1)
    assert Unit(1) == shelf.take(slow)
    fast = shelf.join(units(7, 8))
    put(shelf, 7)
    assert Unit(7) == shelf.take(fast)
    assert units(7) == shelf.finish(fast)

    assert units(1) == shelf.make_room(Unit(8, 20), Need.LATE)
    shelf.arrive(Unit(8, 20))

    assert shelf.take(slow) is None
    assert Unit(1) == shelf.needed(slow)


def test_nothing_is_read_again_that_comes() -> None:
    shelf: Shelf[Unit] = Shelf(100)
    first, second = shelf.join(units(1, 2)), shelf.join(units(1, 2))
    assert Unit(1) == shelf.needed(first)
    assert [] == shelf.make_room(Unit(1), Need.NOW)

    assert shelf.needed(first) is None
    assert shelf.needed(second) is None
    assert Unit(2) == shelf.ahead(second, 2)
    assert shelf.ahead(second, 1) is None


def test_what_nobody_wants_goes_and_what_is_wanted_stays() -> None:
    shelf: Shelf[Unit] = Shelf(20)
    one, other = shelf.join(units(1, 2)), shelf.join(units(2, 3))
    put(shelf, 1, 2)
    assert shelf.make_room(Unit(3), Need.NOW) is None

    assert Unit(1) == shelf.take(one)
    assert units(1) == shelf.finish(one)
    assert Unit(2) == shelf.take(other)
    assert [] == shelf.finish(other)
    assert units(2) == shelf.leave(one)
    assert 0 == shelf.size


def test_nobody_is_waited_for_who_kept_others_waiting() -> None:
    shelf: Shelf[Unit] = Shelf(30)
    stalled = shelf.join(units(1, 2, 3, 4))
    others = [shelf.join(units(2, 3, 4)) for _ in range(2)]
    put(shelf, 1, 2, 3)

    assert units(1) == shelf.make_room(Unit(4), Need.LATE)
    shelf.arrive(Unit(4))

    assert not stalled.is_waited_for
    for other in others:
        assert other.is_waited_for
        assert Unit(2) == shelf.take(other)
        assert [] == shelf.finish(other)
    assert shelf.make_room(Unit(5), Need.SOON) is None
    assert units(2) == shelf.make_room(Unit(5), Need.NOW)


def test_what_is_read_does_not_go() -> None:
    shelf: Shelf[Unit] = Shelf(20)
    assert [] == shelf.make_room(Unit(1, 15), Need.NOW)

    assert shelf.make_room(Unit(2), Need.LATE) is None
    shelf.drop(Unit(1, 15))
    assert [] == shelf.make_room(Unit(2), Need.LATE)


def test_the_last_reader_takes_all_with_it() -> None:
    shelf: Shelf[Unit] = Shelf(100)
    readers = [shelf.join(units(1, 2)) for _ in range(2)]
    put(shelf, 1, 2)

    assert [] == shelf.leave(readers[0])
    assert units(1, 2) == shelf.leave(readers[1])
    assert 0 == shelf.size


LIMIT = 50
wants = st.lists(
    st.sets(st.integers(0, 20), min_size=1).map(sorted), min_size=1, max_size=5
)


@given(wants)
def test_every_reader_gets_all_it_wants_within_the_limit(
    wants: list[list[int]],
) -> None:
    shelf: Shelf[Unit] = Shelf(LIMIT)
    readers = [shelf.join(Unit(n, 5 + n) for n in numbers) for numbers in wants]
    coming: list[Unit] = []
    taken: dict[Reader[Unit], list[int]] = {reader: [] for reader in readers}

    for _ in range(sum(map(len, wants)) * 20):
        for reader in readers:
            if unit := shelf.take(reader):
                taken[reader].append(unit.number)
                shelf.finish(reader)
            elif needed := shelf.needed(reader):
                is_last = reader is readers[-1]
                if (
                    shelf.make_room(needed, Need.LATE if is_last else Need.NOW)
                    is not None
                ):
                    coming.append(needed)
            assert shelf.size <= LIMIT
        for unit in coming:
            shelf.arrive(unit)
        coming.clear()

    assert wants == [sorted(taken[reader]) for reader in readers]
