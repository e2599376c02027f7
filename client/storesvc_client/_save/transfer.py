"""Stores a checkpoint that is read from elsewhere: files of another project, or
another store. Needs no jax.

``transfer`` runs two parts at a time: a ``Filler`` reads chunks into staging memory,
and an ``Upload`` stores them, as in any save. The order makes a checkpoint complete or
absent, and an interrupted transfer cheap to repeat:

1. Begin the upload; it takes over the chunks of an interrupted one of the same step.
2. Read and store the chunks that the store lacks.
3. Compare the checksums with the ones that the source has, if any.
4. Commit.

A transfer that fails leaves its upload to the next one of the step, and the collector
removes it when its lease has expired.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, Protocol

import numpy as np

from storesvc.format.chunks import I64, Sums
from storesvc.format.names import CheckpointName
from storesvc.format.trees import Tree
from storesvc.storage.threads import Threads
from storesvc_client._chunks.memory import Bytes, ExtentPool, StagingPool
from storesvc_client._chunks.slabs import FilledSlab, Slab
from storesvc_client._rpc.connection import RunStub
from storesvc_client._save.snapshot import SlabQueue
from storesvc_client._save.upload import SaveResult, Upload
from storesvc_client._save.writers import Description, Writer, checked_description
from storesvc_client._session import Session
from storesvc_client._telemetry.progress import Meter, ProgressCallback
from storesvc_client._values.models import Checkpoint
from storesvc_client._values.options import DEFAULT_LEASE
from storesvc_client.errors import (
    DataLossError,
    NotFoundError,
    StoreError,
    UnavailableError,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import upload_service_pb2 as upload_api

MEMORY_BYTES: Final = 1 << 30
"""Maximum memory of a transfer, if the client allows as much for saves. Reading is
ahead of writing by this much, and more would only fill memory."""

READING_SHARE: Final = 4
"""Part of the memory, one in so many, that is left to the reader, which for example
decodes what it reads. The rest is staging memory."""


class Filler(Protocol):
    """Reads the chunks of a checkpoint."""

    def fill(self, slab_queue: SlabQueue, held: I64, meter: Meter) -> None:
        """Reads chunks, except those that the store holds, into staging memory and puts
        them into the queue; returns early once the queue is cancelled."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TransferPlan:
    """Plan of an upload with one writer, which stores all chunks."""

    tree: Tree
    slabs: Sequence[Slab]
    needs_like: tuple[str, ...] = ()

    @property
    def own(self) -> I64:
        """Ordinals of all chunks."""
        return np.arange(self.tree.chunk_count)


class SharedBuffer:
    """One staging buffer with several slabs; returns to the pool with the last one."""

    def __init__(self, slab_queue: SlabQueue, buffer: Bytes) -> None:
        self._slab_queue = slab_queue
        self._buffer = buffer
        self._lock = Lock()
        self._lent = 0

    def put(self, slabs: Iterable[tuple[int, Slab]]) -> None:
        """Puts filled slabs into the queue, each with its offset in the buffer."""
        lent = list(slabs)
        self._lent = len(lent)
        for start, slab in lent:
            pieces = [
                [self._buffer[start + at : start + at + size]]
                for _, at, size in slab.rows()
            ]
            filled = FilledSlab(slab, slab.ordinals, None, pieces, self._on_returned)
            self._slab_queue.put(filled)

    def _on_returned(self) -> None:
        with self._lock:
            self._lent -= 1
            is_last = not self._lent
        if is_last:
            self._slab_queue.drop(self._buffer)


class _TransferWriter(Writer):
    """The writer of a transfer. Its base only saves bytes, and may be gone: a transfer
    of many steps takes long, and a retention policy may delete the steps before."""

    def begin(self) -> upload_api.Upload:
        """See ``Writer.begin``; begins without the base if that is gone."""
        try:
            return super().begin()
        except NotFoundError:
            if self.described.base is None:
                raise
            self.described = replace(self.described, base=None)
            return super().begin()


def reading_bytes(session: Session) -> int:
    """Returns the memory that is left to the reader of a transfer."""
    return min(session.staging.budget_bytes, MEMORY_BYTES) // READING_SHARE


def staging_bytes(session: Session) -> int:
    """Returns the limit of the staging memory of a transfer."""
    return (READING_SHARE - 1) * reading_bytes(session)


def transfer(
    session: Session,
    description: Description,
    plan: TransferPlan,
    filler: Filler,
    *,
    known: Sums | None = None,
    progress: ProgressCallback | None = None,
    staging: ExtentPool | None = None,
) -> SaveResult:
    """Reads a checkpoint and commits it; returns the result of the save.

    Args:
        session: Connection, staging memory and data root of the store.
        description: The checkpoint, except its tree.
        known: Checksums of all chunks as the source has them. Chunks that the store
            holds are then not read, and the stored ones are compared. None: the store
            is asked for each chunk once it was read.
        progress: Called with a ``Progress``.
        staging: Staging memory, cleared at the end; None: a pool of
            ``staging_bytes``.

    Raises:
        StoreError: The source could not be read, or the store could not be written.
        DataLossError: A chunk differs from its checksums in the source.
    """
    pool = StagingPool(staging_bytes(session)) if staging is None else staging
    meter = Meter("save", str(description), progress)
    slab_queue = SlabQueue(pool, is_open=True)
    writer = _TransferWriter(session.connection, description, plan.tree, meter)
    upload = Upload(session, writer, plan, slab_queue, meter)
    if known is None:  # a step that was changed in part is stored only in part
        upload.ask(plan.own)
    try:
        with (
            meter,
            upload.named(),
            Threads(2, f"storesvc-transfer-{description.step}") as threads,
        ):
            try:
                writing = threads.submit(upload.write, "")
                filling = threads.submit(
                    _fill, upload, filler, slab_queue, known, meter
                )
                writing.result()  # raises the error of reading, too
                filling.result()
                if known is not None:
                    _check_sums(str(description), plan.tree, known, upload.sums)
                return upload.commit()
            except Exception:
                raise
            except BaseException:  # Ctrl-C ends both parts
                # an error of the store, so that the upload is kept and resumed
                slab_queue.fail(UnavailableError("the transfer was interrupted"))
                raise
    finally:
        pool.clear()


def _fill(
    upload: Upload,
    filler: Filler,
    slab_queue: SlabQueue,
    known: Sums | None,
    meter: Meter,
) -> None:
    try:
        held = np.empty(0, np.int64) if known is None else upload.held(known)
        filler.fill(slab_queue, held, meter)
    except StoreError as e:
        slab_queue.end(e)  # stores what was read, for the next transfer of the step
        raise
    except BaseException as e:
        slab_queue.fail(e)
        raise
    slab_queue.end()


def _check_sums(name: str, tree: Tree, known: Sums, stored: Sums) -> None:
    """Rejects chunks that differ from the source."""
    differs = (known.crc32c != stored.crc32c) | (known.digests != stored.digests).any(1)
    wrong = np.flatnonzero(differs)
    if wrong.size:
        raise DataLossError(
            f"{name} {tree.describe_chunk(int(wrong[0]))}: expected the digest "
            f"{known.digests[wrong[0]].tobytes().hex()} of its source, got "
            f"{stored.digests[wrong[0]].tobytes().hex()}; its source is damaged, use "
            "another checkpoint",
            reason="CORRUPT_DATA",
        )


def list_committed(stub: RunStub) -> dict[int, Checkpoint]:
    """Returns the checkpoints of a run by step; none if there is no such run."""
    request = api.ListCheckpointsRequest(parent=stub.name.resource)
    found = stub.rows(
        stub.service.ListCheckpoints, request, lambda page: page.checkpoints, None
    )
    try:
        return {message.step: Checkpoint.from_message(message) for message in found}
    except NotFoundError:
        return {}


def describe_transfer(
    stub: RunStub,
    step: int,
    present: Iterable[int],
    *,
    labels: Mapping[str, str],
    metrics: Mapping[str, float],
) -> Description:
    """Returns the description of a checkpoint to store. Its base is the nearest step
    before it that the run has, or else the first one after it."""
    others = list(present)
    earlier = [other for other in others if other < step]
    base = max(earlier, default=min(others, default=None))
    return checked_description(
        stub.name,
        step,
        metrics=metrics,
        labels=labels,
        base=None if base is None else CheckpointName(stub.name, base),
        lease=DEFAULT_LEASE,
    )
