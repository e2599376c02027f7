"""Verification reports exactly the damaged objects."""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc.catalog.slots import FREE
from storesvc.errors import CheckpointNotFoundError, StorageUnavailableError
from storesvc.format import chunks
from storesvc.format.checksums import crc32c
from storesvc.format.names import CheckpointName, RunName
from storesvc.inspect import rules as verify_report
from storesvc.inspect import verify as verification
from storesvc.inspect.rules import Report
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.contract import CHUNK, Writer
from tests.support.examples import sampled
from tests.support.hanging_disk import HangingDisk
from tests.support.refusals import rejected
from tests.support.saved_checkpoint import CHUNKS, Saved, flip, found_in, of_chunks
from tests.support.server_process import ServerProcess

GOLDEN = Path(__file__).parents[1] / "golden"


# --- what is whole ----------------------------------------------------------------


def test_a_checkpoint_that_is_whole_is_read_to_its_last_byte(run: store.Run) -> None:
    tree = {
        "embed": np.arange(3 * 2**20, dtype=np.float32).reshape(3, -1),
        "layers": [np.full((3, 5), n, np.int16) for n in range(40)],
        "nothing": np.zeros((0, 3)),
        "scale": 2.5,
    }
    checkpoint = run.save(3, tree).result()
    seen: list[store.Verification] = []

    found = run.verify(progress=seen.append)

    assert found.ok
    assert () == found.damages
    assert checkpoint.uid == found.checkpoint.uid
    assert checkpoint.chunk_count == found.chunk_count
    assert checkpoint.stored_bytes == found.stored_bytes
    assert found == seen[-1]


def test_a_tree_without_a_chunk_is_whole(run: store.Run) -> None:
    run.save(1, {"nothing": np.zeros((0, 3))}).result()

    assert run.verify(1).ok


def test_a_tree_that_is_one_leaf_is_whole(run: store.Run) -> None:
    run.save(1, np.arange(3)).result()

    assert run.verify(1).ok


def test_a_checkpoint_that_shares_chunks_with_an_earlier_one_is_whole(
    run: store.Run,
) -> None:
    tree = {"same": np.arange(9), "other": np.arange(3)}
    run.save(1, tree).result()
    run.save(2, tree | {"other": np.arange(4)}).result()

    assert run.verify(2).ok


@pytest.mark.parametrize("of", ["v1", "models/flax-0.12.3", "models/flax-0.12.8"])
def test_checkpoints_of_the_first_release_are_whole(tmp_path: Path, of: str) -> None:
    root = tmp_path / "store"
    shutil.copytree(GOLDEN / of, root)
    with store.connect(root.as_uri()) as client:
        for run in client.runs():
            assert client.run(run.name).verify().ok


# --- damaged chunks ---------------------------------------------------------------


@pytest.mark.parametrize("chunk", [0, 2, CHUNKS - 1])
@pytest.mark.parametrize(
    "byte", sampled([0, CHUNK // 2, CHUNK - 1, CHUNK, CHUNK + 3], every=3)
)
def test_a_flipped_bit_of_a_chunk_or_of_its_checksum_is_reported(
    run: store.Run, saved: Saved, chunk: int, byte: int
) -> None:
    def flip(stored: bytearray) -> None:
        stored[byte] ^= 4

    saved.change(chunk, flip)

    found = run.verify(3)

    assert of_chunks("checksum", chunk) == found_in(found)
    assert f"leaf 'x' chunk {chunk}: expected" in found.damages[0].message
    assert (CHUNKS, CHUNKS * (CHUNK + 4)) == (found.chunk_count, found.stored_bytes)
    assert not found.ok


def test_chunks_that_changed_their_places_are_reported(
    run: store.Run, saved: Saved
) -> None:
    file = saved.file(1)
    data = bytearray(file.read_bytes())
    one, other = saved.range(1), saved.range(3)
    data[one], data[other] = data[other], data[one]
    file.write_bytes(data)

    assert of_chunks("checksum", 1, 3) == found_in(run.verify(3))


def test_other_bytes_that_carry_their_own_checksum_are_reported(
    run: store.Run, saved: Saved
) -> None:
    def replace(stored: bytearray) -> None:
        other = b"other" * (CHUNK // 5)
        stored[:] = other + crc32c(other).to_bytes(4, "little")

    saved.change(4, replace)

    assert of_chunks("checksum", 4) == found_in(run.verify(3))


def test_other_bytes_of_the_same_checksum_are_reported_by_their_digest(
    run: store.Run, saved: Saved
) -> None:
    def forge(stored: bytearray) -> None:
        expected = crc32c(bytes(stored[:CHUNK]))
        stored[:5] = b"other"
        patch = forged_tail(bytes(stored[: CHUNK - 4]), expected)
        stored[CHUNK - 4 : CHUNK] = patch
        assert crc32c(bytes(stored[:CHUNK])) == expected

    saved.change(2, forge)

    assert of_chunks("digest", 2) == found_in(run.verify(3))


def forged_tail(data: bytes, checksum: int) -> bytes:
    """Four bytes that give data a checksum: CRCs are affine in what they sum."""
    start = crc32c(data)
    zero = crc32c(bytes(4), start)
    # what each bit of the four bytes does to the checksum, made a triangle
    rows: list[tuple[int, int]] = []
    for bit in range(32):
        effect, made_of = (
            crc32c((1 << bit).to_bytes(4, "little"), start) ^ zero,
            1 << bit,
        )
        for other, parts in rows:
            if effect ^ other < effect:
                effect, made_of = effect ^ other, made_of ^ parts
        rows.append((effect, made_of))
        rows.sort(reverse=True)
    wanted, tail = checksum ^ zero, 0
    for effect, made_of in rows:
        if wanted ^ effect < wanted:
            wanted, tail = wanted ^ effect, tail ^ made_of
    assert wanted == 0
    return tail.to_bytes(4, "little")


@pytest.mark.parametrize("whole", [0, 1, 3])
@pytest.mark.parametrize("rest", [0, 1, CHUNK + 3])
def test_a_file_that_was_cut_off_misses_the_chunks_behind_the_cut(
    run: store.Run, saved: Saved, whole: int, rest: int
) -> None:
    os.truncate(saved.file(0), saved.range(whole).start + rest)

    found = run.verify(3)

    assert of_chunks("missing", *range(whole, CHUNKS)) == found_in(found)
    assert "is missing, or ends before byte" in found.damages[0].message
    assert CHUNKS == found.chunk_count


def test_damage_before_a_cut_is_reported_too(run: store.Run, saved: Saved) -> None:
    saved.change(1, lambda stored: stored.reverse())
    os.truncate(saved.file(0), saved.range(3).start)

    assert [*of_chunks("checksum", 1), *of_chunks("missing", 3, 4)] == found_in(
        run.verify(3)
    )


def test_a_file_that_was_deleted_misses_all_its_chunks(
    run: store.Run, saved: Saved
) -> None:
    saved.file(0).unlink()

    assert of_chunks("missing", *range(CHUNKS)) == found_in(run.verify(3))


def test_of_several_leaves_the_damaged_one_is_named(
    server: ServerProcess, run: store.Run
) -> None:
    tree = {"a": np.arange(9), "b": {"c": np.arange(7.0), "d/e": np.arange(5)}}
    run.save(3, tree).result()
    saved = Saved(server.root, RunName.parse(run.name))
    saved.change(2, lambda stored: stored.reverse())

    found = run.verify()

    assert [("b/d%2Fe", (0,), "checksum")] == found_in(found)


# --- what ends a verification -----------------------------------------------------


def test_a_damaged_manifest_is_data_loss_also_where_the_server_remembers_it(
    run: store.Run, saved: Saved
) -> None:
    assert run.verify(3).ok
    assert run.diff(3, 3).is_same  # has read the manifest, and keeps it
    (file,) = (saved.folder / "manifests").iterdir()
    flip(file, 30)

    with rejected("CORRUPT_DATA", store.DataLossError, match="manifest"):
        run.verify(3)
    file.unlink()
    with pytest.raises(store.DataLossError, match="manifest is missing"):
        run.verify(3)


def test_what_does_not_exist_cannot_be_verified(client: store.Client) -> None:
    with pytest.raises(store.NotFoundError, match="tests/missing"):
        client.run("tests/missing").verify()
    run = client.run("tests/known")
    run.save(1, {"x": 1}).result()
    with pytest.raises(store.NotFoundError, match="known@2"):
        run.verify(2)
    with pytest.raises(store.NotFoundError):
        run.verify("no-such-tag")
    with pytest.raises(store.InvalidRequestError):
        run.verify("No Tag")


def test_a_checkpoint_that_was_deleted_is_not_verified_by_name(
    run: store.Run, saved: Saved
) -> None:
    record = saved.record
    record.state = pb.CheckpointRecord.STATE_DELETED
    saved.put(record)

    with rejected("CHECKPOINT_DELETED", store.NotFoundError):
        run.verify(3)


@pytest.mark.slow
def test_verifications_go_on_through_a_restart_and_leave_room_for_small_calls(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    disk = HangingDisk(tmp_path / "disk")
    server = start_server()
    server.kill()
    server.environment = disk.environment
    server.start()
    with store.connect(server.address) as client, ThreadPoolExecutor() as pool:
        Writer(server.address, "tests/restart", 3, chunks=CHUNKS).save(range(CHUNKS))
        run = client.run("tests/restart")
        file = Saved(server.root, RunName.parse(run.name)).file(0)
        disk.hang(file)
        verifications = [pool.submit(run.verify, 3) for _ in range(5)]
        time.sleep(0.5)
        began = time.monotonic()
        assert 3 == run.latest().step
        assert time.monotonic() - began < 5
        assert [False] * 5 == [one.done() for one in verifications]
        server.kill()
        disk.go_on(file)
        server.start()

        assert [True] * 5 == [one.result(60).ok for one in verifications]


class Ticking:
    """A clock whose seconds pass whenever they are asked for."""

    def __init__(self) -> None:
        self._seconds = count()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def elapsed(self) -> float:
        return float(next(self._seconds))


class DeadPool(TensorStoreBucket):
    """A bucket whose data files do not answer."""

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        raise StorageUnavailableError(f"{place}: the storage failed")


@pytest.fixture
def reports(saved: Saved) -> Callable[..., list[Report]]:
    """Verifies in this process; a change is made after the checkpoint was found."""

    def run(
        kind: type[TensorStoreBucket] = TensorStoreBucket,
        change: Callable[[], object] = lambda: None,
    ) -> list[Report]:
        async def verify() -> list[Report]:
            bucket = await kind.open(saved.root.as_uri())
            found = await Store.open(bucket, clock=Ticking())
            record = await found.catalog.checkpoint(CheckpointName(saved.name, 3))
            change()
            return [x async for x in found.verifier.verify(saved.name, record)]

        return asyncio.run(verify())

    return run


def test_a_report_comes_every_second(
    reports: Callable[..., list[Report]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "READ_BYTES", 1)  # every chunk is a read

    counts = [report.chunk_count for report in reports()]

    assert [1, 2, 3, 4, 5, 5] == counts


def test_an_abandoned_verification_releases_the_semaphore(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "READ_BYTES", 1)

    async def verify() -> None:
        bucket = await TensorStoreBucket.open(saved.root.as_uri())
        found = await Store.open(bucket, clock=Ticking())
        record = await found.catalog.checkpoint(CheckpointName(saved.name, 3))
        for _ in range(2 * verification.VERIFICATIONS_AT_ONCE):
            reports = found.verifier.verify(saved.name, record)
            assert 1 == (await anext(reports)).chunk_count
            await reports.aclose()

    asyncio.run(asyncio.wait_for(verify(), 30))


def test_a_storage_that_does_not_answer_is_not_damage(
    saved: Saved, reports: Callable[..., list[Report]]
) -> None:
    del saved
    with pytest.raises(StorageUnavailableError):
        reports(DeadPool)


@pytest.mark.parametrize("what", ["pool", "manifests", "trees", "files"])
@pytest.mark.parametrize("after", ["free", "empty", "another upload"])
def test_a_checkpoint_that_is_purged_during_a_verification_is_not_damaged(
    saved: Saved, reports: Callable[..., list[Report]], what: str, after: str
) -> None:
    def purge() -> None:
        record = saved.record
        shutil.rmtree(saved.folder / what)
        match after:
            case "free":
                record.state = FREE
            case "another upload":
                record.upload = "0" * 32
        saved.put(record)
        if after == "empty":
            saved.slot.unlink()

    with pytest.raises(CheckpointNotFoundError, match="purged while"):
        reports(change=purge)


def test_very_many_damages_are_summed_up(
    saved: Saved, reports: Callable[..., list[Report]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_report, "MAX_DAMAGES", 3)
    monkeypatch.setattr(verify_report, "DAMAGES_A_REPORT", 2)
    saved.file(0).unlink()

    found = reports()

    assert max(len(report.damages) for report in found) == 2
    messages = [damage.message for report in found for damage in report.damages]
    assert 4 == len(messages)
    assert messages[-1].startswith("2 more damages, beginning with leaf 'x' chunk 3:")
