"""Sends stored chunks, unchanged, to many clients at once.

Bytes that were read are packed into response messages once, and all streams share the
messages. ``ReadScheduler`` decides which of them stay in memory. It bounds the memory
of all restores of the process together; in addition, each stream holds the one message
that it sends.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import numpy as np

from storesvc.errors import CorruptDataError, InvalidFieldError
from storesvc.format.chunks import I64
from storesvc.format.layout import RunPaths
from storesvc.format.manifests import Manifest
from storesvc.format.names import RunName
from storesvc.restore.read_scheduler import (
    Reader,
    ReadScheduler,
    Unit,
    Urgency,
    plan_units,
)
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.storage.requests import retrieve_error
from storesvc.telemetry.events import ChunksMoved, publish

READS_AHEAD: Final = 3
"""Units that a stream has read or in flight, in addition to the one that it sends."""

READ_BUFFER_BYTES: Final = 128 << 20
"""Maximum bytes of the units in memory or in flight, over all streams of a process."""

EVICTION_SECONDS: Final = 2.0
"""Time a stream waits for room before units that slower streams want are evicted."""

MAX_CHUNKS: Final = 65536
"""Maximum chunks of one stream."""


class SendPacer:
    """Lets one large message be sent per iteration of the event loop.

    gRPC copies a sent message within the event loop. 64 messages in a row would delay
    a short call by 20 ms, at each of its own steps.
    """

    def __init__(self) -> None:
        self._queue = asyncio.Lock()
        self._taken = asyncio.Event()

    async def wait_turn(self) -> None:
        """Waits for an iteration of the event loop in which nothing was sent yet."""
        async with self._queue:
            if self._taken.is_set():
                await asyncio.sleep(0)  # the next iteration, which begins with clear
            self._taken.set()
            asyncio.get_running_loop().call_soon(self._taken.clear)


class Sender:
    """Reads and sends chunks for all streams of a process."""

    def __init__(
        self,
        bucket: TensorStoreBucket,
        *,
        buffer_bytes: int = READ_BUFFER_BYTES,
        eviction_seconds: float = EVICTION_SECONDS,
    ) -> None:
        self._bucket = bucket
        self._eviction_seconds = eviction_seconds
        self._scheduler: ReadScheduler[Unit] = ReadScheduler(buffer_bytes)
        self._reads: dict[Unit, asyncio.Task[list[bytes]]] = {}
        self._changed = asyncio.Event()
        self._pacer = SendPacer()
        self._waiting_for_room = 0
        """Streams that wait for room: no stream reads ahead until they have it."""

    async def send(
        self, run: RunName, manifest: Manifest, chunks: Sequence[int]
    ) -> AsyncGenerator[bytes]:
        """Yields the stored bytes of chunks, each chunk once, as serialised responses.

        Raises:
            InvalidFieldError: The ordinals are not strictly ascending, too many, or
                not in the manifest.
            CorruptDataError: Stored bytes are missing or truncated.
        """
        wanted = check_ordinals(chunks, manifest.tree.chunk_count)
        pool = RunPaths(run).pool
        units = await asyncio.to_thread(plan_units, manifest, pool, wanted)
        reader = self._scheduler.join(units)
        try:
            while reader.remaining:
                sent, count, size_bytes = 0, 1, 0
                while sent < count:
                    # Look the unit up for each message: while a slow client receives
                    # one, the unit may be evicted, and a local reference to its
                    # messages would keep their memory.
                    response, count, size_bytes = await self._response(reader, sent)
                    await self._pacer.wait_turn()
                    yield response
                    del response
                    sent += 1
                self._forget(self._scheduler.finish(reader))
                publish(
                    ChunksMoved(direction="out", path="stream", size_bytes=size_bytes)
                )
        finally:
            self._forget(self._scheduler.leave(reader))

    async def _response(
        self, reader: Reader[Unit], number: int
    ) -> tuple[bytes, int, int]:
        """Returns one message of the unit that a reader takes now, the number of its
        messages, and its bytes."""
        unit = self._scheduler.take(reader) or await self._wait_for_unit(reader)
        try:
            responses = self._reads[unit].result()
        except BaseException:
            # One stream reports the error; other streams read the unit again.
            self._scheduler.drop(unit)
            del self._reads[unit]
            raise
        while number == 0 and not self._waiting_for_room:
            ahead = self._scheduler.next_ahead(reader, READS_AHEAD)
            if ahead is None or not self._begin(ahead, Urgency.AHEAD):
                break
        return responses[number], len(responses), unit.size

    async def _wait_for_unit(self, reader: Reader[Unit]) -> Unit:
        """Waits for a unit that a reader can take."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while (unit := self._scheduler.take(reader)) is None:
            needed = self._scheduler.next_needed(reader)
            is_overdue = clock() - since >= self._eviction_seconds
            urgency = Urgency.OVERDUE if is_overdue else Urgency.NEEDED
            lacks_room = needed is not None and not self._begin(needed, urgency)
            self._waiting_for_room += lacks_room
            try:
                async with asyncio.timeout(self._eviction_seconds):
                    await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting_for_room -= lacks_room
        return unit

    def _begin(self, unit: Unit, urgency: Urgency) -> bool:
        """Begins to read a unit; False: there is no room."""
        evicted = self._scheduler.make_room(unit, urgency)
        if evicted is None:
            return False
        self._forget(evicted)
        self._reads[unit] = task = asyncio.create_task(self._read(unit))
        task.add_done_callback(lambda _: self._end_read(unit, task))
        return True

    async def _read(self, unit: Unit) -> list[bytes]:
        try:
            return await self._bucket.read_parts(
                unit.place, unit.start, unit.start + unit.size, unit.parts()
            )
        except CorruptDataError as e:
            describe = unit.manifest.tree.describe_chunk
            named = ", ".join(map(describe, unit.ordinals()[:3].tolist()))
            raise CorruptDataError(f"{named}: {e}", **e.metadata) from e

    def _end_read(self, unit: Unit, task: asyncio.Task[list[bytes]]) -> None:
        retrieve_error(task)  # perhaps no stream wants it now
        if self._reads.get(unit) is task:
            self._scheduler.mark_ready(unit)
            self._wake()

    def _forget(self, units: Sequence[Unit]) -> None:
        """Cancels the reads of units that were evicted, and frees their messages."""
        for unit in units:
            self._reads.pop(unit).cancel()
        if units:
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def check_ordinals(chunks: Sequence[int], count: int) -> I64:
    """Returns the ordinals of a request as an array."""
    wanted = np.array(chunks, np.uint64)
    if len(wanted) > MAX_CHUNKS:
        raise InvalidFieldError(
            f"chunk: expected at most {MAX_CHUNKS} ordinals, got {len(wanted)}; "
            "ask in several calls"
        )
    if np.any(wanted[1:] <= wanted[:-1]):
        raise InvalidFieldError("chunk: expected strictly ascending ordinals")
    if len(wanted) and wanted[-1] >= count:
        raise InvalidFieldError(
            f"chunk: the checkpoint has {count} chunks, got {wanted[-1]}"
        )
    return wanted.astype(np.int64)
