"""Reads the chunks of a spread restore: each chunk that several processes need is read
by one of them and sent to the others over the interconnect.

One round of an exchange is one all-gather. Each process assembles several chunks at a
time, one of each sender, as it would from a server. All processes run the rounds in the
same order, so that no two rounds wait for each other; during a round, the chunks of the
next ones are read. The plan cuts the exchanges into stages, which bound the buffers.

A process that fails to read its share, or to use what it received, takes part in one
more round with each group of processes and sends its error instead of chunks; all
receivers then end the exchange, and begin no other in this group. If it cannot even do
that, the others wait until the deadline or until its failure is published on the job's
board.

All processes of a job compute the same plan: which process needs and reads which stored
chunks, and in how many rounds processes exchange them. Processes that need the same
chunks exchange them. What each of them reads is a stream of stored chunks, and a round
brings one slice of each stream; slices shrink with the number of processes, so a round
takes no more memory in larger jobs.

The exchanged leaves are cut into stages, one after another, such that the buffers of
one stage fit into the budget of each process. A stage completes all of its leaves, so
their memory is released before the next one. All processes have the same stages, and
run the exchanges in one order, so that none waits for another in a circle.
"""

import logging
import math
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import digest
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Tree
from storesvc.storage.threads import Threads
from storesvc_client._chunks.buffers import Buffer, Bytes, list_arrays
from storesvc_client._chunks.memory import allocate, cut_batches
from storesvc_client._job.assignment import Holders, assign_chunks, needers_of_chunks
from storesvc_client._job.job import Job, process_name
from storesvc_client._restore.assembly import Assembly, ChunkSource
from storesvc_client._restore.data_file_reads import BUDGET_BYTES
from storesvc_client.errors import PeerFailedError, UnavailableError

_log = logging.getLogger("storesvc_client")

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
        """Computes the plan for what all ``count`` processes need."""
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
        readers = assign_chunks(self._needers, lengths, count=count)
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
            slice_bytes = min(most, _round_up(slice_bytes))
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
    """Bytes that each process needs of a leaf."""
    for row, regions in sorted(exchanged, key=lambda one: one[0]):
        # Leaves of one shape and placement share their regions.
        key = (id(regions), tree.grids[row].itemsize)
        if key not in sizes:
            needed = sizes[key] = np.zeros(count, np.int64)
            for region, of in regions.items():
                elements = math.prod(stop - start for start, stop in region)
                needed[list(of)] += elements * key[1]
        if not starts or (held + sizes[key]).max() > STAGE_BYTES:
            starts.append(int(tree.first_chunk[row]))
            held[:] = 0
        held += sizes[key]
    return starts


def _round_up(size: int) -> int:
    """Returns a size rounded up to a few significant binary digits."""
    shift = max(0, size.bit_length() - _DIGITS)
    return -(-size >> shift) << shift


POLL_SECONDS: Final = 1.0
"""Interval at which a waiting process checks whether the round can still complete."""

GRACE_SECONDS: Final = 5.0
"""Extra time for a round after a failure or the deadline, in which other processes can
send their errors."""

BATCH_BYTES: Final = 64 << 20
"""Maximum bytes of chunks that a process reads at a time, unless one chunk is
larger."""

HEADER_BYTES: Final = 4096
"""Size of the header of a slice, which holds the error of the sender, if any."""

_left: Final = threading.Event()
"""Set once this process has left an exchange before its end."""

_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


Gather: TypeAlias = Callable[[Bytes, Sequence[int]], Sequence[Bytes]]
"""Sends an array over the interconnect, and returns one of each given process; all
have the same size. Each of these processes must call it with the same processes,
ascending, in the same order of calls."""


@dataclass(slots=True)
class _Incoming:
    """The chunks expected from one process."""

    chunks: deque[int]
    offset: int = 0
    """Bytes received of the first one."""


@dataclass(eq=False, repr=False)
class PeerSource:
    """Reads stored chunks, each in one process of a job."""

    inner: ChunkSource
    spread: SpreadPlan
    manifest: Manifest
    job: Job
    gather: Gather
    failure: Callable[[], str]
    name: str
    received_bytes: int = 0
    """Bytes of stored chunks received from other processes."""
    read_bytes: int = 0
    """Bytes of stored chunks read by this process."""
    seconds: float = 0.0
    """Time that this process spent reading."""
    _error: BaseException | None = None

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        if not may_spread():  # a late process would receive data of this exchange
            raise UnavailableError(
                f"restore of {self.name}: an exchange of an earlier restore of this "
                "job has not ended; start the job again, or restore with "
                "Distributed(spread=False)"
            )
        stages = list(self.spread.stages(self.job.index))
        exchanges = [each for stage in stages for each in stage.exchanges]
        # Exchange empty messages while all processes are here: on CPUs, jax waits for
        # a first contact at most 30 s, and the reads below may take longer.
        later = {chunk for each in exchanges for of in each.chunks for chunk in of}
        later.update(chunk for stage in stages for chunk in stage.own)
        failure: Exception | None = None
        try:
            for processes in sorted({each.processes for each in exchanges}):
                self._gather_slices(allocate(HEADER_BYTES), processes, assembly)
            with self._deferring_errors():
                self._read([o for o in ordinals if o not in later], assembly)
            self._run(stages, frozenset(ordinals), assembly)
        except Exception as e:  # noqa: BLE001 - raised below
            failure = e
        # the first error of this process, not the failure to send it to the others
        if first := self._error or failure:
            raise first

    def _run(
        self, stages: Sequence[Stage], wanted: Container[int], assembly: Assembly
    ) -> None:
        """Runs the stages, each until its leaves are complete."""
        ended = set[tuple[int, ...]]()
        """Processes whose exchange has ended with an error, which all of them know."""
        with (
            Threads(1, "storesvc-spread") as ahead,
            closing(self._iterate_elements(stages, assembly, ahead)) as elements,
        ):
            for stage in stages:
                own = [chunk for chunk in stage.own if chunk in wanted]
                with self._deferring_errors():
                    if own and self._error is None:
                        # in that thread, because a source runs one read at a time
                        ahead.submit(self._read, own, assembly).result()
                for each in stage.exchanges:
                    if each.processes in ended:
                        continue
                    if not self._take_part(each, elements, assembly):
                        ended.add(each.processes)
                with self._deferring_errors():
                    if self._error is None:
                        self._read_again(stage, assembly, ahead)

    def _read_again(self, stage: Stage, assembly: Assembly, ahead: Threads) -> None:
        """Reads the chunks whose checksum differed after their exchange: no other
        process sends them again."""
        sent = (c for each in stage.exchanges for of in each.chunks for c in of)
        left = sorted(assembly.restart(sent))
        if left:
            _log.warning(
                "restore of %s: %d chunks were corrupted in the exchange between "
                "processes; reading them from the storage",
                *(self.name, len(left)),
            )
            ahead.submit(self._read, left, assembly).result()

    def _take_part(
        self,
        exchange: Exchange,
        elements: Iterator[dict[int, Bytes]],
        assembly: Assembly,
    ) -> bool:
        """Runs an exchange: sends the chunks that this process reads and adds
        the chunks of the others to the assembly; returns False if a process failed."""
        chunks = dict(zip(exchange.processes, exchange.chunks, strict=True))
        incoming = {process: _Incoming(deque(of)) for process, of in chunks.items()}
        own = self._iterate_stored(chunks[self.job.index], elements)
        left = _NOTHING
        for _ in range(exchange.rounds):
            memory = allocate(HEADER_BYTES + exchange.slice_bytes)
            with self._deferring_errors():
                left = _fill(memory[HEADER_BYTES:], left, own)
            self._mark(memory[:HEADER_BYTES])
            brought = self._gather_slices(memory, exchange.processes, assembly)
            for process, part in zip(exchange.processes, brought, strict=True):
                with self._deferring_errors():
                    self._take(process, part, incoming[process], assembly)
            if any(part[0] for part in brought):  # visible to all processes
                return False
        return True

    def _gather_slices(
        self, memory: Bytes, processes: Sequence[int], assembly: Assembly
    ) -> Sequence[Bytes]:
        """Exchanges one slice with each process and returns theirs.

        Runs the all-gather in another thread, so that Ctrl-C takes effect after the
        round and is sent to the others in the next one, and so that a process that
        never arrives is not waited for without limit.

        Raises:
            UnavailableError: The deadline passed before the round completed.
            PeerFailedError: Another process failed and does not take part.
        """
        gathering: Future[Sequence[Bytes]] = Future()

        def gather() -> None:
            try:
                gathering.set_result(self.gather(memory, processes))
            except BaseException as e:  # noqa: BLE001 - raised by the waiting thread
                gathering.set_exception(e)

        # a daemon: an absent process must not delay the exit of this one
        threading.Thread(target=gather, name="storesvc-gather", daemon=True).start()
        try:
            with assembly.meter.phase("exchange"):
                self._wait(gathering, assembly)
        finally:
            if not gathering.done():
                _left.set()
        return gathering.result()

    def _wait(self, gathering: "Future[Sequence[Bytes]]", assembly: Assembly) -> None:
        """Waits for the slices of the others; raises what ``_gather_slices`` does."""
        grace_ends = math.inf
        while not gathering.done():
            with self._deferring_errors():
                wait([gathering], POLL_SECONDS)
            if gathering.done():
                break
            if assembly.seconds_left < -GRACE_SECONDS:
                assembly.check_time()
                raise UnavailableError(
                    f"restore of {self.name}: other processes of the job did not "
                    "receive the chunks that this one read before the deadline; look "
                    "for the one that hangs"
                )
            failure = self.failure()
            if failure and time.monotonic() >= grace_ends:
                raise PeerFailedError(
                    f"restore of {self.name} failed in another process of the job: "
                    f"{failure}"
                )
            if failure:
                grace_ends = min(grace_ends, time.monotonic() + GRACE_SECONDS)

    def _read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        if ordinals:
            since = assembly.meter.clock()
            self.inner.read(ordinals, assembly)
            self.read_bytes += sum(map(assembly.length, ordinals))
            self.seconds += assembly.meter.clock() - since

    @contextmanager
    def _deferring_errors(self) -> Generator[None]:
        """Keeps an error for later, because the others wait for this process."""
        try:
            yield
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) and isinstance(
                self._error, KeyboardInterrupt
            ):
                raise  # the second Ctrl-C
            self._error = self._error or e

    def _mark(self, header: Bytes) -> None:
        """Writes the error of this process, if any, into a header."""
        header[:] = 0
        if self._error is not None:
            message = str(self._error) or type(self._error).__name__
            text = message.encode(errors="replace")[:HEADER_BYTES]
            header[: len(text)] = np.frombuffer(text, np.uint8)

    def _iterate_stored(
        self, chunks: Sequence[int], elements: Iterator[dict[int, Bytes]]
    ) -> Iterator[Bytes]:
        """Yields the stored bytes of the chunks of an exchange one after another;
        takes the elements of each of their batches."""
        stored_bytes = self.manifest.tree.stored_lengths.item
        for batch in cut_batches(chunks, stored_bytes, BATCH_BYTES):
            found = next(elements, None)
            if found is None or self._error is not None:
                return
            for chunk in batch:
                yield found.pop(chunk)
                checksum = int(self.manifest.sums.crc32c[chunk])
                tail = checksum.to_bytes(CHECKSUM_BYTES, "little")
                yield np.frombuffer(tail, np.uint8)

    def _iterate_elements(
        self, stages: Sequence[Stage], assembly: Assembly, ahead: Threads
    ) -> Generator[dict[int, Bytes]]:
        """Yields the elements of all batches that this process sends; reads the next
        batch while one is used, also that of the next exchange."""
        stored_bytes = self.manifest.tree.stored_lengths.item
        batches = deque(
            batch
            for stage in stages
            for each in stage.exchanges
            for batch in cut_batches(
                each.chunks[each.processes.index(self.job.index)],
                stored_bytes,
                BATCH_BYTES,
            )
        )
        coming: deque[Future[dict[int, Bytes]]] = deque()
        while batches or coming:
            while batches and len(coming) < 2:
                batch = batches.popleft()
                coming.append(ahead.submit(self._elements, batch, assembly))
            yield coming.popleft().result()

    def _elements(self, chunks: Sequence[int], assembly: Assembly) -> dict[int, Bytes]:
        """Reads the elements of chunks; returns them in the given order."""
        tree, wanted = self.manifest.tree, dict[int, dict[Region, int]]()
        found: dict[int, Bytes] = dict.fromkeys(chunks, _NOTHING)
        if self._error is not None:  # the exchange will not use them
            return found
        for chunk in chunks:
            row, within = tree.locate(chunk)
            wanted.setdefault(row, {})[tree.grids[row].region(within)] = chunk

        def keep(buffers: Sequence[Buffer]) -> None:
            for row, region, array in list_arrays(buffers):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                if len(flat) < tree.grids[row].chunk_bytes:
                    flat = _pad_chunk(flat, array.shape, tree.grids[row].chunk_shape)
                found[wanted[row][region]] = flat

        own = Assembly(
            self.manifest,
            [(row, list(regions)) for row, regions in wanted.items()],
            name=self.name,
            place=keep,
            within=assembly,
        )
        self._read(own.missing, own)
        return found

    def _take(
        self, process: int, part: Bytes, incoming: _Incoming, assembly: Assembly
    ) -> None:
        """Adds the slice of a process to the assembly."""
        if part[0]:
            message = bytes(part[:HEADER_BYTES]).rstrip(b"\0").decode(errors="replace")
            self._error = self._error or PeerFailedError(
                f"restore of {self.name}: {process_name(self.job, process)} could "
                f"not read its share, or use what it received: {message}"
            )
        if self._error is not None:
            return
        at = HEADER_BYTES
        while incoming.chunks and at < len(part):
            chunk, offset = incoming.chunks[0], incoming.offset
            length = assembly.length(chunk)
            piece = part[at : at + length - offset]
            at += len(piece)
            incoming.offset += len(piece)
            if incoming.offset == length:
                incoming.chunks.popleft()
                incoming.offset = 0
            if assembly.needs(chunk):  # else only other processes' devices need it
                assembly.add(chunk, offset, piece.data)
                if process != self.job.index:
                    self.received_bytes += len(piece)


def may_spread() -> bool:
    """Returns whether every exchange of this process has run to its end."""
    return not _left.is_set()


def _fill(memory: Bytes, left: Bytes, more: Iterator[Bytes]) -> Bytes:
    """Fills memory from `left` and then from `more`; returns the unused rest."""
    at = 0
    while at < len(memory):
        if not len(left):
            left = next(more, _NOTHING)
            if not len(left):
                break
        taken = left[: len(memory) - at]
        memory[at : at + len(taken)] = taken
        left, at = left[len(taken) :], at + len(taken)
    return left


def _pad_chunk(
    elements: Bytes, shape: Sequence[int], chunk_shape: Sequence[int]
) -> Bytes:
    """Returns the elements of a chunk in stored form: padded with zeros to its
    shape."""
    count = int(np.prod(shape, dtype=int))
    itemsize = len(elements) // count
    padded = np.zeros((*chunk_shape, itemsize), np.uint8)
    index = tuple(slice(n) for n in shape)
    padded[index] = elements.reshape(*shape, itemsize)
    return padded.reshape(-1)
