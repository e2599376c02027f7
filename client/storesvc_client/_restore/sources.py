"""Reads stored chunks from the server with ``ReadChunks``, or from data files in a
directory or a bucket.

The manifest alone determines which ranges of which files to read.

In a directory they are read in file order, directly into the buffers where a chunk is
one contiguous range. Bytes are verified piece by piece while they are in the
processor's cache, so a page of memory is touched again only by its user. A few threads
take reads from one list; each reads, verifies, copies if necessary, and hands over
complete buffers.

A request to a bucket takes about 30 ms until its first byte and then moves about
50 MB/s, whatever the network. So neighbouring chunks are read together, including gaps
that cost less than another request, and many requests are in flight at a time. One
thread sends the requests and hedges or repeats late ones. One thread per processor
verifies the responses and copies them into buffers; more would only wait for each
other.
"""

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import Read
from storesvc.format.dtypes import CHECKSUM_BYTES
from storesvc.format.manifests import Manifest
from storesvc.storage import rooted_files
from storesvc.storage.requests import DISK_SECONDS, LEAST_BYTES_PER_SECOND
from storesvc.storage.threads import Threads
from storesvc_client._chunks.buffers import Bytes
from storesvc_client._chunks.memory import ALIGNMENT, allocate
from storesvc_client._chunks.slabs import parse_frame
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.data_file_reads import (
    BUDGET_BYTES,
    PIECE_BYTES,
    SMALL_BYTES,
    BufferBudget,
    check_or_read_again,
    describe,
    plan_file_reads,
    unpack,
)
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.retry import clear_variables
from storesvc_client._storage.bucket import BucketRoot, RangeRead
from storesvc_client.errors import (
    DataLossError,
    StoreError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import chunk_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2 import ChunkFrame

STREAMS: Final = min(4, max(2, (os.cpu_count() or 1) // 2))
"""Maximum streams of one restore, each over a socket of its own. On two cores a second
socket saves a tenth of the CPU time; a third stream costs as much."""

CHUNKS_A_CALL: Final = 4096
"""Maximum chunks requested by one call."""

_METHOD: Final = "/storesvc.v1.ChunkService/ReadChunks"

_Method: TypeAlias = "grpc.UnaryStreamMultiCallable[api.ReadChunksRequest, bytes]"


def cut_shares(
    ordinals: Sequence[int], sizes: Sequence[int], count: int
) -> Iterator[Sequence[int]]:
    """Cuts chunks into the shares of single calls, of equal size in bytes, so that
    streams end together.

    Args:
        sizes: Stored size of each, in bytes.
        count: Number of shares; more if a share would have too many chunks.
    """
    least = -(-sum(sizes) // count)
    begin = size = 0
    for end, more in enumerate(sizes, 1):
        size += more
        if size >= least or end - begin == CHUNKS_A_CALL or end == len(ordinals):
            yield ordinals[begin:end]
            begin, size = end, 0


class ServerSource:
    """Reads stored chunks with ``ReadChunks`` over several streams."""

    def __init__(self, connection: Connection, *, name: str, uid: str) -> None:
        self._connection = connection
        self._name = name
        self._uid = uid
        self.budget_bytes = BUDGET_BYTES
        self._context = copy_context()
        """Context of the restore: the calls of all threads belong to its span."""
        self._streams: set[grpc.Call] = set()
        self._stopped = False

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """See ``ChunkSource.read``; resumes broken streams.

        Requests chunks in windows whose buffers fit the budget, because the server
        chooses the order within a window. Chunks ascend by leaf, so a window completes
        most of the buffers that it allocates.
        """
        left = ordinals
        while left and not self._stopped:
            count = assembly.count_fitting(left, self.budget_bytes)
            self._read_window(left[:count], assembly)
            left = left[count:]

    def _read_window(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        """Reads chunks over several streams; returns when all are complete."""
        sizes = [assembly.length(ordinal) for ordinal in ordinals]
        calls = list(cut_shares(ordinals, sizes, STREAMS))
        channels = cycle(self._connection.channels(min(STREAMS, len(calls))))
        with Threads(STREAMS, "storesvc-restore") as pool:
            futures = [
                pool.submit(
                    self._context.copy().run,
                    partial(self._read, call, assembly, next(channels)),
                )
                for call in calls
            ]
            try:
                self._wait(futures, assembly)
            except BaseException:  # one failed, or Ctrl-C: stop the others
                self._stopped = True
                for future in futures:
                    future.cancel()
                for stream in tuple(self._streams):
                    stream.cancel()
                raise

    def _wait(self, futures: "Sequence[Future[None]]", assembly: Assembly) -> None:
        """Waits for the streams until the deadline; a server may send nothing."""
        left = assembly.seconds_left
        try:
            for future in as_completed(futures, None if left == math.inf else left):
                future.result()
        except TimeoutError:
            assembly.check_time()
            for future in futures:  # the last chunks have just arrived
                future.result()

    def _read(
        self, ordinals: Sequence[int], assembly: Assembly, channel: grpc.Channel
    ) -> None:
        # Not the generated stub: it would parse the chunks into messages, a copy.
        method: _Method = channel.unary_stream(
            _METHOD, request_serializer=api.ReadChunksRequest.SerializeToString
        )
        left = list(ordinals)
        while left and not self._stopped:
            for attempt in self._connection.attempts("ReadChunks"):
                assembly.check_time()
                with attempt:
                    left = self._read_some(method, left, assembly)

    def _read_some(
        self, method: _Method, ordinals: Sequence[int], assembly: Assembly
    ) -> list[int]:
        """Reads chunks in one stream; returns those missing when it broke."""
        try:
            self._stream(method, ordinals, assembly)
            left = assembly.restart(ordinals)
            if left:
                raise UnavailableError(
                    f"store {self._connection.address} ended a stream early: "
                    f"{len(left)} chunks are missing or were corrupted in transit"
                )
        except UnavailableError:
            if self._stopped:
                return []
            left = assembly.restart(ordinals)
            if len(left) == len(ordinals):
                raise
        return left

    def _stream(
        self, method: _Method, ordinals: Sequence[int], assembly: Assembly
    ) -> None:
        request = api.ReadChunksRequest(name=self._name, uid=self._uid, chunk=ordinals)
        stream = method(request)
        self._streams.add(stream)
        try:
            if self._stopped:  # set before the stream was in the set to be cancelled
                return
            with (
                translate_rpc_errors(self._connection.address),
                assembly.meter.part(f"stream from chunk {ordinals[0]}"),
            ):
                while True:
                    with assembly.meter.phase("read"):
                        response = next(stream, None)
                    if response is None:
                        break
                    self._take(response, assembly)
        finally:
            self._streams.discard(stream)
            stream.cancel()  # after an error here the server must stop sending

    def _take(self, response: bytes, assembly: Assembly) -> None:
        try:
            frame, data = parse_frame(response)
        except DecodeError:
            frame, data = ChunkFrame(length=[0]), memoryview(b"")
        if (
            not len(frame.chunk) == len(frame.offset) == len(frame.length)
            or 0 in frame.length
            or sum(frame.length) != len(data)
        ):
            raise DataLossError(
                f"store {self._connection.address} sent an inconsistent frame: its "
                "lengths do not match its chunks or its data"
            )
        at = 0
        for ordinal, offset, length in zip(
            frame.chunk, frame.offset, frame.length, strict=True
        ):
            assembly.add(ordinal, offset, data[at : at + length])
            at += length


THREADS: Final = min(os.cpu_count() or 1, 8)
"""Reads in progress at a time."""

BLOCK_BYTES: Final = 2 << 20
"""Maximum bytes of neighbouring chunks that one call reads."""

GAP_BYTES: Final = 4 << 10
"""Largest gap between neighbours that is read too: storage reads whole pages."""

OPEN_FILES: Final = 64
"""Maximum files that stay open between the reads of a restore: to open one safely takes
as many system calls as it has folders."""


class _OpenFile:
    """A descriptor, closed when nothing refers to it: no read can use another file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class FileSource:
    """Reads stored chunks from the data files of a run in a directory."""

    def __init__(self, root: Path, pool: str, manifest: Manifest, *, name: str) -> None:
        """Creates the source of the files below a prefix; nothing is read yet."""
        self._root = root
        self._pool = pool
        self._manifest = manifest
        self._name = name
        self.budget = BufferBudget(BUDGET_BYTES)
        self._calls: dict[int, tuple[float, Read]] = {}
        """Timeout of the file call in progress and its read, by thread."""
        self._open: dict[str, _OpenFile] = {}

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        with assembly.meter.phase("plan"):
            reads = self._plan_reads(ordinals, assembly)
        perform = partial(self._perform, _Scratch(), assembly)
        check = partial(self._check, assembly)
        try:
            self.budget.perform(reads, perform, assembly, threads=THREADS, check=check)
        finally:
            self._open.clear()

    def _check(self, assembly: Assembly) -> None:
        """Checks the timeouts of the file calls and the deadline of the restore."""
        now = time.monotonic()
        for due, read in list(self._calls.values()):
            if now > due:
                raise UnavailableError(
                    f"{self._name}: data file {self._path(read)} has not answered in "
                    "time; check its disk or network, and try again",
                    reason="STORAGE_UNAVAILABLE",
                )
        assembly.check_time()

    @contextmanager
    def _due(self, read: Read, size_bytes: int) -> Iterator[None]:
        """Sets the timeout of a file call, which ``_check`` enforces."""
        due = time.monotonic() + DISK_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND
        self._calls[threading.get_ident()] = due, read
        try:
            yield
        finally:
            del self._calls[threading.get_ident()]

    def _path(self, read: Read) -> Path:
        return self._root / self._pool / read.file

    def _plan_reads(self, ordinals: Sequence[int], assembly: Assembly) -> list[Read]:
        chunks = np.array(ordinals, np.int64)
        alone = self._manifest.places.length[chunks] >= SMALL_BYTES
        large = chunks[alone].tolist()
        alone[alone] = [assembly.is_contiguous(ordinal) for ordinal in large]
        return plan_file_reads(
            self._manifest,
            alone=chunks[alone],
            together=chunks[~alone],
            at_most=BLOCK_BYTES,
            gap_bytes=GAP_BYTES,
        )

    def _perform(self, scratch: "_Scratch", assembly: Assembly, read: Read) -> int:
        """Performs a read; returns the bytes of the buffers handed over."""
        take = self._read_single if len(read.chunks) == 1 else self._read_neighbours
        with self._translating(read), assembly.meter.part(read.file):
            file = self._open_file(read)
            try:
                return take(file.descriptor, read, scratch, assembly)
            finally:
                del file  # an error keeps this frame, and must not keep the file open

    def _read_single(
        self, file: int, read: Read, scratch: "_Scratch", assembly: Assembly
    ) -> int:
        """Reads one chunk into its buffer, or into scratch memory from which each piece
        is copied while it is in the cache; returns the bytes handed over."""
        (chunk,), (length,) = read.chunks, read.lengths
        size = length - CHECKSUM_BYTES
        tail, checksum, meter = bytearray(CHECKSUM_BYTES), 0, assembly.meter
        for at, end, place in assembly.pieces(chunk, PIECE_BYTES):
            begin = read.start + at
            into = None if size >= SMALL_BYTES and _is_slow(place, begin) else place
            piece = scratch.memory(begin, end - at) if into is None else into
            # the stored checksum comes after the elements: read with the last piece
            buffers = [piece.data, memoryview(tail)] if end == size else [piece.data]
            with meter.phase("read"):
                self._fill(file, buffers, read, begin)
            with meter.phase("verify"):
                checksum = crc32c(piece.data, checksum)
            if into is None:
                with meter.phase("copy"):
                    assembly.copy_elements(chunk, piece, at)
            # The restore ends with the error of the other read: stop early.
            if self.budget.is_stopped:
                raise UnavailableError(f"{self._name}: another read of it failed")
        again = partial(self._again, file, read, read.start, read.stop)
        return check_or_read_again(chunk, checksum, bytes(tail), assembly, again)

    def _read_neighbours(
        self, file: int, read: Read, scratch: "_Scratch", assembly: Assembly
    ) -> int:
        """Reads neighbouring chunks into scratch memory and copies them from there;
        returns the bytes handed over."""
        memory = scratch.memory(read.start, read.stop - read.start)
        with assembly.meter.phase("read"):
            self._fill(file, [memory.data], read, read.start)
        return unpack(read, memory, assembly, partial(self._again, file, read))

    def _again(self, file: int, read: Read, start: int, stop: int) -> Bytes:
        """Reads bytes of a data file a second time."""
        memory = np.empty(stop - start, np.uint8)
        self._fill(file, [memory.data], read, start)
        return memory

    def _open_file(self, read: Read) -> _OpenFile:
        """Returns the file of a read, which may have been opened by an earlier one."""
        found = self._open.get(read.file)
        if found is None:
            place = f"{self._pool}{read.file}"
            with self._due(read, 0):
                found = _OpenFile(rooted_files.open_file(self._root, place))
            if len(self._open) >= OPEN_FILES:
                self._open.clear()
            self._open[read.file] = found
        return found

    @contextmanager
    def _translating(self, read: Read) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as e:
            raise self._lost(read, "is missing") from e
        except StoreError:  # some classes are OSErrors too
            raise
        except rooted_files.IrregularFileError as e:
            raise self._lost(read, f"is not read ({e})") from e
        except OSError as e:
            raise UnavailableError(
                f"{self._name}: cannot read data file {self._path(read)}: "
                f"{e.strerror}; connect without direct= to read it through the server"
            ) from e

    def _fill(
        self, file: int, buffers: list[memoryview], read: Read, offset: int
    ) -> None:
        """Reads until the buffers are full; a read may return less than requested."""
        wanted = sum(map(len, buffers))
        with self._due(read, wanted):
            got = os.preadv(file, buffers, offset)
        while got < wanted:
            left, skipped = [], got
            for buffer in buffers:
                left.append(buffer[min(skipped, len(buffer)) :])
                skipped -= min(skipped, len(buffer))
            with self._due(read, wanted):
                more = os.preadv(file, left, offset + got)
            if not more:
                raise self._lost(read, f"ends at byte {offset + got}")
            got += more

    def _lost(self, read: Read, what: str) -> DataLossError:
        named = describe(self._manifest, read)
        path = self._path(read)
        return DataLossError(
            f"{self._name} {named}: data file {path} {what}, expected "
            f"bytes {read.start} to {read.stop}; use another checkpoint",
            reason="CORRUPT_DATA",
        )


def _is_slow(into: Bytes | None, start: int) -> bool:
    """Returns whether the kernel takes twice as long to copy bytes of a file from an
    offset on to this memory as to aligned memory; this depends on the processor. Files
    of servers, and of storesvc 0.2, have chunks at any offset."""
    past = 0 if into is None else (into.ctypes.data - start) % ALIGNMENT
    return 0 < past < ALIGNMENT // 2


class _Scratch(threading.local):
    """Scratch memory of each thread, reused by its reads."""

    def __init__(self) -> None:
        self._memory = allocate(0)

    def memory(self, start: int, size_bytes: int) -> Bytes:
        """Returns scratch memory for bytes of a file from an offset on, aligned as they
        are in pages of the file; invalidates what was returned before."""
        if len(self._memory) < size_bytes + ALIGNMENT:
            self._memory = allocate(size_bytes + ALIGNMENT)
        return self._memory[start % ALIGNMENT :][:size_bytes]


PROCESSORS: Final = min(os.cpu_count() or 1, 8)
"""Threads that verify and copy responses."""

BUCKET_BUFFER_BYTES: Final = 512 << 20
"""Maximum bytes of buffers that are allocated and not handed over."""

BUCKET_READ_BYTES: Final = min(PROCESSORS, 4) * (128 << 20)
"""Maximum bytes of reads in flight, in addition to the buffers: what a processor
verifies and copies during one request. More would only touch more new memory, which
costs as much as a copy."""

BUCKET_BLOCK_BYTES: Final = 4 << 20
"""Maximum bytes of neighbouring chunks that one request reads. A larger block amortises
the latency of a request better, but fewer fit into the budget, and throughput falls."""

BUCKET_GAP_BYTES: Final = 128 << 10
"""Largest gap between neighbours that is read too; skipping more is worth a request."""

POLL_SECONDS: Final = 0.05
"""Interval at which the deadline of the restore is checked."""


class BucketSource:
    """Reads stored chunks from the data files of a run in a bucket."""

    def __init__(
        self, root: BucketRoot, pool: str, manifest: Manifest, *, name: str
    ) -> None:
        """Creates the source; see ``FileSource``."""
        self._root = root
        self._pool = pool
        self._manifest = manifest
        self._name = name
        self.budget = BufferBudget(BUCKET_BUFFER_BYTES, read_bytes=BUCKET_READ_BYTES)

    def read(self, ordinals: Sequence[int], assembly: Assembly) -> None:
        with assembly.meter.phase("plan"):
            reads = plan_file_reads(
                self._manifest,
                alone=np.empty(0, np.int64),  # a response must be copied in any case
                together=np.array(ordinals, np.int64),
                at_most=BUCKET_BLOCK_BYTES,
                gap_bytes=BUCKET_GAP_BYTES,
            )
        with Threads(PROCESSORS, "storesvc-direct") as pool:
            _BucketReads(self, assembly).run(deque(reads), pool)

    def start(self, read: Read) -> RangeRead:
        return self._root.start_read(
            f"{self._pool}{read.file}",
            read.start,
            read.stop,
            what=f"restore of {self._name}: data file {read.file}",
        )

    @property
    def at_once(self) -> int:
        """Maximum reads in flight."""
        return self._root.storage.concurrency

    def take(self, read: Read, calls: list[RangeRead], assembly: Assembly) -> int:
        """Verifies and copies the response to a read; returns the bytes of the buffers
        handed over."""
        named = describe(self._manifest, read)
        try:
            # The response is freed once it is copied to `memory`: new memory for more
            # of them costs as much as a copy.
            answer = calls.pop().result()
        except DataLossError as e:
            raise DataLossError(f"{self._name} {named}: {e}", reason=e.reason) from e
        except UnavailableError as e:
            raise UnavailableError(
                f"restore of {self._name}: {e}; {assembly.outstanding}", reason=e.reason
            ) from e
        if answer.state != "value":
            raise DataLossError(
                f"{self._name} {named}: data file {self._root}/{self._pool}{read.file} "
                "is missing; use another checkpoint",
                reason="CORRUPT_DATA",
            )
        memory: Bytes = np.frombuffer(answer.value, np.uint8)
        del answer
        return unpack(read, memory, assembly, partial(self._again, read))

    def _again(self, read: Read, start: int, stop: int) -> Bytes:
        """Reads bytes of a data file a second time."""
        answer = self.start(replace(read, start=start, stop=stop)).result()
        return np.frombuffer(answer.value, np.uint8)


class _BucketReads:
    """The reads in flight of one restore."""

    def __init__(self, source: BucketSource, assembly: Assembly) -> None:
        self._source = source
        self._assembly = assembly
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Reads that are answered; None after a response was processed."""
        self._in_flight: dict[Read, RangeRead] = {}
        self._taken: list[tuple[Read, Future[int]]] = []
        """Reads whose response is being processed."""
        self._parts: dict[Read, ExitStack] = {}
        """Time measurement of each read."""

    def run(self, reads: deque[Read], pool: Threads) -> None:
        """Performs the reads in the given order."""
        try:
            while reads or self._in_flight or self._taken:
                while (
                    reads
                    and len(self._in_flight) < self._source.at_once
                    and self._source.budget.may_begin(reads[0], self._assembly)
                ):
                    read = reads.popleft()
                    part = self._parts[read] = ExitStack()
                    part.enter_context(self._assembly.meter.part(read.file))
                    call = self._in_flight[read] = self._source.start(read)
                    call.add_done_callback(_putting(self._events, read))
                    del call  # or its response would stay until the next one
                self._await(pool)
                # Release the memory of processed reads; one that failed raises.
                for one in [one for one in self._taken if one[1].done()]:
                    self._taken.remove(one)
                    read, done = one
                    self._parts.pop(read).close()
                    self._source.budget.give_back(read, done.result())
                self._assembly.check_time()
        except BaseException:  # one failed, or Ctrl-C: stop the others
            pool.shutdown(cancel_futures=True)
            for _, done in self._taken:
                if done.done() and (error := done.exception()):  # raised nowhere
                    clear_variables(error)
            raise
        finally:
            for call in self._in_flight.values():
                call.cancel()
            self._taken.clear()  # their callbacks refer to this object
            for part in self._parts.values():
                part.close()

    def _await(self, pool: Threads) -> None:
        """Waits for the next event, and submits the response to a read to the thread
        pool."""
        try:
            with self._assembly.meter.phase("read"):
                read = self._events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if read is not None:
            call = self._in_flight.pop(read)
            taking = pool.submit(self._source.take, read, [call], self._assembly)
            taking.add_done_callback(lambda _: self._events.put(None))
            self._taken.append((read, taking))


def _putting(events: "queue.SimpleQueue[Any]", read: Read) -> Callable[[Any], None]:
    """Returns a callback that puts a read into a queue; it refers to nothing else, so
    that a response is freed at once though it is not taken."""
    return lambda _: events.put(read)
