"""Quotas of stored bytes: they bound what a namespace stores, used or not."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc import quota
from storesvc.auth.policy_file import QuotaRule
from storesvc.errors import QuotaExceededError
from storesvc.format.names import RunName, UploadName
from storesvc.gc.run_state import LEAST_BYTES, StoredBytes
from storesvc.quota import Quotas
from storesvc.server.security import make_security
from tests.support.contract import Writer, frame
from tests.support.faulty_server import serving
from tests.support.rpcs import reason_of

LIMIT = 1_000_000
CHUNKS = 100
"""Chunks of 1,004 bytes of an upload."""
RUN = "limited/run"


@contextmanager
def limited(root: Path, limit: int = LIMIT, more: str = "") -> Iterator[str]:
    """Serves a store with a quota of stored bytes; yields the address."""
    policy = root.parent / "policy.toml"
    policy.write_text(
        f'anonymous = "admin"\n[[quotas]]\nnamespaces = ["limited"]\n'
        f"stored_bytes = {limit}\n{more}"
    )
    with serving(root, security=make_security(policy)) as address:
        yield address


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server with a quota of stored bytes."""
    with limited(tmp_path / "store") as address:
        yield address


def used_at(address: str) -> int:
    """Returns the stored bytes by the quota, listed now."""
    with pytest.MonkeyPatch.context() as patch, store.connect(address) as client:
        patch.setattr(quota, "USAGE_SECONDS", 0.0)
        (found,) = (q for q in client.quotas("limited") if q.name == "stored_bytes")
        return found.used


def on_disk(tmp_path: Path) -> int:
    """Returns the bytes of the data files."""
    pool = tmp_path.glob("store/data/limited/run/pool/*/*")
    return sum(file.stat().st_size for file in pool)


def admitted(make: Callable[[int], object]) -> int:
    """Calls a function with 0, 1, ... until the quota rejects it; returns how often it
    was admitted."""
    for number in range(100):
        try:
            make(number)
        except grpc.RpcError as e:
            assert reason_of(e) == "QUOTA_EXCEEDED"
            return number
    raise AssertionError("nothing was rejected")


def written(address: str, step: int) -> Writer:
    """Returns an upload that was begun and whose chunks were sent."""
    writer = Writer(address, RUN, step, chunks=CHUNKS)
    writer.begin()
    writer.write(frame(*range(CHUNKS)))
    return writer


def leaf(number: int, size: int) -> np.ndarray[Any, Any]:
    """Returns a leaf of that many bytes, different for each number."""
    return np.random.default_rng(number).integers(0, 255, size, np.uint8)


def test_a_tree_above_the_quota_is_rejected_before_its_data_are_sent(
    address: str, tmp_path: Path
) -> None:
    with store.connect(address) as client:
        run = client.run(RUN)
        with pytest.raises(store.LimitError, match="delete and purge") as caught:
            run.save(1, {"w": leaf(0, 2 * LIMIT)}).result()
        assert caught.value.metadata["quota"] == "stored_bytes"
        assert on_disk(tmp_path) == 0
        assert [] == list(client.uploads("limited"))

        for step in range(2, 9):
            with pytest.raises(store.LimitError) if step > 4 else _passes():
                run.save(step, {"w": leaf(step, 300_000)}).result()
        assert run.steps() == [2, 3, 4]
        assert on_disk(tmp_path) <= used_at(address) <= LIMIT
        client.run("other/run").save(1, {"w": leaf(0, 2 * LIMIT)}).result()


@contextmanager
def _passes() -> Iterator[None]:
    yield


def test_unfinished_uploads_count_from_their_begin(
    address: str, tmp_path: Path
) -> None:
    begun = [Writer(address, RUN, step, chunks=CHUNKS) for step in range(100)]
    count = admitted(lambda step: begun[step].begin())
    assert 5 <= count <= LIMIT // (CHUNKS * 1004)

    for writer in begun[:count]:
        writer.write(frame(*range(CHUNKS)))
    assert on_disk(tmp_path) == count * CHUNKS * 1004
    assert on_disk(tmp_path) <= min(LIMIT, used_at(address))


def test_an_aborted_upload_frees_its_data_at_once(address: str, tmp_path: Path) -> None:
    uploads: list[Writer] = []
    admitted(lambda step: uploads.append(written(address, step)))
    for writer in uploads:
        writer.abort()

    assert on_disk(tmp_path) == 0


def test_what_was_sent_counts_until_the_objects_are_listed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if a list had ended just before, each time
    monkeypatch.setattr(quota, "RECENT_SECONDS", quota.USAGE_SECONDS)

    assert 4 < admitted(lambda step: written(address, step).abort()) < 10


def test_superseded_uploads_count_until_they_are_collected(
    address: str, tmp_path: Path
) -> None:
    assert 4 < admitted(lambda _: written(address, 1))
    assert 4 * CHUNKS * 1004 < on_disk(tmp_path) <= LIMIT


def test_an_upload_that_sends_its_chunks_again_and_again_is_stopped(
    address: str, tmp_path: Path
) -> None:
    writer = written(address, 1)

    assert 4 < admitted(lambda _: writer.write(frame(*range(CHUNKS))))
    assert on_disk(tmp_path) <= LIMIT


def test_shared_bytes_are_charged_to_the_checkpoint_that_uses_them(
    address: str, tmp_path: Path
) -> None:
    with store.connect(address) as client:
        run = client.run(RUN)
        tree = {"w": leaf(0, 400_000)}
        run.save(1, tree).result()
        run.save(2, tree, base=1).result()
        assert on_disk(tmp_path) < 450_000
        run.delete(1, purge_delay=0)
        run.purge(1)
        list(client.collect(RUN, grace=0))

        assert 400_000 < on_disk(tmp_path) < used_at(address)
        with pytest.raises(store.LimitError):
            run.save(3, {"w": leaf(3, 700_000)}).result()


def test_space_that_was_freed_is_used_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "RECENT_SECONDS", 0.0)
    with store.connect(address) as client:
        run = client.run(RUN)
        run.save(1, {"w": leaf(1, 800_000)}).result()
        with pytest.raises(store.LimitError):
            run.save(2, {"w": leaf(2, 800_000)}).result()
        run.delete(1, purge_delay=0)
        run.purge(1)
        list(client.collect(RUN, grace=0))
        run.save(2, {"w": leaf(2, 800_000)}).result()


def test_another_server_sees_what_is_stored(address: str, tmp_path: Path) -> None:
    uploads: list[Writer] = []
    admitted(lambda step: uploads.append(written(address, step)))
    with limited(tmp_path / "store") as other:
        assert 0 == admitted(lambda step: written(other, 99 + step))
        # An upload that the first one has admitted, and that has sent its tree.
        moved = Writer(other, RUN, 0, chunks=CHUNKS)
        moved.name, moved.epoch = uploads[0].name, uploads[0].epoch
        assert 0 == admitted(lambda _: moved.write(frame(*range(CHUNKS))))


def test_small_objects_count_as_much_as_they_take_on_a_disk(
    address: str, tmp_path: Path
) -> None:
    with store.connect(address) as client:
        client.run(RUN).save(1, {"w": 1}).result()
    objects = [p for p in tmp_path.glob("store/data/limited/**/*") if p.is_file()]

    assert used_at(address) == len(objects) * LEAST_BYTES


def test_stored_bytes_above_the_soft_quota_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with limited(tmp_path / "store", more="stored_bytes_soft = 300000") as address:
        for step in range(4):
            Writer(address, RUN, step, chunks=CHUNKS).begin()

    assert caplog.text.count("above its soft quota of 300000") == 1


async def test_one_call_alone_waits_for_a_list() -> None:
    lists, now = list[asyncio.Event](), 0.0

    async def stored(_: str) -> StoredBytes:
        lists.append(asyncio.Event())
        await lists[-1].wait()
        return StoredBytes(total=1000)

    rule = QuotaRule(namespaces=("limited",), stored_bytes=2000)
    found = Quotas(lambda: ((rule,), None), stored, clock=lambda: now)
    uploads = [UploadName(RunName("limited", "r"), f"{n:032x}") for n in range(5)]

    async def begun(number: int, size: int) -> asyncio.Task[None]:
        task = asyncio.create_task(found.reserve(uploads[number], size))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    first, second = await begun(0, 200), await begun(1, 200)
    lists[0].set()
    await asyncio.gather(first, second)
    now = quota.USAGE_SECONDS + 1
    third, fourth = await begun(2, 200), await begun(3, 200)
    assert fourth.done()
    assert not third.done()
    fifth = await begun(4, 600)  # it may have room by a newer list
    assert not fifth.done()
    lists[1].set()
    await third
    with pytest.raises(QuotaExceededError, match=r"got 1800.* and 600 more"):
        await fifth
    assert len(lists) == 2
