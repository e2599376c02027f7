"""The plan of a spread restore: who needs which stored chunks, who reads them, and who
exchanges them in how many rounds. All processes of a job make the same one.

Those that need the same chunks exchange them. What each reads is a stream of stored
chunks, one after another, of which a round brings a slice from each; so a round takes
no more memory where more processes take part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from storesvc.format.checksums import digest
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc_client._job.assignment import Holders, assigned, needers_of_chunks

ROUND_BYTES: Final = 256 << 20
"""That a round brings to each process at most."""

SLICE_BYTES: Final = 64 << 20
"""That a process sends in a round at most."""

Needed: TypeAlias = Sequence[tuple[int, Mapping[Region, Holders]]]
"""Rows of leaves, and the regions of each that any process needs, and which."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What some processes bring each other."""

    processes: tuple[int, ...]
    """Ascending."""
    chunks: tuple[tuple[int, ...], ...]
    """That each of them reads, ascending, as it sends them."""
    slice_bytes: int
    """That each sends in a round, the header excluded."""
    rounds: int


class Spread:
    """Who needs, and who reads, which chunks of a restore."""

    def __init__(self, manifest: Manifest, needed: Needed, *, count: int) -> None:
        """Plans.

        Args:
            manifest: Of the checkpoint.
            needed: By all processes.
            count: Of processes.
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
        """That would be read a second time otherwise, by all processes together."""

    @property
    def digest(self) -> str:
        """Tells plans apart."""
        who = {of: sorted(of) for of in set(self._needers)}
        rows = [
            (chunk, self._readers[chunk], who[of])
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
        """That of processes that need the same chunks."""
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
