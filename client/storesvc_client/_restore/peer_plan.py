"""The plan of a spread restore: which process needs and reads which stored chunks, and
in how many rounds processes exchange them. All processes of a job compute the same
plan.

Processes that need the same chunks exchange them. What each of them reads is a stream
of stored chunks, and a round brings one slice of each stream; slices shrink with the
number of processes, so a round takes no more memory in larger jobs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from storesvc.format.checksums import digest
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc_client._job.assignment import Holders, assigned, needers_of_chunks

ROUND_BYTES: Final = 256 << 20
"""Maximum bytes that a process receives in a round."""

SLICE_BYTES: Final = 64 << 20
"""Maximum bytes that a process sends in a round."""

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
        for row, regions in needed:
            first = int(tree.first_chunk[row])
            found = needers_of_chunks(tree.grids[row], regions)
            needers |= {first + within: of for within, of in found.items()}
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
        return digest(repr(rows).encode()).hex()

    def exchanges(self, index: int) -> Iterator[Exchange]:
        """Yields the exchanges that a process takes part in, in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for chunk, of in zip(self._chunks, self._needers, strict=True):
            if len(of) > 1:
                groups.setdefault(tuple(sorted(of)), []).append(chunk)
        for processes in sorted(groups):
            if index in processes:
                yield self._exchange(processes, groups[processes])

    def _exchange(self, processes: tuple[int, ...], chunks: Sequence[int]) -> Exchange:
        """Returns the exchange of processes that need the same chunks."""
        read: dict[int, list[int]] = {process: [] for process in processes}
        for chunk in chunks:
            read[self._readers[chunk]].append(chunk)
        longest = max(sum(map(self._sizes.__getitem__, own)) for own in read.values())
        most = max(1, min(SLICE_BYTES, ROUND_BYTES // len(processes)))
        rounds = -(-longest // most)
        return Exchange(
            processes,
            tuple(map(tuple, read.values())),
            slice_bytes=-(-longest // rounds),
            rounds=rounds,
        )
