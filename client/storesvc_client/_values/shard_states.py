"""Shard states of a data iterator, divided among the processes of a job.

A value is ``{"%shards": {"0": STATE, "4": STATE}}``, by the number of the shard; the
process with ``shard_options`` p of n takes the shards p, p + n, p + 2n, ... Usually the
processes that saved had taken theirs alike: process q of m has the shards q, q + m, ...
Then a process reads only the values that have a shard of its own, about m/n of them,
instead of all m. It also checks each value that it reads. Every value is read by some
process, which also reads the next one if a shard might be missing at the end, so that
gaps are found by at least one process. If the values are divided otherwise, all are
read.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

SHARDS: Final = "%shards"
"""Only key of shard states."""

ReadValues: TypeAlias = Callable[[Sequence[int]], Sequence[Any]]
"""Returns the values of some processes, in their order."""


class UnfitStateError(ValueError):
    """A state does not fit the object that is to take it."""


def is_of_shards(value: Any) -> bool:
    """Returns whether a stored value holds shard states."""
    if type(value) is not dict or value.keys() != {SHARDS}:
        return False
    shards = value[SHARDS]
    return type(shards) is dict and all(map(str.isdecimal, shards))


def read_shards(
    index: int, count: int, saved: int, read: ReadValues, known: Mapping[int, Any]
) -> dict[int, Any]:
    """Reads the states of the shards ``index``, ``index + count``, ...

    Args:
        index: Number of the process that takes them.
        count: Number of processes that take shards.
        saved: Number of processes that saved a value each.
        read: Reads the values of some of these processes, in their order.
        known: Values that were read already, by process.

    Raises:
        UnfitStateError: Shards are missing or differ, or there is none to take.
    """
    values = _Values(saved, read, known)
    values.fetch([0])
    if values.are_striped():
        numbers = range(index, saved * values.stripes, count)
        values.fetch(sorted({number % saved for number in numbers}))
        values.fetch(values.unproved())
        if values.are_striped() and (mine := values.states(numbers)):
            return mine
    values.fetch(range(saved))
    every = _joined(values.found[process] for process in range(saved))
    mine = {number: every[number] for number in range(index, len(every), count)}
    if not mine:
        raise UnfitStateError(
            f"expected shard_options of at most {len(every)} shards, as many as were "
            f"saved, got {index} of {count}"
        )
    return mine


class _Values:
    """The values of some of the processes that saved."""

    def __init__(self, saved: int, read: ReadValues, known: Mapping[int, Any]) -> None:
        self._saved = saved
        self._read = read
        self.found = {process: _by_number(value) for process, value in known.items()}
        """States by process and shard."""

    @property
    def stripes(self) -> int:
        """Number of shards of process 0, which no other exceeds."""
        return len(self.found[0])

    def are_striped(self) -> bool:
        """Returns whether process q has the shards q, q + m, ..., as far as read."""
        lengths = [len(shards) for _, shards in sorted(self.found.items())]
        return (
            lengths == sorted(lengths, reverse=True)
            and lengths[0] - lengths[-1] <= 1
            and all(
                set(range(process, process + self._saved * len(shards), self._saved))
                == shards.keys()
                for process, shards in self.found.items()
            )
        )

    def fetch(self, processes: Iterable[int]) -> None:
        """Reads the values of the processes that were not read yet.

        Raises:
            UnfitStateError: One of them holds no shard states.
        """
        new = [process for process in processes if process not in self.found]
        values = self._read(new) if new else ()
        self.found |= dict(zip(new, map(_by_number, values), strict=True))

    def unproved(self) -> list[int]:
        """Returns the processes after those that have one shard less than process 0:
        they must have one less, too, or a shard is missing."""
        return [
            process + 1
            for process, shards in self.found.items()
            if len(shards) < self.stripes and process + 1 < self._saved
        ]

    def states(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Returns the states of some shards, without absent ones."""
        found = ((each, self.found[each % self._saved]) for each in numbers)
        return {number: shards[number] for number, shards in found if number in shards}


def _by_number(value: Any) -> dict[int, Any]:
    if not is_of_shards(value):
        raise UnfitStateError("expected shard states of all processes, got others")
    return {int(text): state for text, state in value[SHARDS].items()}


def _joined(parts: Iterable[Mapping[int, Any]]) -> list[Any]:
    """Returns the states of all shards, by their numbers."""
    found: dict[int, Any] = {}
    for number, state in chain.from_iterable(part.items() for part in parts):
        if found.setdefault(number, state) != state:
            raise UnfitStateError(
                f"expected one state of shard {number}, got different ones from two "
                "processes"
            )
    if found.keys() != set(range(len(found))):
        raise UnfitStateError(
            f"expected the states of the shards 0 to {max(found)}, got {len(found)}"
        )
    return [found[shard] for shard in range(len(found))]
