"""A store in a bucket on S3, and the workarounds for the limits of S3.

Only the differences are tested in detail; the common behaviour of buckets is tested on
Google Cloud Storage.
"""

import asyncio
import socket
import sys
import time
from collections.abc import Awaitable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc.catalog.records import write_record
from storesvc.errors import (
    InvalidFieldError,
    StorageDeniedError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.storage import hedging
from storesvc.storage import remote as s3_deletes
from storesvc.storage.bucket import IF_ABSENT, PreconditionError, list_pages
from storesvc.storage.hedging import Limits
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.conftest import s3_root
from tests.fake_gcs import ALWAYS, Lost, Mute, Reset, Stall, Status
from tests.fake_s3 import FakeS3
from tests.support.command_line import document, refusal
from tests.support.examples import sampled
from tests.support.gcs_calls import BUCKET
from tests.support.server_process import ServerProcess

PAGE = 1000


@pytest.fixture
def root(s3: FakeS3) -> Iterator[str]:
    """The root of a fresh store."""
    s3.clear()
    yield s3_root(s3)
    s3.clear()


@pytest.fixture
def bucket(root: str) -> Awaitable[TensorStoreBucket]:
    """A fresh bucket."""
    return TensorStoreBucket.open(root)


def sharded(*, by: str, shape: tuple[int, int] = (4, 2)) -> dict[str, Any]:
    """Returns a tree over all devices, on a mesh of a shape."""
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("a", "b"))
    values = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
    spec = NamedSharding(mesh, PartitionSpec(*by))
    return {"x": jax.device_put(values, spec), "step": 7}


@pytest.mark.slow
def test_a_job_resumes_from_its_checkpoint_in_another_process_on_another_mesh(
    root: str, tmp_path: Path, s3: FakeS3
) -> None:
    saved, like = sharded(by="ab"), sharded(by="b", shape=(2, 4))
    with store.connect(root) as client:
        run = client.run("prod/tiny")
        report = run.save(1, saved).report()
        assert report.total_bytes <= s3.stored_bytes <= 1.05 * report.total_bytes
        run.save(2, {**saved, "step": 8}).result()
        assert s3.stored_bytes <= 1.1 * report.total_bytes

    server = ServerProcess(tmp_path, tmp_path, uri=root)
    server.start()
    with store.connect(server.address) as client:
        run = client.run("prod/tiny")
        found = run.restore("latest", like=like)
        assert np.array_equal(saved["x"], found["x"])
        assert like["x"].sharding == found["x"].sharding
        assert 8 == found["step"]
        assert run.verify(2).ok
    server.kill()
    assert ["prod/tiny"] == [found["name"] for found in document(root, "ls")]


def test_only_purged_checkpoints_are_removed_from_the_bucket(root: str) -> None:
    async def pool() -> int:
        listed = await (await TensorStoreBucket.open(root)).list("")
        return len([place for place in listed if "/pool/" in place])

    with store.connect(root) as client:
        run = client.run("prod/tiny")
        for step in (1, 2):
            run.save(step, sharded(by="ab"), base=None).result()
        files = asyncio.run(pool())
        run.delete(1, purge_delay=timedelta(0))
        run.purge(1)
        for _ in client.collect(grace=timedelta(0)):
            pass
        assert run.verify(2).ok
    assert files == 2 * asyncio.run(pool())


def test_a_direct_save_creates_a_data_file_once_though_its_response_is_lost(
    root: str, s3: FakeS3
) -> None:
    tree = sharded(by="ab")
    with store.connect(root) as client:
        run = client.run("prod/created")
        s3.clear()
        s3.fault("PUT .*/pool/", Lost())
        run.save(1, tree).result()

        sent = [o for o in s3.log if o.method == "PUT" and "/pool/" in o.target]
        stored = [one.target for one in sent if one.stored_bytes]
        assert len(stored) == len(set(stored)) < len(sent)
        assert np.array_equal(tree["x"], run.restore(1)["x"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "action", sampled([Status(503), Status(409), Reset(), Lost()], every=4)
)
def test_a_save_and_a_restore_outlast_transient_errors(
    root: str, s3: FakeS3, action: Any
) -> None:
    tree = sharded(by="ab")
    with store.connect(root) as client:
        run = client.run("prod/tiny")
        for after in range(0, 12, 3):
            s3.fault("PUT ", action, after=after)
        run.save(1, tree).result()
        if action != Status(409):  # which reads are never answered
            s3.fault("GET ", action, times=2)
        assert np.array_equal(tree["x"], run.restore(1)["x"])


@pytest.mark.slow
@pytest.mark.parametrize("code", sampled([400, 401, 403, 404], every=4))
@pytest.mark.parametrize("after", [0, 1])
async def test_a_list_with_a_failed_page_is_an_error(
    bucket: TensorStoreBucket, s3: FakeS3, code: int, after: int
) -> None:
    names = [f"a/{n:04}" for n in range(PAGE + 100)]
    await asyncio.gather(*(bucket.write(name, b"") for name in names))
    for call in (bucket.list, bucket.delete_below, bucket.sizes):
        s3.fault("list-type", Status(code), after=after)
        with pytest.raises(StoreError):
            await call("a/")
    s3.fault("list-type", Status(code), after=after)
    with pytest.raises(StoreError):
        _ = [page async for page in list_pages(bucket, "a/")]
    assert names == await bucket.list("a/")


async def test_a_concurrent_write_wins_against_a_conditional_deletion(
    bucket: TensorStoreBucket, s3: FakeS3
) -> None:
    """TensorStore's own deletion checks the generation, then deletes any generation."""
    first = await bucket.write("a", b"1", condition=IF_ABSENT)
    second = await bucket.write("a", b"2", condition=first)
    s3.clear()
    with pytest.raises(PreconditionError):
        await bucket.delete("a", generation=first)
    assert ["DELETE", "GET"] == [asked.method for asked in s3.log]
    await bucket.delete("a", generation=second)
    assert await bucket.read("a") is None


@pytest.mark.parametrize("action", [Status(503), Status(409), Reset(), Lost()])
async def test_a_deletion_outlasts_transient_errors(
    bucket: TensorStoreBucket, s3: FakeS3, action: Any
) -> None:
    generation = await bucket.write("a", b"1")
    s3.fault("DELETE ", action)
    await bucket.delete("a", generation=generation)
    assert await bucket.read("a") is None


async def test_a_deletion_waits_as_long_as_the_storage_asks(
    bucket: TensorStoreBucket, s3: FakeS3
) -> None:
    generation = await bucket.write("a", b"1")
    s3.clear()
    s3.fault("DELETE ", Status(503, retry_after_seconds=3))
    began = time.monotonic()

    await bucket.delete("a", generation=generation)

    assert time.monotonic() - began >= 3
    assert [503, 204] == [one.status for one in s3.log if one.method == "DELETE"]


@pytest.mark.slow
async def test_stalled_deletions_do_not_block_other_calls(
    bucket: TensorStoreBucket, s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_deletes, "DELETE_TIMEOUT_SECONDS", 1.0)
    names = [f"a/{n}" for n in range(s3_deletes.AT_ONCE)]
    made = [await bucket.write(name, b"1") for name in names]
    s3.clear()
    s3.fault("DELETE ", Stall(), times=len(names))
    stalled = [
        asyncio.ensure_future(bucket.delete(name, generation=generation))
        for name, generation in zip(names, made, strict=True)
    ]
    while s3.pending < len(names):  # noqa: ASYNC110 - it is no event of ours
        await asyncio.sleep(0.01)

    await asyncio.to_thread(lambda: None)

    assert not any(one.done() for one in stalled)
    await asyncio.gather(*stalled)
    assert [] == await bucket.list("a/")


@pytest.mark.parametrize("after", [0, 1])
def test_a_store_is_created_after_a_lost_response_to_its_probe(
    root: str, s3: FakeS3, after: int
) -> None:
    s3.fault("PUT .*probes/", Lost(), after=after)
    with store.connect(root) as client:
        client.run("prod/tiny").save(1, {"w": 1}).result()


@pytest.mark.slow
@pytest.mark.parametrize("action", [Stall(), Mute()], ids=["undone", "done"])
async def test_unanswered_writes_are_retried(
    root: str, s3: FakeS3, action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(unknown_seconds=0.1, floor_seconds=0.1, answer_seconds=1, kept=0)
    monkeypatch.setattr(hedging, "CHANGES", limits)
    monkeypatch.setattr(s3_deletes, "DELETE_TIMEOUT_SECONDS", 1.0)
    bucket = await TensorStoreBucket.open(root)
    record = pb.StoreRecord(uid="1")
    generation = await bucket.write("a", b"1")
    s3.fault("PUT ", action)
    generation = await write_record(bucket, "a", record, condition=generation)
    s3.fault("DELETE ", action)
    await bucket.delete("a", generation=generation)
    assert await bucket.read("a") is None


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_no_store_is_created_if_conditions_are_ignored(s3: FakeS3, method: str) -> None:
    del s3  # has set credentials
    others = {"GET", "HEAD", "PUT", "DELETE"} - {method}

    async def main(root: str) -> None:
        bucket = await TensorStoreBucket.open(root)
        with pytest.raises(InvalidFieldError, match="ignores the condition on the "):
            await Store.open(bucket)
        assert await bucket.read("store.binpb") is None

    with FakeS3(buckets=[BUCKET], conditional_methods=others) as imitation:
        asyncio.run(main(s3_root(imitation)))


REFUSALS = [
    (
        Status(403, message="no s3:GetObject"),
        StorageDeniedError,
        "denies this to our credentials",
    ),
    (
        Status(403, message="RequestTimeTooSkewed"),
        StorageDeniedError,
        "the clock is right",
    ),
    (
        Status(400, message="requester pays"),
        StorageUnavailableError,
        "the storage failed: ",
    ),
]


@pytest.mark.parametrize(("refused", "error", "said"), REFUSALS)
async def test_a_denial_is_raised_at_once_with_the_bucket_and_the_reason(
    bucket: TensorStoreBucket,
    s3: FakeS3,
    root: str,
    refused: Status,
    error: type[StoreError],
    said: str,
) -> None:
    name = root.partition("?")[0]
    generation = await bucket.write("a/b", b"")
    for ask in (
        lambda: bucket.read("a/b"),
        lambda: bucket.write("a/b", b""),
        lambda: bucket.delete("a/b"),
        lambda: bucket.delete("a/b", generation=generation),
        lambda: bucket.list("a/b"),
        lambda: TensorStoreBucket.open(root),
    ):
        s3.clear()
        s3.fault(".", refused, times=ALWAYS)
        with pytest.raises(error) as reported:
            await ask()
        sentence = str(reported.value)
        assert sentence.startswith(f"{name}/")
        assert said in sentence
        assert refused.message in sentence
        assert 1 == len(s3.log)


def test_an_invalid_root_of_a_bucket_is_rejected_in_one_sentence(
    s3: FakeS3, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = f"s3://nowhere/x?endpoint={s3.url}&region=us-east-1"
    with pytest.raises(
        store.InvalidRequestError, match="s3://nowhere/x: expected an e"
    ):
        store.connect(nowhere)
    assert refusal(root, "ls").startswith(f"{root.partition('?')[0]} holds no store")
    with pytest.raises(store.InvalidRequestError, match=r"expected endpoint=http\[s\]"):
        store.connect("s3://bucket/x?endpoint=localhost")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(store.InvalidRequestError, match=r"storesvc\[server,s3\]"):
        store.connect(root)


@pytest.mark.slow
def test_missing_credentials_are_an_error_that_names_the_expected_ones(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "http://{}:{}".format(*silent.getsockname())
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", address)
        monkeypatch.setattr(s3_deletes, "_CLIENT", {"timeout": "200ms"})
        with pytest.raises(InvalidFieldError, match="expected credentials of S3, got"):
            asyncio.run(TensorStoreBucket.open(root))
