"""Read scheduler: decides which units are in memory, read next, and evicted.

Streams that want the same units converge on them, wherever each stream began: a stream
takes the units that are in memory first, and asks for a read only if it wants none of
them. So a checkpoint is read once, however many clients restore it at the same time.

Invariants:

- The units in memory or in flight take at most the limit.
- At least one stream wants each of them.
- A unit that a stream wants is evicted only after another stream has waited for room
  for some time. The stream then loses its priority, and the unit is read again for it.
- A stream that takes nothing therefore keeps units in memory for a bounded time only.

A data file is divided into windows of a fixed size. A unit is a sequence of chunks of
one manifest that are stored back to back and begin in the same window. The windows do
not depend on a request, so two requests for overlapping parts of a checkpoint mostly
have the same units.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from storesvc.format.chunks import I64
from storesvc.format.manifests import Manifest
from storesvc.format.wire import Part, cut_parts

WINDOW_BYTES: Final = 8 << 20
"""Window of a data file; a unit exceeds it by one chunk at most."""


class Unit(NamedTuple):
    """Chunks that are read together."""

    manifest: Manifest
    place: str
    """Path of the data file in the bucket."""
    start: int
    """Offset of the first byte in the data file."""
    size: int
    """Length in bytes."""
    chunks: bytes
    """Ordinals (int64) in storage order; as bytes, because they compare and hash
    faster."""

    def ordinals(self) -> I64:
        """Returns the ordinals of its chunks, in storage order."""
        return np.frombuffer(self.chunks, np.int64)

    def parts(self) -> Iterator[Part]:
        """Yields the response messages that carry the unit: a header, and a range of
        the data file."""
        chunks = self.ordinals()
        lengths = self.manifest.places.length[chunks]
        yield from cut_parts(self.start, chunks.tolist(), lengths.tolist())


def plan_units(manifest: Manifest, pool: str, chunks: I64) -> list[Unit]:
    """Returns the units that hold some chunks, in storage order."""
    if not len(chunks):
        return []
    places = manifest.places
    file, offset = places.file[chunks], places.offset[chunks]
    order = np.lexsort((offset, file))
    chunks, file, offset = chunks[order], file[order], offset[order]
    stop, window = offset + places.length[chunks], offset // WINDOW_BYTES
    cut = file[1:] != file[:-1]
    cut |= offset[1:] != stop[:-1]
    cut |= window[1:] != window[:-1]
    bounds = [0, *(np.flatnonzero(cut) + 1).tolist(), len(chunks)]
    return [
        Unit(
            manifest,
            pool + places.files[file[a]],
            int(offset[a]),
            int(stop[b - 1] - offset[a]),
            chunks[a:b].tobytes(),
        )
        for a, b in pairwise(bounds)
    ]


class Sized(Hashable, Protocol):
    """A unit, as the scheduler sees it."""

    @property
    def size(self) -> int:
        """Its size in bytes."""


U = TypeVar("U", bound=Sized)


class UnitState(Enum):
    """The state of a unit in memory or in flight."""

    READING = "its read is in flight"
    READY = "streams can take it"


class Urgency(Enum):
    """The units that may be evicted for a read."""

    AHEAD = "none"
    NEEDED = "units that only streams without priority want"
    OVERDUE = "any unit, first those that the fewest streams want"


class Reader(Generic[U]):
    """The units that one stream still wants."""

    def __init__(self, units: Iterable[U]) -> None:
        self.remaining = dict.fromkeys(units)
        """Units not taken yet, in storage order."""
        self.current: U | None = None
        """Unit that the stream is sending."""
        self.has_priority = True
        """False once a unit that it wants was evicted: units are no longer kept in
        memory for it."""


@dataclass(eq=False, repr=False)
class ReadScheduler(Generic[U]):
    """Keeps track of the units in memory and of the streams that want them."""

    _limit: int
    """Maximum bytes of the units in memory or in flight."""
    _units: dict[U, UnitState] = field(default_factory=dict)
    _readers: set[Reader[U]] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Bytes of all units in memory or in flight."""
        return sum(unit.size for unit in self._units)

    def join(self, units: Iterable[U]) -> Reader[U]:
        """Adds a stream that wants units, and returns its reader."""
        reader = Reader(units)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Reader[U]) -> list[U]:
        """Removes a stream; returns the units evicted because only it wanted them."""
        self._readers.remove(reader)
        return self._evict_unwanted(self._units)

    def take(self, reader: Reader[U]) -> U | None:
        """Returns the unit that a stream sends now: the one it began, or else the
        oldest one in memory that it wants; None: it must wait."""
        if reader.current is None:
            wanted = (
                u for u in self._units if u in reader.remaining and self._is_ready(u)
            )
            reader.current = next(wanted, None)
        unit = reader.current
        return unit if unit is not None and self._is_ready(unit) else None

    def finish(self, reader: Reader[U]) -> list[U]:
        """Ends the current unit of a stream; returns it if it was evicted."""
        unit, reader.current = reader.current, None
        if unit is None:
            return []
        del reader.remaining[unit]
        return self._evict_unwanted([unit])

    def next_needed(self, reader: Reader[U]) -> U | None:
        """Returns the unit to read so that a stream can go on; None: one is in
        flight."""
        if reader.current is not None:
            return None if reader.current in self._units else reader.current
        if any(unit in reader.remaining for unit in self._units):
            return None
        return next(iter(reader.remaining), None)

    def next_ahead(self, reader: Reader[U], count: int) -> U | None:
        """Returns the unit to read ahead for a stream; None: ``count`` units that it
        will want are in memory or in flight."""
        here = sum(u in reader.remaining and u != reader.current for u in self._units)
        unread = (unit for unit in reader.remaining if unit not in self._units)
        return next(unread, None) if here < count else None

    def make_room(self, unit: U, urgency: Urgency) -> list[U] | None:
        """Makes room for a read and marks the unit as in flight.

        Streams that wanted an evicted unit lose their priority.

        Returns:
            The units evicted for it; None: there is no room, and nothing changed.
        """
        evicted: list[U] = []
        room = self._limit - self.size
        for found in self._evictable(urgency) if room < unit.size else ():
            if room < unit.size:
                evicted.append(found)
                room += found.size
        if room < unit.size:
            return None
        for found in evicted:
            self.drop(found)
            for reader in self._readers:
                reader.has_priority &= found not in reader.remaining
        self._units[unit] = UnitState.READING
        return evicted

    def mark_ready(self, unit: U) -> None:
        """Marks a unit as read, so that streams can take it."""
        self._units[unit] = UnitState.READY

    def drop(self, unit: U) -> None:
        del self._units[unit]

    def _evictable(self, urgency: Urgency) -> list[U]:
        """Returns the units that may be evicted, in the order of eviction."""
        # All waiting streams call this at every change: mostly it ends here.
        if urgency is Urgency.AHEAD:
            return []
        have_priority = all(reader.has_priority for reader in self._readers)
        if urgency is Urgency.NEEDED and have_priority:
            return []
        ready = [unit for unit in self._units if self._is_ready(unit)]
        if urgency is Urgency.NEEDED:
            return [unit for unit in ready if not self._demand(unit)[0]]
        return sorted(ready, key=self._demand)

    def _evict_unwanted(self, units: Iterable[U]) -> list[U]:
        # Keep nothing for streams that may join later: memory that is reused at once
        # is still in the processor's cache.
        found = [u for u in units if u in self._units and self._demand(u) == (0, 0)]
        for unit in found:
            self.drop(unit)
        return found

    def _is_ready(self, unit: U) -> bool:
        return self._units.get(unit) is UnitState.READY

    def _demand(self, unit: U) -> tuple[int, int]:
        """Returns how many streams with priority want a unit, and how many in all."""
        readers = [reader for reader in self._readers if unit in reader.remaining]
        return sum(reader.has_priority for reader in readers), len(readers)
