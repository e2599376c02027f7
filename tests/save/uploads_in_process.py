"""Uploads of ``contract.tree_of`` to stores of this process, without a server."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

from storesvc.format.chunks import Sums
from storesvc.format.layout import RunPaths
from storesvc.format.names import CheckpointName, RunName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.format.wire import Frame
from storesvc.save.uploads import NewUpload, OpenUpload
from storesvc.storage.requests import background_task
from storesvc.store import Store
from tests.support.contract import frame, received, tree_of


def name_of(run: RunName, step: int) -> UploadName:
    """Returns the name of the upload of a step."""
    return UploadName(run, f"{step:032x}")


async def begin(
    store: Store,
    run: RunName,
    step: int,
    *,
    chunks: int = 3,
    writer_count: int = 1,
    request: int | None = None,
    base: CheckpointName | None = None,
) -> OpenUpload:
    """Begins an upload of a step, or repeats that; `request` is the number in its
    request id if it is not the step."""
    new = NewUpload(
        step=step,
        writer_count=writer_count,
        labels={},
        metrics={},
        lease=timedelta(minutes=1),
        base=base,
        body=str(step).encode(),
    )
    name, table = name_of(run, request or step), b"".join(pack_leaves(tree_of(chunks)))
    record, _ = await store.uploads.begin(name, new, table)
    return await store.uploads.presume_open(name, record.epoch)


async def send(
    store: Store,
    upload: OpenUpload,
    chunks: Sequence[int],
    *,
    writer: int = 0,
    version: int = 0,
) -> None:
    """Stores chunks of a writer."""

    async def frames() -> AsyncIterator[Frame]:
        yield received(frame(*chunks, version=version))

    opened = await store.uploads.open(upload.name, upload.record.epoch)
    async for _ in store.receiver.write(opened, writer, frames()):
        pass


async def finish(
    store: Store, upload: OpenUpload, receipt: Sums, *, writer: int = 0
) -> None:
    """Finishes a writer, with the checks of FinishWriter."""
    staged = store.receipts.staged(upload.name, writer, chunk_count=len(receipt))
    async with (
        background_task(staged) as tables,
        store.uploads.opened(upload.name, upload.record.epoch) as opened,
    ):
        await store.receipts.finish(opened, writer, receipt, tables)


async def committed_chunks(store: Store, run: RunName, step: int) -> list[bytes]:
    """Returns the stored bytes of each chunk of a checkpoint."""
    slot = await store.catalog.slot(run, step)
    assert slot is not None
    places = (await store.catalog.manifest(run, slot[0])).places
    return [
        await store.bucket.read_range(
            RunPaths(run).data_file(file), offset, offset + length
        )
        for file, offset, length in places.rows()
    ]
