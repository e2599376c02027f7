"""Uploads, call by call: what the contract promises and rejects."""

import itertools
import os
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

import storesvc_client as store
from storesvc.format.chunks import pack_sums
from storesvc.format.names import RunName
from storesvc.format.trees import pack_leaves
from storesvc.rpc.paging import page_token
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.contract import (
    CHUNK,
    WHOLE,
    Writer,
    frame,
    refused,
    stored,
    sums,
    tree_of,
)
from tests.support.server_process import ServerProcess
from tests.support.stored_files import unchanged

_names = itertools.count()


@pytest.fixture
def name() -> str:
    return f"tests/upload-{next(_names)}"


@pytest.fixture
def begin(server_address: str, name: str) -> Callable[..., Writer]:
    """Begins uploads to one run of this test."""

    def begin(step: int = 1, *, writers: int = 1, **changes: Any) -> Writer:
        writer = Writer(server_address, name, step, writers=writers)
        writer.begin(**changes)
        return writer

    return begin


@pytest.fixture
def writer(begin: Callable[..., Writer]) -> Writer:
    """The upload of one writer to step 1."""
    return begin()


def content(client: store.Client, name: str, step: int = 1) -> bytes:
    ((_, array),) = client.run(name).open(step).read(["x"])
    return array.tobytes()


def test_chunks_may_come_in_pieces_and_in_any_order(
    writer: Writer, client: store.Client, name: str
) -> None:
    data = stored(2)
    pieces = [(0, 1), (1, 500), (501, len(data) - 501)]
    frames = [
        api.ChunkFrame(chunk=[2], offset=[at], length=[n], data=data[at : at + n])
        for at, n in pieces
    ]

    assert 3 == writer.write(*frames, frame(1, 0))[-1]
    writer.finish(sums(0, 1, 2))
    writer.commit()

    assert WHOLE == content(client, name)


def test_several_writers_make_one_checkpoint(
    begin: Callable[..., Writer], client: store.Client, name: str
) -> None:
    writer = begin(writers=3)
    writer.write(frame(0), writer=0)
    writer.write(frame(2, 1), writer=2)
    writer.finish(sums(1, 2), writer=2)
    writer.finish(sums(), writer=1)
    with refused("WRITER_UNFINISHED", "writer 0"):
        writer.commit()
    writer.finish(sums(0), writer=0)
    writer.commit()

    assert WHOLE == content(client, name)


def test_a_commit_without_all_chunks_names_those_that_are_missing(
    writer: Writer, client: store.Client, name: str
) -> None:
    writer.write(frame(0, 2))
    writer.finish(sums(0, 2))

    with refused("CHUNKS_INCOMPLETE", "leaf 'x' chunk 1"):
        writer.commit()
    with pytest.raises(store.NotFoundError):
        client.run(name).latest()


def test_a_chunk_of_two_writers_is_rejected(begin: Callable[..., Writer]) -> None:
    writer = begin(writers=2)
    for number in (0, 1):
        writer.write(frame(0, 1, 2), writer=number)
        writer.finish(sums(0, 1, 2), writer=number)

    with refused("CHUNKS_INCOMPLETE", "3 came from several"):
        writer.commit()


def test_a_receipt_for_what_was_not_sent_is_rejected(writer: Writer) -> None:
    writer.write(frame(0))

    with refused("CHUNKS_INCOMPLETE", "2 chunks of the receipt.*chunk 1, .*chunk 2"):
        writer.finish(sums(0, 1, 2))
    with refused("INVALID_CHUNK", "3 chunks"):
        writer.finish(sums(0, 3))


def piece(chunk: int, offset: int, length: int, data: bytes) -> api.ChunkFrame:
    return api.ChunkFrame(chunk=[chunk], offset=[offset], length=[length], data=data)


def two_pieces(data: bytes, *lengths: int) -> api.ChunkFrame:
    return api.ChunkFrame(chunk=[0, 1], offset=[0] * 2, length=lengths, data=data)


MISFITS = {
    "past the last chunk": (piece(3, 0, 1, b"x"), "3 chunks"),
    "past all integers": (piece(2**64 - 1, 0, 1, b"x"), "3 chunks"),
    "not from the beginning": (piece(0, 5, 1, b"x"), "bytes 0 to"),
    "length too large": (piece(0, 0, 2, b"x"), "2 bytes, at most"),
    "no bytes": (piece(0, 0, 0, b""), "got 0 to 0"),
    "columns differ": (two_pieces(b"x", 1), "columns"),
    "too long": (piece(0, 0, CHUNK + 5, stored(0) + b"x"), "bytes 0 to 1004"),
    "two open": (two_pieces(b"xy", 1, 1), "the rest of leaf 'x' chunk 0"),
    "ends within": (piece(0, 0, 9, b"x" * 9), "within a"),
    "wrong sum": (piece(0, 0, CHUNK + 4, b"?" + stored(0)[1:]), "corrupted in transit"),
}


@pytest.mark.parametrize(("bad", "match"), MISFITS.values(), ids=list(MISFITS))
def test_a_frame_that_does_not_fit_the_tree_is_rejected(
    writer: Writer, bad: api.ChunkFrame, match: str
) -> None:
    with refused("INVALID_CHUNK", match):
        writer.write(bad)

    # and leaves the upload as it was
    writer.complete()


def test_a_damaged_frame_after_good_ones_loses_only_itself(writer: Writer) -> None:
    writer.write(frame(0, 1))
    with refused("INVALID_CHUNK"):
        writer.write(api.ChunkFrame(chunk=[2], offset=[0], length=[4], data=b"????"))
    writer.write(frame(2))

    assert 3 == writer.finish(sums(0, 1, 2)).chunk_count


def test_a_repeated_begin_is_the_same_upload(begin: Callable[..., Writer]) -> None:
    writer = begin()

    assert (writer.name, writer.epoch) == ((again := writer.begin()).name, again.epoch)


def test_a_request_id_with_another_body_is_rejected(
    begin: Callable[..., Writer],
) -> None:
    writer = begin()

    with refused("REQUEST_ID_REUSED"):
        writer.begin(labels={"other": "body"})


@pytest.mark.parametrize("base", ["5", "best"])
def test_a_base_in_a_run_that_holds_nothing_is_rejected(
    server_address: str, name: str, base: str
) -> None:
    writer = Writer(server_address, name, 1)

    with refused("RUN_NOT_FOUND"):
        writer.begin(base=f"{RunName.parse(name).resource}/checkpoints/{base}")


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("1", "CHECKPOINT_DELETED"),
        ("5", "CHECKPOINT_NOT_FOUND"),
        ("best", "TAG_NOT_FOUND"),
    ],
)
def test_a_base_that_is_not_there_is_rejected_for_its_own_reason(
    begin: Callable[..., Writer],
    server_address: str,
    client: store.Client,
    name: str,
    base: str,
    reason: str,
) -> None:
    begin().save()
    client.run(name).delete(1)
    writer = Writer(server_address, name, 2)

    with refused(reason):
        writer.begin(base=f"{RunName.parse(name).resource}/checkpoints/{base}")


def test_a_later_upload_takes_the_step_over_for_good(
    begin: Callable[..., Writer], client: store.Client, name: str
) -> None:
    first = begin()
    first.write(frame(0, 1, 2))
    first.finish(sums(0, 1, 2))
    second = begin()
    assert first.epoch + 1 == second.epoch

    for call in (
        first.commit,
        lambda: first.write(frame(0)),
        lambda: first.finish(sums(0)),
        first.begin,
    ):
        with refused("UPLOAD_SUPERSEDED"):
            call()
    second.complete()

    assert WHOLE == content(client, name)
    with refused("CHECKPOINT_EXISTS"):
        first.commit()


def test_a_save_that_loses_its_step_names_the_owner_of_the_one_that_has_it(
    begin: Callable[..., Writer], name: str
) -> None:
    first = begin(owner="host a, process 1")
    second = begin(owner="host b, process 2, job 7")

    with refused(
        "UPLOAD_SUPERSEDED",
        rf"{name}@1 is being saved by host b, process 2, job 7 since \d{{4}}-.*; let "
        "one job alone save this run",
    ):
        first.keep_alive()
    second.complete()
    with refused(
        "CHECKPOINT_EXISTS",
        rf"{name}@1 exists already, saved by host b, process 2, job 7 at \d{{4}}-",
    ):
        first.commit()


def test_a_client_names_its_host_process_and_job(
    client: store.Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    client.run(name).save(1, {"x": np.zeros(3)}).result()

    with pytest.raises(
        store.AlreadyExistsError,
        match=rf"saved by host \S+, process {os.getpid()}, job 4711 at",
    ):
        client.run(name).save(1, {"x": np.zeros(3)}).result()


def test_an_owner_that_is_too_long_is_rejected(begin: Callable[..., Writer]) -> None:
    with refused("INVALID_FIELD", "upload.owner: expected at most 256 bytes, got 257"):
        begin(owner="x" * 257)


def test_an_epoch_that_is_not_the_uploads_is_rejected(writer: Writer) -> None:
    writer.epoch += 1

    with refused("UPLOAD_SUPERSEDED", "expected epoch 1, got 2"):
        writer.commit()


def test_a_second_commit_of_a_step_already_exists(
    begin: Callable[..., Writer], name: str
) -> None:
    begin().save()

    with refused("CHECKPOINT_EXISTS", f"{name}@1 exists already"):
        begin()


def test_a_repeated_commit_gives_the_same_answer(writer: Writer) -> None:
    writer.write(frame(0, 1, 2))
    writer.finish(sums(0, 1, 2))

    assert writer.commit() == writer.commit()


def test_an_aborted_upload_is_gone_and_frees_its_step(
    begin: Callable[..., Writer], client: store.Client, name: str
) -> None:
    writer = begin()
    writer.write(frame(0, 1, 2))
    writer.abort()
    writer.abort()

    for call in (writer.commit, lambda: writer.write(frame(0))):
        with refused("UPLOAD_NOT_FOUND"):
            call()
    begin().save()
    assert WHOLE == content(client, name)


def test_a_committed_upload_is_not_aborted(
    writer: Writer, client: store.Client, name: str
) -> None:
    writer.complete()

    with refused("CHECKPOINT_EXISTS"):
        writer.abort()
    assert WHOLE == content(client, name)


@pytest.mark.slow
def test_an_upload_goes_on_at_a_restarted_server(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    writer = Writer(server.address, "tests/restart", 1)
    writer.begin()
    for call in (
        lambda: writer.write(frame(0, 1)),
        lambda: writer.write(frame(2)),
        lambda: writer.finish(sums(0, 1, 2)),
        writer.commit,
    ):
        server.kill()
        server.start()
        call()
    with store.connect(server.address) as client:
        assert WHOLE == content(client, "tests/restart")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"step": -1}, "step"),
        ({"lease_duration": Duration(seconds=10**14)}, "lease_duration"),
        ({"lease_duration": Duration(seconds=-1)}, "lease_duration"),
        ({"writer_count": 65537}, "writer_count"),
        ({"labels": {"": "x"}}, "labels"),
        ({"labels": {"k": "v" * 257}}, "labels"),
        ({"metrics": {f"m{i}": 1.0 for i in range(65)}}, "metrics.*64"),
    ],
)
def test_a_field_that_breaks_a_rule_is_named(
    server_address: str, name: str, changes: dict[str, object], match: str
) -> None:
    writer = Writer(server_address, name, 0, writers=1)

    with refused("INVALID_FIELD", match):
        writer.begin(**changes)


@pytest.mark.parametrize("request_id", ["", "x", "0" * 32, "../../etc/passwd"])
def test_a_request_id_that_is_no_uuid_is_rejected(
    server_address: str, name: str, request_id: str
) -> None:
    writer = Writer(server_address, name, 0)
    writer.request_id = request_id

    with refused("INVALID_FIELD", "request_id"):
        writer.begin()


def test_a_stream_that_begins_with_the_wrong_message_is_rejected(
    writer: Writer,
) -> None:
    requests = [api.WriteChunksRequest(frame=frame(0))]

    with refused("INVALID_FIELD", "expected a message with open, got frame"):
        list(writer.stub.WriteChunks(iter(requests), timeout=30))
    with refused("INVALID_FIELD", "first message with open"):
        list(writer.stub.WriteChunks(iter([]), timeout=30))


def test_a_message_above_the_limit_is_rejected_and_the_connection_lives(
    writer: Writer,
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        writer.write(api.ChunkFrame(data=bytes(4 * 2**20)))
    assert grpc.StatusCode.RESOURCE_EXHAUSTED == caught.value.code()

    assert [3] == writer.write(frame(0, 1, 2))


def test_receipts_out_of_order_are_rejected(writer: Writer) -> None:
    writer.write(frame(0, 1, 2))
    receipt = sums(1, 0)
    assert np.any(np.diff(receipt.ordinal) < 0)

    with refused("INVALID_CHUNK", "strictly ascending"):
        writer.finish(receipt)


def pages_of(writer: Writer, parent: str, size: int = 2) -> list[list[str]]:
    """The names of live uploads, page by page."""
    request = api.ListUploadsRequest(parent=parent, page_size=size)
    pages = []
    while True:
        page = writer.stub.ListUploads(request, timeout=30)
        pages.append([upload.name for upload in page.uploads])
        if not page.next_page_token:
            return pages
        request.page_token = page.next_page_token


_BRIEF = Duration(nanos=1_000_000)
"""A lease that each call renews: a longer one, the begin has just renewed."""


class TestTheLifeOfAnUpload:
    """GetUpload, ListUploads, KeepUploadAlive."""

    def test_an_upload_is_shown_as_it_is(self, begin: Callable[..., Writer]) -> None:
        writer = begin(5, writers=2)
        writer.write(frame(0), writer=1)
        writer.finish(sums(0), writer=1)
        found = writer.get()

        assert (5, 2, 1, 1) == (
            found.step,
            found.writer_count,
            found.epoch,
            found.finished_writer_count,
        )
        assert api.Upload.STATE_LIVE == found.state
        assert found.create_time.ToDatetime() <= found.renew_time.ToDatetime()

    def test_its_state_shows_its_outcome(self, begin: Callable[..., Writer]) -> None:
        superseded, aborted, committed = begin(1), begin(2), begin(3)
        begin(1)
        aborted.abort()
        committed.complete()

        states = [w.get().state for w in (superseded, aborted, committed)]
        ended = api.Upload.STATE_ENDED
        assert [ended, ended, api.Upload.STATE_COMMITTED] == states

    def test_an_upload_that_never_was_is_not_found(self, writer: Writer) -> None:
        writer.name = writer.name[:-32] + "0" * 32
        with refused("UPLOAD_NOT_FOUND"):
            writer.get()

    def test_live_uploads_are_listed_page_by_page(
        self, begin: Callable[..., Writer], name: str
    ) -> None:
        live = [begin(step) for step in range(5)]
        begin(9).abort()
        pages = pages_of(live[0], RunName.parse(name).resource)

        assert [2, 2, 1] == list(map(len, pages))
        assert sorted(w.name for w in live) == [n for page in pages for n in page]

    def test_live_uploads_of_a_namespace_are_listed_by_run(
        self, server_address: str
    ) -> None:
        namespace = f"uploads-{uuid.uuid4().hex[:8]}"
        runs = [f"{namespace}/{run}" for run in ("a", "b", "b-2", "c")]
        writers = [
            Writer(server_address, run, step) for run in runs for step in range(3)
        ]
        live = [writer.begin().name for writer in writers]
        writers[3].abort()
        live.remove(writers[3].name)
        pages = pages_of(writers[0], f"namespaces/{namespace}")
        everywhere = pages_of(writers[0], "namespaces/-", size=1000)

        def by_run(name: str) -> tuple[str, str]:
            run, _, upload = name.rpartition("/uploads/")
            return run, upload

        assert [2, 2, 2, 2, 2, 1] == list(map(len, pages))
        assert sorted(live, key=by_run) == [n for page in pages for n in page]
        assert {*live} < {n for page in everywhere for n in page}

    def test_a_page_token_of_another_list_is_rejected(
        self, writer: Writer, name: str
    ) -> None:
        parent = RunName.parse(name).resource
        others = page_token(parent, "0" * 32), page_token(f"{parent}/uploads", "0")
        for token in ("x", "!", *others):
            request = api.ListUploadsRequest(parent=parent, page_token=token)
            with refused("INVALID_PAGE_TOKEN"):
                writer.stub.ListUploads(request, timeout=30)
        request = api.ListUploadsRequest(
            parent=RunName.parse(name).resource, page_size=-1
        )
        with refused("INVALID_FIELD", match="page_size"):
            writer.stub.ListUploads(request, timeout=30)

    def test_a_sign_of_life_renews_the_lease(
        self, begin: Callable[..., Writer]
    ) -> None:
        writer = begin(lease_duration=_BRIEF)
        before = writer.get().renew_time.ToDatetime()
        until = writer.keep_alive().expire_time.ToDatetime()

        assert before < writer.get().renew_time.ToDatetime()
        lease = writer.get().lease_duration.ToTimedelta()
        assert until == writer.get().renew_time.ToDatetime() + lease

    def test_progress_renews_the_lease(self, begin: Callable[..., Writer]) -> None:
        writer = begin(lease_duration=_BRIEF)
        before = writer.get().renew_time.ToDatetime()
        writer.write(frame(0))

        assert before < writer.get().renew_time.ToDatetime()

    def test_what_has_ended_is_not_kept_alive(
        self, begin: Callable[..., Writer]
    ) -> None:
        superseded, aborted, committed = begin(1), begin(2), begin(3)
        begin(1)
        aborted.abort()
        committed.complete()

        for writer, reason in (
            (superseded, "UPLOAD_SUPERSEDED"),
            (aborted, "UPLOAD_NOT_FOUND"),
            (committed, "CHECKPOINT_EXISTS"),
        ):
            with refused(reason):
                writer.keep_alive()
        live = begin(7)
        live.epoch += 1
        with refused("UPLOAD_SUPERSEDED"):
            live.keep_alive()


@pytest.mark.parametrize("claimed", [0, 2, 10**12])
def test_a_leaf_table_or_a_receipt_that_was_cut_off_is_rejected(
    begin: Callable[..., Writer], server: ServerProcess, claimed: int
) -> None:
    """The stream of a connection that is lost ends as one that is whole does."""
    writer = begin()
    writer.write(frame(0, 1, 2))
    leaves = [tree_pb2.LeafTable.FromString(p) for p in pack_leaves(tree_of())]
    opening = api.BeginUploadRequest(
        parent=writer.name.partition("/uploads/")[0],
        request_id=str(uuid.uuid4()),
        upload=api.Upload(step=2, writer_count=1),
        leaf_count=claimed,
    )
    parts = (api.BeginUploadRequest(leaves=part) for part in leaves)
    receipt = [
        api.FinishWriterRequest(open=writer.ref(), chunk_count=claimed),
        *(api.FinishWriterRequest(chunks=part) for part in pack_sums(sums(0, 1, 2))),
    ]

    with unchanged(server.root):
        with refused("INVALID_TREE"):
            writer.stub.BeginUpload(iter([opening, *parts]), timeout=30)
        with refused("INVALID_CHUNK"):
            writer.stub.FinishWriter(iter(receipt), timeout=30)
    writer.finish(sums(0, 1, 2))
    writer.commit()
