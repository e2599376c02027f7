"""Stored chunks that several processes of a job need: each is read by one of them, and
goes to the others over the interconnect.

A round of an exchange is one all-gather, and chunks grow in their places as they would
from a server: one of each process at a time. Rounds follow one order everywhere, so no
two of them wait for each other; while one is exchanged, what the next ones bring is
read.

A process that fails, be it to read its share or to use what came, takes part in one
more round of each exchange, and tells what happened instead; all who hear it end that
exchange. One that can do not even that is waited for until the deadline, or until it is
heard of in another way.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.zarr import CHECKSUM_BYTES
from storesvc_client._chunks.buffer import Buffer
from storesvc_client._chunks.buffer_layout import Bytes, allocate
from storesvc_client._job.job import Job, process_name
from storesvc_client._restore.assembly import Assembly, ChunkSource
from storesvc_client._restore.peer_plan import Exchange, Spread
from storesvc_client.errors import PeerFailedError, UnavailableError

TURN_SECONDS: Final = 1.0
"""How often it is looked whether a round is still worth to be waited for."""

GRACE_SECONDS: Final = 5.0
"""How long others have to say so, once that is in doubt."""

BATCH_BYTES: Final = 64 << 20
"""That a process reads at once, or one chunk."""

HEADER_BYTES: Final = 4096
"""Of what a process sends in a round: why it has nothing to send, if so."""

_left: Final = threading.Event()
"""Set once this process has left an exchange before its end."""

_NOTHING: Final[Bytes] = np.empty(0, np.uint8)


class Gather(Protocol):
    """The interconnect."""

    def __call__(self, own: Bytes, processes: Sequence[int]) -> Sequence[Bytes]:
        """Returns what each of some processes brings, as many bytes each.

        Called by each of them, with the same processes, ascending, and in one order.
        """


@dataclass(slots=True)
class _Incoming:
    """What is to come from one process."""

    chunks: deque[int]
    offset: int = 0
    """In the first of them."""


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
        failure: Callable[[], str],
        name: str,
    ) -> None:
        """Prepares to read.

        Args:
            inner: Where this process reads its share from.
            spread: Who reads what.
            manifest: Of the checkpoint.
            job: The processes.
            gather: The interconnect.
            failure: Returns what another process has failed with; "": none has, as far
                as it is known.
            name: What messages call the checkpoint.
        """
        self._inner = inner
        self._spread = spread
        self._manifest = manifest
        self._job = job
        self._gather = gather
        self._failure = failure
        self._name = name
        self.received_bytes = 0
        """Of stored chunks that other processes read."""
        self.read_bytes = 0
        """Of stored chunks that this process read."""
        self.seconds = 0.0
        """That this process read."""
        self._error: BaseException | None = None

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``."""
        self._check_earlier()
        exchanges = list(self._spread.exchanges(self._job.index))
        # While all are here: who meets for the first time is waited for no longer than
        # half a minute where CPUs are joined, and a read may take longer.
        shared = {chunk for each in exchanges for of in each.chunks for chunk in of}
        failure: Exception | None = None
        try:
            for each in exchanges:
                self._gathered(allocate(HEADER_BYTES), each, assembly)
            with self._going_on():
                self._read([o for o in ordinals if o not in shared], assembly)
            with ThreadPoolExecutor(1, "storesvc-spread") as ahead:
                for each in exchanges:
                    self._take_part(each, assembly, ahead)
        except Exception as e:  # noqa: BLE001 - raised below
            failure = e
        # what went wrong here first, and not that others could not be told so
        if first := self._error or failure:
            raise first

    def _check_earlier(self) -> None:
        """Refuses to exchange anything once an exchange was left before its end: who
        comes to that one late would take what belongs to this one.

        Raises:
            UnavailableError: One was.
        """
        if not may_spread():
            raise UnavailableError(
                f"restore of {self._name}: an exchange of an earlier restore of this "
                "job has not ended; start the job again, or restore with "
                "Distributed(spread=False)"
            )

    def _take_part(
        self, exchange: Exchange, assembly: Assembly, ahead: ThreadPoolExecutor
    ) -> None:
        """Sends what this process reads, and takes what comes."""
        chunks = dict(zip(exchange.processes, exchange.chunks, strict=True))
        incoming = {process: _Incoming(deque(of)) for process, of in chunks.items()}
        own = self._stored(chunks[self._job.index], assembly, ahead)
        with closing(own):
            left = _NOTHING
            for _ in range(exchange.rounds):
                memory = allocate(HEADER_BYTES + exchange.slice_bytes)
                with self._going_on():
                    left = _fill(memory[HEADER_BYTES:], left, own)
                self._mark(memory[:HEADER_BYTES])
                brought = self._gathered(memory, exchange, assembly)
                for process, part in zip(exchange.processes, brought, strict=True):
                    with self._going_on():
                        self._take(process, part, incoming[process], assembly)
                if any(part[0] for part in brought):  # which all of them see
                    break

    def _gathered(
        self, memory: Bytes, exchange: Exchange, assembly: Assembly
    ) -> Sequence[Bytes]:
        """Returns what each process brings.

        It is gathered aside. So Ctrl-C waits for the end of a round, and is told to the
        others in the next; and who never comes is not waited for without end.

        Raises:
            UnavailableError: The deadline has passed, and nothing came.
            PeerFailedError: Another process has failed, and does not take part.
        """
        gathering: Future[Sequence[Bytes]] = Future()

        def gather() -> None:
            try:
                gathering.set_result(self._gather(memory, exchange.processes))
            except BaseException as e:  # noqa: BLE001 - for who waits for it
                gathering.set_exception(e)

        # a daemon: who never comes must not keep this process from ending either
        threading.Thread(target=gather, name="storesvc-gather", daemon=True).start()
        try:
            with assembly.meter.phase("exchange"):
                self._wait(gathering, assembly)
        finally:
            if not gathering.done():
                _left.set()
        return gathering.result()

    def _wait(self, gathering: "Future[Sequence[Bytes]]", assembly: Assembly) -> None:
        """Waits for what each process brings; raises what ``_gathered`` does."""
        patience_ends = math.inf
        while not gathering.done():
            with self._going_on():
                wait([gathering], TURN_SECONDS)
            if gathering.done():
                break
            if assembly.seconds_left < -GRACE_SECONDS:
                assembly.check_time()
                raise UnavailableError(
                    f"restore of {self._name}: other processes of the job have not "
                    "taken at the deadline what this one read for them; look for the "
                    "one that hangs"
                )
            failure = self._failure()
            if failure and time.monotonic() >= patience_ends:
                raise PeerFailedError(
                    f"restore of {self._name} was given up by another process of the "
                    f"job: {failure}"
                )
            if failure:
                patience_ends = min(patience_ends, time.monotonic() + GRACE_SECONDS)

    def _read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        if ordinals:
            since = assembly.meter.clock()
            self._inner.read(ordinals, assembly)
            self.read_bytes += sum(map(assembly.length, ordinals))
            self.seconds += assembly.meter.clock() - since

    @contextmanager
    def _going_on(self) -> Generator[None]:
        """Keeps an error for later: the others wait for this process."""
        try:
            yield
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt) and isinstance(
                self._error, KeyboardInterrupt
            ):
                raise  # they mean it
            self._error = self._error or e

    def _mark(self, header: Bytes) -> None:
        """Says in a header why this process has nothing to send, if so."""
        header[:] = 0
        if self._error is not None:
            told = str(self._error) or type(self._error).__name__
            text = told.encode(errors="replace")[:HEADER_BYTES]
            header[: len(text)] = np.frombuffer(text, np.uint8)

    def _stored(
        self, chunks: Sequence[int], assembly: Assembly, ahead: ThreadPoolExecutor
    ) -> Generator[Bytes]:
        """Yields the bytes of chunks as they are stored, one after another; while some
        are used, the next are read."""
        batches = deque(self._batches(chunks))
        coming: deque[Future[dict[int, Bytes]]] = deque()
        while batches or coming:
            while batches and len(coming) < 2:
                batch = batches.popleft()
                coming.append(ahead.submit(self._elements, batch, assembly))
            elements = coming.popleft().result()
            for chunk in list(elements):
                yield elements.pop(chunk)
                checksum = int(self._manifest.sums.crc32c[chunk])
                tail = checksum.to_bytes(CHECKSUM_BYTES, "little")
                yield np.frombuffer(tail, np.uint8)

    def _batches(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        """What is read at once."""
        lengths, batch, held = self._manifest.tree.stored_lengths, list[int](), 0
        for chunk in chunks:
            length = int(lengths[chunk])
            if batch and held + length > BATCH_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(chunk)
            held += length
        if batch:
            yield batch

    def _elements(self, chunks: Sequence[int], assembly: Assembly) -> dict[int, Bytes]:
        """Reads the elements of chunks, in their order."""
        tree, wanted = self._manifest.tree, dict[int, dict[Region, int]]()
        found: dict[int, Bytes] = dict.fromkeys(chunks, _NOTHING)
        if self._error is not None:  # nobody wants them any more
            return found
        for chunk in chunks:
            row, within = tree.locate(chunk)
            wanted.setdefault(row, {})[tree.grids[row].region(within)] = chunk

        def keep(buffer: Buffer) -> None:
            grid = tree.grids[buffer.row]
            for region, array in zip(buffer.regions, buffer.arrays, strict=True):
                flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                if len(flat) < grid.chunk_bytes:
                    flat = _padded(flat, array.shape, grid.chunk_shape)
                found[wanted[buffer.row][region]] = flat

        own = Assembly(
            self._manifest,
            [(row, list(regions)) for row, regions in wanted.items()],
            name=self._name,
            place=keep,
            within=assembly,
        )
        self._read(own.missing, own)
        return found

    def _take(
        self, process: int, part: Bytes, incoming: _Incoming, assembly: Assembly
    ) -> None:
        """Puts what a process brought to where it goes."""
        if part[0]:
            told = bytes(part[:HEADER_BYTES]).rstrip(b"\0").decode(errors="replace")
            self._error = self._error or PeerFailedError(
                f"restore of {self._name}: {process_name(self._job, process)} could "
                f"not read its share, or use what came: {told}"
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
            if assembly.needs(chunk):  # else of a leaf on devices of others alone
                assembly.add(chunk, offset, piece.data)
                if process != self._job.index:
                    self.received_bytes += len(piece)


def may_spread() -> bool:
    """Returns whether this process has left no exchange before its end."""
    return not _left.is_set()


def _fill(memory: Bytes, left: Bytes, more: Iterator[Bytes]) -> Bytes:
    """Fills memory with what is left and with more; returns what is left of that."""
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


def _padded(elements: Bytes, shape: Sequence[int], chunk_shape: Sequence[int]) -> Bytes:
    """The elements of a chunk as they are stored: with zeros past the leaf."""
    count = int(np.prod(shape, dtype=int))
    itemsize = len(elements) // count
    padded = np.zeros((*chunk_shape, itemsize), np.uint8)
    index = tuple(slice(n) for n in shape)
    padded[index] = elements.reshape(*shape, itemsize)
    return padded.reshape(-1)
