"""The plan of a spread restore: which process needs and reads which stored chunks, and
in how many rounds processes exchange them. All processes of a job compute the same
plan.

Processes that need the same chunks exchange them. What each of them reads is a stream
of stored chunks, and a round brings one slice of each stream; slices shrink with the
number of processes, so a round takes no more memory in larger jobs.

The exchanged leaves are cut into stages, one after another, such that the buffers of
one stage fit into the budget of each process. A stage completes all of its leaves, so
their memory is released before the next one. All processes have the same stages, and
run the exchanges in one order, so that none waits for another in a circle.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import digest
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Tree
from storesvc_client._job.assignment import Holders, assigned, needers_of_chunks
from storesvc_client._restore.buffer_budget import BUDGET_BYTES

ROUND_BYTES: Final = 256 << 20
"""Maximum bytes that a process receives in a round."""

SLICE_BYTES: Final = 64 << 20
"""Maximum bytes that a process sends in a round."""

STAGE_BYTES: Final = BUDGET_BYTES
"""Maximum bytes of the buffers of a stage in one process, unless it is one leaf."""

_DIGITS: Final = 5
"""Significant binary digits of the sizes of slices where there are several stages: for
each size, the devices compile a program."""

Needed: TypeAlias = Sequence[tuple[int, Mapping[Region, Holders]]]
"""Rows of leaves, each with its needed regions and the processes that need them."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange of chunks between the processes that need them."""

    processes: tuple[int, ...]
    """The processes, ascending."""
    chunks: tuple[tuple[int, ...], ...]
    """Chunks that each process reads and sends, in that order, ascending."""
    slice_bytes: int
    """Bytes that each process sends in a round, without the header."""
    rounds: int


@dataclass(frozen=True, slots=True)
class Stage:
    """The exchanges of some leaves, whose buffers fit into the budget together."""

    own: tuple[int, ...]
    """Chunks of these leaves that this process alone needs, ascending."""
    exchanges: tuple[Exchange, ...]


class SpreadPlan:
    """The processes that need and that read each chunk of a restore."""

    def __init__(self, manifest: Manifest, needed: Needed, *, count: int) -> None:
        """Computes the plan.

        Args:
            manifest: Manifest of the checkpoint.
            needed: What all processes need.
            count: Number of processes.
        """
        tree = manifest.tree
        needers: dict[int, Holders] = {}
        exchanged: list[tuple[int, Mapping[Region, Holders]]] = []
        self._beside: set[int] = set()
        """Chunks that one process needs, of leaves with exchanged chunks."""
        for row, regions in needed:
            first = int(tree.first_chunk[row])
            within = needers_of_chunks(tree.grids[row], regions)
            found = {first + at: of for at, of in within.items()}
            needers |= found
            if any(len(of) > 1 for of in found.values()):
                exchanged.append((row, regions))
                self._beside |= {at for at, of in found.items() if len(of) == 1}
        self._starts = _stages(tree, exchanged, count=count)
        self._chunks = sorted(needers)
        self._needers = [needers[chunk] for chunk in self._chunks]
        lengths = tree.stored_lengths[self._chunks].tolist()
        self._sizes = dict(zip(self._chunks, lengths, strict=True))
        readers = assigned(self._needers, lengths, count=count)
        self._readers = dict(zip(self._chunks, readers.tolist(), strict=True))
        self.saved_bytes = sum(
            (len(of) - 1) * length
            for of, length in zip(self._needers, lengths, strict=True)
        )
        """Bytes that spreading saves, summed over all processes."""

    @property
    def digest(self) -> str:
        """Digest by which processes compare their plans."""
        processes = {of: sorted(of) for of in set(self._needers)}
        rows = [
            (chunk, self._readers[chunk], processes[of])
            for chunk, of in zip(self._chunks, self._needers, strict=True)
        ]
        return digest(repr((rows, self._starts)).encode()).hex()

    def stages(self, index: int) -> Iterator[Stage]:
        """Yields the stages of a process, in order."""
        groups: dict[Holders, list[list[int]]] = {}
        own: list[list[int]] = [[] for _ in self._starts]
        for chunk, of in zip(self._chunks, self._needers, strict=True):
            stage = bisect_right(self._starts, chunk) - 1
            if index in of and len(of) > 1:
                if of not in groups:
                    groups[of] = [[] for _ in self._starts]
                groups[of][stage].append(chunk)
            elif index in of and chunk in self._beside:
                own[stage].append(chunk)
        ordered = sorted((tuple(sorted(of)), chunks) for of, chunks in groups.items())
        for stage, alone in enumerate(own):
            exchanges = [
                self._exchange(processes, chunks[stage])
                for processes, chunks in ordered
                if chunks[stage]
            ]
            yield Stage(tuple(alone), tuple(exchanges))

    def _exchange(self, processes: tuple[int, ...], chunks: Sequence[int]) -> Exchange:
        """Returns the exchange of processes that need the same chunks."""
        read: dict[int, list[int]] = {process: [] for process in processes}
        for chunk in chunks:
            read[self._readers[chunk]].append(chunk)
        longest = max(sum(map(self._sizes.__getitem__, own)) for own in read.values())
        most = max(1, min(SLICE_BYTES, ROUND_BYTES // len(processes)))
        rounds = -(-longest // most)
        slice_bytes = -(-longest // rounds)
        if len(self._starts) > 1:
            slice_bytes = min(most, _rounded_up(slice_bytes))
        return Exchange(
            processes,
            tuple(map(tuple, read.values())),
            slice_bytes=slice_bytes,
            rounds=rounds,
        )


def _stages(tree: Tree, exchanged: Needed, *, count: int) -> list[int]:
    """Returns the first chunk of each stage: as many leaves as fit into the budget of
    each process, at least one."""
    starts: list[int] = []
    held = np.zeros(count, np.int64)
    sizes: dict[tuple[int, int], NDArray[np.int64]] = {}
    for row, regions in sorted(exchanged, key=lambda one: one[0]):
        # Leaves of one shape and placement share their regions.
        key = (id(regions), tree.grids[row].itemsize)
        if key not in sizes:
            sizes[key] = _buffer_bytes(regions, key[1], count=count)
        if not starts or (held + sizes[key]).max() > STAGE_BYTES:
            starts.append(int(tree.first_chunk[row]))
            held[:] = 0
        held += sizes[key]
    return starts


def _buffer_bytes(
    regions: Mapping[Region, Holders], itemsize: int, *, count: int
) -> NDArray[np.int64]:
    """Returns the bytes that each process needs of a leaf."""
    found = np.zeros(count, np.int64)
    for region, of in regions.items():
        found[list(of)] += math.prod(stop - start for start, stop in region) * itemsize
    return found


def _rounded_up(size: int) -> int:
    """Returns a size rounded up to a few significant binary digits."""
    shift = max(0, size.bit_length() - _DIGITS)
    return -(-size >> shift) << shift
