"""A writer that finishes in the call that commits: what is checked, and what a repeated
call and a server of an earlier release answer. Deaths between its writes are in
``test_small_saves.py``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.catalog import slots
from storesvc.errors import (
    ChunksIncompleteError,
    InvalidChunkError,
    InvalidFieldError,
    StoreError,
)
from storesvc.format.names import CheckpointName
from storesvc.save.commit import WriterEnd
from storesvc.save.uploads import OpenUpload
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.save.uploads_in_process import begin, committed_chunks, send
from tests.support.collecting_process import PLACES, RUN, Process, end_of, started
from tests.support.contract import (
    Writer,
    frame,
    mixed_sums,
    placed_table,
    refused,
    stored,
    sums,
)
from tests.support.old_server import old_server
from tests.support.thread_server import ThreadServer


async def nothing(*_: int) -> None:
    """Admits all bytes."""


async def put(process: Process, upload: OpenUpload) -> str:
    """Stores all chunks in a data file, and returns its name."""
    file = f"{upload.name.upload}/{'a' * 32}"
    place = PLACES.data_file(file)
    await process.bucket.write_new(place, [b"".join(map(stored, range(3)))])
    return file


async def test_what_is_sent_again_after_the_commit_returns_the_checkpoint() -> None:
    process = await started()
    name = await process.end(1)
    record = await process.store.uploads.record(name)
    other = await process.beside()  # which has not seen the leaf table

    again = await other.store.commits.commit(name, record.epoch, end_of("x/y", (0,)))

    slot = await process.store.catalog.slot(RUN, 1)
    assert slot is not None
    assert slot[0] == again


async def test_neither_a_receipt_nor_a_table_is_written() -> None:
    process = await started()
    written: list[str] = []
    make = process.bucket.calls.make

    async def note(operation: str, path: str, *arguments: Any, **how: Any) -> Any:
        if operation == "write":
            written.append(path)
        return await make(operation, path, *arguments, **how)

    process.bucket.calls.make = note  # type: ignore[method-assign]
    await process.end(1)

    assert not [p for p in written if "/staging/" in p or "/writers/" in p]
    assert PLACES.checkpoint(1) in written


async def test_chunks_may_be_in_tables_in_the_base_and_in_the_call() -> None:
    process = await started()
    await process.end(1)
    upload = await begin(process.store, RUN, 2, base=CheckpointName(RUN, 1))
    await send(process.store, upload, [1], version=1)
    file = await put(process, upload)
    end = WriterEnd(
        sums=mixed_sums({0: 0, 1: 1, 2: 0}),
        placed=placed_table((file, 2, 2)),
        report=None,
        reserve=nothing,
    )

    record = await process.store.commits.commit(upload.name, upload.record.epoch, end)

    assert slots.COMMITTED == record.state
    expected = [stored(0), stored(1, version=1), stored(2)]
    assert expected == await committed_chunks(process.store, RUN, 2)


async def test_tables_of_another_server_are_found() -> None:
    process = await started()
    upload = await begin(process.store, RUN, 2)
    await send((await process.beside()).store, upload, [0, 1])
    file = await put(process, upload)
    end = WriterEnd(
        sums=sums(0, 1, 2),
        placed=placed_table((file, 2, 2)),
        report=None,
        reserve=nothing,
    )

    await process.store.commits.commit(upload.name, upload.record.epoch, end)

    assert list(map(stored, range(3))) == await committed_chunks(process.store, RUN, 2)


OWN, OTHER = f"{2:032x}/{'b' * 32}", f"{3:032x}/{'a' * 32}"


@pytest.mark.parametrize(
    ("change", "expected", "match"),
    [
        ({"sums": sums(0, 1)}, InvalidChunkError, "receipt for 2"),
        ({"file": OWN}, InvalidChunkError, "missing or shorter"),
        ({"file": OTHER}, InvalidChunkError, "data files of this upload"),
        ({"placed": tree_pb2.ChunkTable()}, ChunksIncompleteError, "3 chunks of the"),
    ],
)
async def test_what_is_not_stored_is_not_committed(
    change: dict[str, Any], expected: type[StoreError], match: str
) -> None:
    process = await started()
    await process.end(1)
    upload = await begin(process.store, RUN, 2)
    right = end_of(await put(process, upload), (0, 0, 0))
    wrong = end_of(change["file"], (0, 0, 0)) if "file" in change else None

    with pytest.raises(expected, match=match):
        await process.store.commits.commit(
            upload.name, upload.record.epoch, wrong or replace(right, **change)
        )
    assert [1] == await process.steps()

    await process.store.commits.commit(upload.name, upload.record.epoch, right)
    assert [2, 1] == await process.steps()


async def test_many_writers_finish_by_themselves() -> None:
    process = await started()
    upload = await begin(process.store, RUN, 2, writer_count=2)
    end = end_of(await put(process, upload), (0, 0, 0))

    with pytest.raises(InvalidFieldError, match="one writer, got 2"):
        await process.store.commits.commit(upload.name, upload.record.epoch, end)


def test_a_malformed_end_is_rejected(tmp_path: Path) -> None:
    with ThreadServer(f"{tmp_path.as_uri()}/store") as server:
        writer = Writer(server.address, "tests/ends", 1)
        writer.begin()
        writer.write(frame(0, 1, 2))
        for reason, end in (
            ("INVALID_CHUNK", api.WriterEnd(chunks=tree_pb2.ChunkTable(crc32c=[1]))),
            ("INVALID_CHUNK", api.WriterEnd(placed=tree_pb2.ChunkTable(crc32c=[1]))),
            ("INVALID_CHUNK", api.WriterEnd()),
        ):
            request = api.CommitUploadRequest(
                name=writer.name, epoch=writer.epoch, end=end
            )
            with refused(reason):
                writer.stub.CommitUpload(request, timeout=30)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_server_of_an_earlier_release_gets_the_calls_that_it_knows(
    tmp_path: Path, *, is_direct: bool
) -> None:
    root = f"{tmp_path.as_uri()}/store"
    state = {"x": np.arange(1 << 20, dtype=np.int32)}
    with (
        old_server(root) as server,
        store.connect(server.address, direct=root if is_direct else None) as client,
    ):
        run = client.run("tests/ends")
        run.save(1, state).result()
        assert np.array_equal(state["x"], run.restore(1)["x"])

    wanted = ("FinishWriter", "CommitUpload")
    calls = [call for call in server.calls if call in wanted]
    assert ["CommitUpload", "FinishWriter", "CommitUpload"] == calls
