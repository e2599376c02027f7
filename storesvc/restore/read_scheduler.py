"""The shelf: which units are in memory, which come next, and which go.

Streams that want the same units converge on them, wherever each began: a stream takes
what lies on the shelf before anything else, and where it wants nothing of that, has its
next unit read. So however many restore a checkpoint at once, it is read once.

It keeps true:

- What lies on it, or is on its way there, takes no more than its limit.
- Somebody wants all of it.
- What a stream wants goes only where no room was found for so long that the stream is
  not waited for any more. It is then read again for it.
- A stream that takes nothing keeps nothing here but for so long.
"""

from collections.abc import Hashable, Iterable
from enum import Enum
from typing import Generic, Protocol, TypeVar


class Sized(Hashable, Protocol):
    """What lies on a shelf."""

    @property
    def size(self) -> int:
        """Bytes."""


U = TypeVar("U", bound=Sized)


class State(Enum):
    """Of a unit on the shelf."""

    COMING = "it is read"
    HELD = "it can be taken"


class Need(Enum):
    """How much a unit that comes is needed."""

    SOON = "nothing goes for it"
    NOW = "what goes for it is wanted only by readers who are not waited for"
    LATE = "anything goes for it, what the fewest want first"


class Reader(Generic[U]):
    """A stream, as the shelf sees it."""

    def __init__(self, units: Iterable[U]) -> None:
        self.left = dict.fromkeys(units)
        """What it did not take yet, in the order of the storage."""
        self.current: U | None = None
        """What it is taking."""
        self.is_waited_for = True
        """Whether what it wants is kept for it."""


class Shelf(Generic[U]):
    """Units, and those who want them."""

    def __init__(self, limit: int) -> None:
        """Makes an empty one.

        Args:
            limit: Bytes.
        """
        self._limit = limit
        self._units: dict[U, State] = {}
        self._readers: set[Reader[U]] = set()

    @property
    def size(self) -> int:
        """Bytes of all units on it."""
        return sum(unit.size for unit in self._units)

    def join(self, units: Iterable[U]) -> Reader[U]:
        """Returns a new reader of units."""
        reader = Reader(units)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader[U]) -> list[U]:
        """Returns what goes with a reader that leaves: what nobody else wants."""
        self._readers.remove(reader)
        return self._drop_unwanted(self._units)

    def take(self, reader: Reader[U]) -> U | None:
        """Returns what a reader takes now: what it began, or else what lies here for
        the longest; None: nothing of that kind is here."""
        if reader.current is None:
            wanted = (u for u in self._units if u in reader.left and self._is_held(u))
            reader.current = next(wanted, None)
        unit = reader.current
        return unit if unit is not None and self._is_held(unit) else None

    def finish(self, reader: Reader[U]) -> list[U]:
        """Ends what a reader takes, and returns what goes: that, if nobody wants it."""
        unit, reader.current = reader.current, None
        if unit is None:
            return []
        del reader.left[unit]
        return self._drop_unwanted([unit])

    def needed(self, reader: Reader[U]) -> U | None:
        """Returns what must be read before a reader can go on; None: it comes."""
        if reader.current is not None:
            return None if reader.current in self._units else reader.current
        if any(unit in reader.left for unit in self._units):
            return None
        return next(iter(reader.left), None)

    def ahead(self, reader: Reader[U], count: int) -> U | None:
        """Returns what to read for a reader before it needs it; None: so many units
        that it will want are here, or come."""
        here = sum(u in reader.left and u != reader.current for u in self._units)
        unread = (unit for unit in reader.left if unit not in self._units)
        return next(unread, None) if here < count else None

    def make_room(self, unit: U, need: Need) -> list[U] | None:
        """Makes room for a unit that comes, and returns what goes; None: it has none.

        Who wanted what goes is not waited for any more.
        """
        going: list[U] = []
        room = self._limit - self.size
        for found in self._may_go(need) if room < unit.size else ():
            if room < unit.size:
                going.append(found)
                room += found.size
        if room < unit.size:
            return None
        for found in going:
            self.drop(found)
            for reader in self._readers:
                reader.is_waited_for &= found not in reader.left
        self._units[unit] = State.COMING
        return going

    def arrive(self, unit: U) -> None:
        """Notes that a unit can be taken now."""
        self._units[unit] = State.HELD

    def drop(self, unit: U) -> None:
        """Notes that a unit is not here any more."""
        del self._units[unit]

    def _may_go(self, need: Need) -> list[U]:
        """What may go for a unit, in the order in which it goes."""
        # Asked by all who wait, whenever something changed: it is mostly nothing.
        all_count = all(reader.is_waited_for for reader in self._readers)
        if need is Need.SOON or (need is Need.NOW and all_count):
            return []
        held = [unit for unit in self._units if self._is_held(unit)]
        if need is Need.NOW:
            return [unit for unit in held if not self._wanters(unit)[0]]
        return sorted(held, key=self._wanters)

    def _drop_unwanted(self, units: Iterable[U]) -> list[U]:
        # Nothing is kept for those who may come: memory that is used again at once is
        # still in the processor's cache.
        found = [u for u in units if u in self._units and self._wanters(u) == (0, 0)]
        for unit in found:
            self.drop(unit)
        return found

    def _is_held(self, unit: U) -> bool:
        return self._units.get(unit) is State.HELD

    def _wanters(self, unit: U) -> tuple[int, int]:
        """How many readers it is kept for, and how many want it."""
        readers = [reader for reader in self._readers if unit in reader.left]
        return sum(reader.is_waited_for for reader in readers), len(readers)
