"""A small save of one process: all of it goes to the server in one call.

The whole state is copied and summed up while the caller waits, which takes less than to
wake another thread. It is sent whole: to reuse what is stored takes four times as many
requests. A server of an earlier release, which does not know the call, gets the copy in
the calls of ``Upload``.
"""

from collections.abc import Container, Iterator
from typing import Final

import numpy as np

from storesvc_client._chunks.slabs import FilledSlab
from storesvc_client._rpc.connection import Connection
from storesvc_client._save.snapshot import SlabQueue, Source, make_probe
from storesvc_client._save.upload import Upload, UploadPlan
from storesvc_client._save.writers import NotInOneCallError, Writer
from storesvc_client._session import Session
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.models import Checkpoint
from storesvc_proto.v1 import upload_service_pb2 as api

SMALL_BYTES: Final = 1 << 20
"""Maximum stored bytes of a small save."""

_MAX_ROWS: Final = 1000
"""Maximum leaves, and maximum chunks."""


def is_small(connection: Connection, writer: Writer, plan: UploadPlan) -> bool:
    """Returns whether a save can be made in one call, by its writer and its plan."""
    tree, base = plan.tree, writer.described.base
    return (
        connection.creates_in_one_call
        and writer.writer_count == 1
        and (base is None or base.which == "latest")
        and len(tree.leaves) <= _MAX_ROWS
        and tree.chunk_count <= _MAX_ROWS
        and sum(slab.stored_bytes for slab in plan.slabs) <= SMALL_BYTES
    )


class SmallUpload(Upload):
    """A save in one call."""

    def __init__(
        self,
        session: Session,
        writer: Writer,
        plan: UploadPlan,
        slab_queue: SlabQueue,
        meter: Meter,
        source: Source,
    ) -> None:
        """Creates the upload of a source that stays unchanged until ``take`` has
        returned; ``write`` calls it if the caller has not."""
        super().__init__(session, writer, plan, slab_queue, meter)
        self._slabs = plan.slabs
        self._source: Source | None = source
        self._data = b""
        self._filled: list[FilledSlab] = []
        self._created: Checkpoint | None = None

    def take(self) -> None:
        """Copies the state and sums it up; if that fails, so does ``write``."""
        source, self._source = self._source, None
        assert source is not None
        try:
            with source.reading():
                self._data = b"".join(self._fill(source))
        except BaseException as e:
            self._slab_queue.fail(e)
            raise

    def _fill(self, source: Source) -> Iterator[memoryview]:
        """Fills the slabs, and yields the parts of their chunks in stored form."""
        for slab in self._slabs:
            buffer = np.empty(slab.size, np.uint8)
            with self._meter.phase("snapshot"):
                for ordinal, at, size in slab.rows():
                    source.copy(ordinal, buffer[at : at + size])
            chunks = [[buffer[at : at + size]] for _, at, size in slab.rows()]
            filled = FilledSlab(slab, slab.ordinals, None, chunks)
            self._filled.append(filled)
            filled.sum_up(self._sums, self._meter, slab.ordinals)
            self.probes[slab.first :][: len(chunks)] = list(map(make_probe, chunks))
            for _, _, parts in filled.stored(self._sums, self._meter):
                yield from parts

    def write(self, known_base: str, reused: Container[str] = ()) -> None:
        """Makes the save; see ``Upload.write``."""
        try:
            self._slab_queue.check()  # the copy may have failed
            if self._source is not None:
                self.take()
            name, self._created = self._writer.create(
                self._data, self._measure_writer()
            )
            self._begun.set_result(api.Upload(name=name))
            self._meter.add(len(self._data))
        except NotInOneCallError:
            for filled in self._filled:
                self._slab_queue.put(filled)
            self._slab_queue.end()
            super().write(known_base, reused)
        except BaseException as e:
            self._begun.set_exception(e)
            raise

    def _commit(self) -> Checkpoint:
        return super()._commit() if self._created is None else self._created
