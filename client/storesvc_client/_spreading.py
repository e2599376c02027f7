"""Stored chunks that several processes of a job need: each is read by one of them, and
goes to the others over the interconnect.

All processes make the same plan: who needs a chunk, who reads it, and in which round it
is exchanged. A round is one all-gather among the processes that need the same chunks.
Rounds follow one order everywhere, so no two of them wait for each other; while one is
exchanged, the next is read. A process that fails, be it to read its share or to use
what came, goes on to take part, and tells what happened instead: otherwise the others
would wait for it for ever.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from storesvc.format.checksums import crc32c, digest
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._jobs import Job, process_name
from storesvc_client._layouts import Bytes, allocate
from storesvc_client._progress import Meter
from storesvc_client._receiving import Assembly, Buffer, ChunkSource
from storesvc_client._shares import Holders, assigned, needers_of_chunks
from storesvc_client.errors import GivenUpError

ROUND_BYTES: Final = 256 << 20
"""That a round brings to each process, or one chunk of each process."""

HEADER_BYTES: Final = 4096
"""Of what a process sends in a round: why it has nothing to send, if so."""

Needed: TypeAlias = Sequence[tuple[int, Mapping[Region, Holders]]]
"""Rows of leaves, and the regions of each that any process needs, and which."""


class Gather(Protocol):
    """The interconnect."""

    def __call__(self, own: Bytes, processes: Sequence[int]) -> Sequence[Bytes]:
        """Returns what each of some processes brings, as many bytes each.

        Called by each of them, with the same processes, ascending, and in one order.
        """


@dataclass(frozen=True, slots=True)
class Round:
    """What some processes exchange at once."""

    processes: tuple[int, ...]
    """Ascending."""
    chunks: tuple[tuple[int, ...], ...]
    """That each of them reads, ascending."""
    size_bytes: int
    """Of what each sends, the header excluded."""


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

    def rounds(self, index: int) -> Iterator[Round]:
        """Yields the rounds that a process takes part in, in order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for chunk, of in zip(self._chunks, self._needers, strict=True):
            if len(of) > 1:
                groups.setdefault(tuple(sorted(of)), []).append(chunk)
        for processes in sorted(groups):
            if index in processes:
                yield from self._rounds_of(processes, groups[processes])

    def _rounds_of(
        self, processes: tuple[int, ...], chunks: Sequence[int]
    ) -> Iterator[Round]:
        """The rounds of processes that need the same chunks."""
        left: dict[int, list[int]] = {process: [] for process in processes}
        for chunk in reversed(chunks):
            left[self._readers[chunk]].append(chunk)
        most = max(self._sizes[chunk] for chunk in chunks)
        limit = max(most, ROUND_BYTES // len(processes))
        limit = min(limit, max(self._total(own) for own in left.values()))
        while any(left.values()):
            taken = tuple(
                tuple(_taken(left[process], self._sizes, limit))
                for process in processes
            )
            yield Round(processes, taken, limit)

    def _total(self, chunks: Sequence[int]) -> int:
        return sum(self._sizes[chunk] for chunk in chunks)


def _taken(left: list[int], sizes: Mapping[int, int], limit: int) -> Iterator[int]:
    """Takes chunks off a list that fit a round."""
    while left and sizes[left[-1]] <= limit:
        limit -= sizes[left[-1]]
        yield left.pop()


class SpreadSource:
    """Stored chunks, each read by one process of a job."""

    def __init__(
        self,
        inner: ChunkSource,
        spread: Spread,
        manifest: Manifest,
        *,
        job: Job,
        gather: Gather,
        name: str,
    ) -> None:
        """Prepares to read.

        Args:
            inner: Where this process reads its share from.
            spread: Who reads what.
            manifest: Of the checkpoint.
            job: The processes.
            gather: The interconnect.
            name: What messages call the checkpoint.
        """
        self._inner = inner
        self._spread = spread
        self._manifest = manifest
        self._job = job
        self._gather = gather
        self._name = name
        self.received_bytes = 0
        """Of stored chunks that other processes read."""
        self.seconds = 0.0
        """That this process read."""
        self._error: BaseException | None = None

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        rounds = list(self._spread.rounds(self._job.index))
        # While all are here: who meets for the first time is waited for no longer than
        # half a minute where CPUs are joined, and a read may take longer.
        for processes in dict.fromkeys(each.processes for each in rounds):
            self._gather(allocate(HEADER_BYTES), processes)
        shared = {chunk for each in rounds for of in each.chunks for chunk in of}
        with self._going_on():
            self._read([o for o in ordinals if o not in shared], assembly)
        with ThreadPoolExecutor(1, "storesvc-spread") as ahead:
            coming: Future[Bytes] | None = None
            for at, each in enumerate(rounds):
                coming = coming or ahead.submit(self._share, each, assembly)
                own, coming = coming.result(), None
                if at + 1 < len(rounds):
                    coming = ahead.submit(self._share, rounds[at + 1], assembly)
                with assembly.meter.phase("exchange"):
                    brought = self._gather(own, each.processes)
                for process, part, chunks in zip(
                    each.processes, brought, each.chunks, strict=True
                ):
                    with self._going_on():
                        self._take(process, part, chunks, assembly)
        if self._error is not None:
            raise self._error

    def _read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        if ordinals:
            since = assembly.meter.clock()
            self._inner.read(ordinals, assembly)
            self.seconds += assembly.meter.clock() - since

    @contextmanager
    def _going_on(self) -> Generator[None]:
        """Keeps an error for later: the others wait for this process."""
        try:
            yield
        except BaseException as e:  # noqa: BLE001 - it is raised again in the end
            self._error = self._error or e

    def _share(self, each: Round, assembly: Assembly) -> Bytes:
        """What this process brings to a round."""
        chunks = each.chunks[each.processes.index(self._job.index)]
        memory = allocate(HEADER_BYTES + each.size_bytes)
        memory[:HEADER_BYTES] = 0
        if self._error is None:
            with self._going_on():
                elements, at = self._elements(chunks, assembly), HEADER_BYTES
                for chunk in chunks:
                    found = elements[chunk]
                    memory[at : at + len(found)] = found
                    at += len(found)
        if self._error is not None:
            told = str(self._error) or type(self._error).__name__
            header = told.encode()[:HEADER_BYTES]
            memory[: len(header)] = np.frombuffer(header, np.uint8)
        return memory

    def _elements(
        self, chunks: Sequence[int], assembly: Assembly
    ) -> Mapping[int, Bytes]:
        """Reads the elements of chunks, as far as they lie within their leaves."""
        tree, wanted = self._manifest.tree, dict[int, dict[Region, int]]()
        for chunk in chunks:
            row, within = tree.locate(chunk)
            wanted.setdefault(row, {})[tree.grids[row].region(within)] = chunk
        found: dict[int, Bytes] = {}

        def keep(buffer: Buffer) -> None:
            for region, array in zip(buffer.regions, buffer.arrays, strict=True):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                found[wanted[buffer.row][region]] = flat

        own = Assembly(
            self._manifest,
            [(row, list(regions)) for row, regions in wanted.items()],
            name=self._name,
            place=keep,
            meter=Meter("restore", self._name, within=assembly.meter),
            seconds=assembly.seconds_left,
        )
        self._read(own.missing, own)
        return found

    def _take(
        self, process: int, part: Bytes, chunks: Sequence[int], assembly: Assembly
    ) -> None:
        """Puts what a process brought to where it goes."""
        if part[0]:
            told = bytes(part[:HEADER_BYTES]).rstrip(b"\0").decode(errors="replace")
            self._error = self._error or GivenUpError(
                f"restore of {self._name}: {process_name(self._job, process)} could "
                f"not read its share, or use what came: {told}"
            )
        if self._error is not None:
            return
        tree, at = self._manifest.tree, HEADER_BYTES
        for chunk in chunks:
            row, within = tree.locate(chunk)
            grid = tree.grids[row]
            region = grid.region(within)
            shape = [stop - start for start, stop in region]
            size = int(np.prod(shape, dtype=int)) * grid.itemsize
            elements = part[at : at + size]
            at += size
            if not assembly.needs(chunk):  # of a leaf on devices of others alone
                continue
            if size < grid.chunk_bytes:
                elements = _padded(elements, shape, grid.chunk_shape)
            checksum = crc32c(elements.data)
            assembly.check(chunk, checksum, checksum.to_bytes(CHECKSUM_BYTES, "little"))
            assembly.begin([chunk])
            assembly.spread(chunk, elements)
            assembly.finish(chunk)
            if process != self._job.index:
                self.received_bytes += assembly.length(chunk)


def _padded(elements: Bytes, shape: Sequence[int], chunk_shape: Sequence[int]) -> Bytes:
    """The elements of a chunk as they are stored: with zeros past the leaf."""
    count = int(np.prod(shape, dtype=int))
    itemsize = len(elements) // count
    padded = np.zeros((*chunk_shape, itemsize), np.uint8)
    index = tuple(slice(n) for n in shape)
    padded[index] = elements.reshape(*shape, itemsize)
    return padded.reshape(-1)
