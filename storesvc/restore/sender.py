"""Sending chunks: stored bytes as they lie, to many readers at once.

What is read becomes messages at once, and these are shared: the ``Shelf`` decides which
are in memory. That is the bound on the memory that downloads take, however many there
are; beside it each stream holds the message that it sends.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import numpy as np

from storesvc.errors import CorruptDataError, InvalidFieldError
from storesvc.format.chunks import I64
from storesvc.format.layout import RunPlaces
from storesvc.format.manifests import Manifest
from storesvc.format.names import RunName
from storesvc.restore.read_scheduler import Need, Reader, Shelf
from storesvc.restore.read_units import Unit, plan_units
from storesvc.restore.send_pacer import Turns
from storesvc.storage.tensorstore_bucket import KvBucket

READS_AHEAD: Final = 3
"""Units that a stream has read, or under way, beyond the one it sends."""

SHELF_BYTES: Final = 128 << 20
"""Of the units in memory, over all streams of a process."""

PATIENCE_SECONDS: Final = 2.0
"""How long one who needs room waits for those who want what takes it."""

_SHOWN: Final = 3

MAX_CHUNKS: Final = 65536
"""Chunks of one stream."""


class Sender:
    """Reads chunks for all streams of a process."""

    def __init__(self, bucket: KvBucket) -> None:
        self._bucket = bucket
        self._shelf: Shelf[Unit] = Shelf(SHELF_BYTES)
        self._reads: dict[Unit, asyncio.Task[list[bytes]]] = {}
        self._changed = asyncio.Event()
        self._turns = Turns()
        self._hungry = 0
        """Streams that wait for room: none reads ahead before they have it."""

    async def send(
        self, run: RunName, manifest: Manifest, chunks: Sequence[int]
    ) -> AsyncGenerator[bytes]:
        """Yields the stored bytes of chunks, each once, in serialised responses.

        Raises:
            InvalidFieldError: The ordinals are not strictly ascending, are too
                many, or are not the manifest's.
            CorruptDataError: Stored bytes are missing or short.
        """
        wanted = check_ordinals(chunks, manifest.tree.chunk_count)
        pool = RunPlaces(run).pool
        units = await asyncio.to_thread(plan_units, manifest, pool, wanted)
        reader = self._shelf.join(units)
        try:
            while reader.left:
                sent, count = 0, 1
                while sent < count:
                    # Asked for each time: what is sent slowly may go meanwhile, and
                    # must not be kept from going by a name that this has for it.
                    response, count = await self._response(reader, sent)
                    await self._turns.take()
                    yield response
                    del response
                    sent += 1
                self._forget(self._shelf.finish(reader))
        finally:
            self._forget(self._shelf.leave(reader))

    async def _response(self, reader: Reader[Unit], number: int) -> tuple[bytes, int]:
        """One of the unit that a reader takes now, and how many there are."""
        unit = self._shelf.take(reader) or await self._awaited(reader)
        try:
            responses = self._reads[unit].result()
        except BaseException:  # told to one; others shall read it themselves
            self._shelf.drop(unit)
            del self._reads[unit]
            raise
        if number == 0:
            self._read_ahead(reader)
        return responses[number], len(responses)

    async def _awaited(self, reader: Reader[Unit]) -> Unit:
        """Waits for a unit that a reader can take."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while (unit := self._shelf.take(reader)) is None:
            needed = self._shelf.needed(reader)
            need = Need.NOW if clock() - since < PATIENCE_SECONDS else Need.LATE
            is_hungry = needed is not None and not self._begin(needed, need)
            self._hungry += is_hungry
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self._hungry -= is_hungry
        return unit

    def _read_ahead(self, reader: Reader[Unit]) -> None:
        while not self._hungry:
            unit = self._shelf.ahead(reader, READS_AHEAD)
            if unit is None or not self._begin(unit, Need.SOON):
                return

    def _begin(self, unit: Unit, need: Need) -> bool:
        """Begins to read a unit; False: there is no room."""
        going = self._shelf.make_room(unit, need)
        if going is None:
            return False
        self._forget(going)
        self._reads[unit] = task = asyncio.create_task(self._read(unit))
        task.add_done_callback(lambda _: self._arrived(unit, task))
        return True

    async def _read(self, unit: Unit) -> list[bytes]:
        try:
            return await self._bucket.read_parts(
                unit.place, unit.start, unit.start + unit.size, unit.parts()
            )
        except CorruptDataError as e:
            describe = unit.manifest.tree.describe_chunk
            named = ", ".join(map(describe, unit.ordinals()[:_SHOWN].tolist()))
            raise CorruptDataError(f"{named}: {e}", **e.metadata) from e

    def _arrived(self, unit: Unit, task: asyncio.Task[list[bytes]]) -> None:
        if not task.cancelled():
            task.exception()  # seen, even if nobody wants it any more
        if self._reads.get(unit) is task:
            self._shelf.arrive(unit)
            self._wake()

    def _forget(self, units: Sequence[Unit]) -> None:
        """Gives up what is not on the shelf any more."""
        for unit in units:
            self._reads.pop(unit).cancel()
        if units:
            self._wake()

    def _wake(self) -> None:
        """Lets those look again who wait."""
        self._changed.set()
        self._changed = asyncio.Event()


def check_ordinals(chunks: Sequence[int], count: int) -> I64:
    """Returns the ordinals of a request.

    Raises:
        InvalidFieldError: They break a rule of ``ReadChunksRequest.chunk``.
    """
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
