"""Reuse: stored chunks are neither sent nor stored again, and stay safe."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.errors import CorruptDataError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import seal
from storesvc.save.reuse import Reuse
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from tests.support import stored_records
from tests.support.collecting_process import PLACES, Process
from tests.support.contract import (
    WHOLE,
    Writer,
    elements,
    frame,
    mixed_sums,
    refused,
    sums,
)
from tests.support.examples import examples, sampled
from tests.support.faulty_bucket import FaultyBucket
from tests.support.server_process import ServerProcess

_names = itertools.count()

TREE: dict[str, Any] = {
    "params": {
        "kernel": np.arange(6_000_000, dtype=np.float32),  # two chunks
        "bias": np.arange(100.0),
        "empty": np.zeros((0, 3)),
    },
    "step": 7,
}


@pytest.fixture
def name() -> str:
    return f"tests/reuse-{next(_names)}"


def pool_bytes(server: ServerProcess, name: str) -> int:
    pool = server.root / RunPaths(RunName.parse(name)).pool
    return sum(file.stat().st_size for file in pool.rglob("*") if file.is_file())


def assert_equal(expected: Any, actual: Any) -> None:
    flat = {"kernel", "bias", "empty"}
    for key in flat:
        assert expected["params"][key].tobytes() == actual["params"][key].tobytes()
    assert expected["step"] == actual["step"]


@pytest.mark.slow
def test_a_save_of_the_same_tree_sends_and_stores_nothing(
    run: store.Run, server: ServerProcess
) -> None:
    first = run.save(1, TREE).report()
    before = pool_bytes(server, run.name)
    second = run.save(2, TREE)

    assert (first.total_bytes, 0) == (first.sent_bytes, first.reused_bytes)
    report = second.report()
    assert (0, first.total_bytes) == (report.sent_bytes, report.reused_bytes)
    assert report.total_bytes == second.result().stored_bytes
    assert pool_bytes(server, run.name) - before < 2000  # a node of the key space
    assert_equal(TREE, run.restore(2))


@pytest.mark.slow
def test_a_save_sends_only_the_chunks_that_changed(run: store.Run) -> None:
    run.save(1, TREE)
    changed = {**TREE, "params": {**TREE["params"], "bias": np.arange(100.0) + 1}}
    report = run.save(2, changed).report()

    assert 8 * 100 + 4 == report.sent_bytes
    assert_equal(changed, run.restore(2))
    assert_equal(TREE, run.restore(1))


def test_the_base_is_the_one_that_was_asked_for(run: store.Run) -> None:
    other = {"x": np.ones(10)}
    run.save(1, TREE).result()
    run.save(2, other).result()

    assert 0 == run.save(3, TREE, base=1).report().sent_bytes
    assert 0 == run.save(4, other, base=2).report().sent_bytes
    assert 0 == run.save(5, other, base=None).report().reused_bytes


def test_a_base_that_does_not_exist_is_rejected_before_anything_is_written(
    run: store.Run, server: ServerProcess
) -> None:
    run.save(1, TREE).result()
    files = sorted(server.root.rglob("*"))
    with pytest.raises(store.NotFoundError) as caught:
        run.save(2, TREE, base=7).result()

    assert "CHECKPOINT_NOT_FOUND" == caught.value.reason
    assert files == sorted(server.root.rglob("*"))


@pytest.mark.parametrize("other", ["tests/reuse-other", "other/reuse"])
def test_bytes_of_another_run_or_namespace_are_never_a_base(
    client: store.Client, server_address: str, other: str, name: str
) -> None:
    client.run(other).save(next(_names), TREE).result()
    writer = Writer(server_address, name, 1)
    with refused("INVALID_FIELD", match="expected a checkpoint of"):
        writer.begin(base=f"{RunName.parse(other).resource}/checkpoints/latest")


def test_leaves_of_another_shape_are_sent_though_their_bytes_are_the_same(
    run: store.Run,
) -> None:
    run.save(1, {"x": np.zeros((10, 20))}).result()
    save = run.save(2, {"x": np.zeros((20, 10))})

    assert 0 == save.report().reused_bytes
    assert (20, 10) == run.restore(2)["x"].shape


def begin_on_base(address: str, name: str) -> Writer:
    """Saves step 1, and begins an upload of step 2 with it as the base."""
    Writer(address, name, 1).save()
    writer = Writer(address, name, 2)
    writer.begin(base=f"{RunName.parse(name).resource}/checkpoints/1")
    return writer


def test_a_chunk_is_claimed_by_its_row_in_the_receipt(
    server_address: str, client: store.Client, name: str
) -> None:
    writer = begin_on_base(server_address, name)

    assert [0, 2] == writer.find(sums(0, 2))
    assert [] == writer.find(sums(0, 1, 2, version=1))
    writer.write(frame(1, version=1))
    writer.finish(mixed_sums({0: 0, 1: 1, 2: 0}))
    writer.commit()

    ((_, array),) = client.run(name).open(2).read(["x"])
    assert elements(0) + elements(1, 1) + elements(2) == array.tobytes()
    assert 1004 == client.run(name).checkpoint(2).own_bytes


def test_a_chunk_that_was_sent_does_not_prevent_a_claim(
    server_address: str, client: store.Client, name: str
) -> None:
    writer = begin_on_base(server_address, name)
    writer.write(frame(1, version=1))

    assert [0, 1, 2] == writer.find(sums(0, 1, 2))
    writer.finish(sums(0, 1, 2))
    writer.commit()

    ((_, array),) = client.run(name).open(2).read(["x"])
    assert WHOLE == array.tobytes()


def test_a_claim_of_other_bytes_is_rejected(server_address: str, name: str) -> None:
    writer = begin_on_base(server_address, name)

    with refused("CHUNKS_INCOMPLETE", match="leaf 'x' chunk 0"):
        writer.finish(sums(0, 1, 2, version=1))


def test_without_a_base_nothing_can_be_claimed(server_address: str, name: str) -> None:
    Writer(server_address, name, 1).save()
    writer = Writer(server_address, name, 2)
    writer.begin()

    assert [] == writer.find(sums(0, 1, 2))
    with refused("CHUNKS_INCOMPLETE"):
        writer.finish(sums(0, 1, 2))


def purge_by_force(server: ServerProcess, name: str, step: int) -> None:
    """Frees a slot behind the back of all rules."""
    place = RunPaths(RunName.parse(name)).checkpoint(step)
    record = stored_records.read(server.root, place, pb.CheckpointRecord)
    record.state = pb.CheckpointRecord.STATE_FREE
    stored_records.write(server.root, place, record)


def test_claims_are_looked_up_again_by_the_commit(
    server: ServerProcess, server_address: str, name: str
) -> None:
    writer = begin_on_base(server_address, name)
    writer.finish(sums(0, 1, 2))
    purge_by_force(server, name, 1)

    with refused("CHUNKS_INCOMPLETE", match="3 claimed chunks are no longer"):
        writer.commit()
    writer.complete()


def test_a_receipt_for_other_bytes_than_arrived_is_rejected(
    server_address: str, name: str
) -> None:
    writer = Writer(server_address, name, 1)
    writer.begin()
    writer.write(frame(0, 1, 2))

    with refused("INVALID_CHUNK", match="chunk 0: expected the bytes"):
        writer.finish(sums(0, 1, 2, version=1))
    writer.write(frame(0, 1, 2, version=1))  # the receipt says which ones count
    writer.finish(sums(0, 1, 2))
    writer.finish(sums(0, 1, 2, version=1))
    writer.commit()


def damage(root: Path, what: str) -> None:
    """Damages the only checkpoint of a run."""
    files = {
        "the data files are gone": "pool/*/*",
        "the data files are cut off": "pool/*/*",
        "the manifest is flipped": "manifests/*",
        "the record is flipped": "checkpoints/*",
    }
    for file in root.glob(files[what]):
        data = bytearray(file.read_bytes())
        if what.endswith("are gone"):
            file.unlink()
        elif what.endswith("cut off"):
            file.write_bytes(data[: len(data) // 2])
        else:
            data[len(data) // 2] ^= 1
            file.write_bytes(data)


@pytest.mark.parametrize(
    "what",
    sampled(
        [
            "the data files are gone",
            "the data files are cut off",
            "the manifest is flipped",
            "the record is flipped",
        ],
        every=2,
    ),
)
def test_a_damaged_base_is_none(tmp_path: Path, what: str) -> None:
    """The next save is whole, and says what it could not reuse."""
    with store.connect(tmp_path.as_uri()) as client:
        client.run("tests/base").save(1, TREE).result()
    damage(tmp_path / "data/tests/base", what)
    with store.connect(tmp_path.as_uri()) as client:
        run = client.run("tests/base")
        report = run.save(2, TREE).report()

        assert report.sent_bytes > 0.9 * report.total_bytes
        assert run.verify(2).ok
        assert_equal(TREE, run.restore(2))


@pytest.mark.parametrize("step", [1, 2])
async def test_what_rots_after_a_save_began_costs_it_its_claims(
    tmp_path: Path, step: int
) -> None:
    """The base, or the upload that it took its step over from."""

    process = await Process.over(await FaultyBucket.faulty(tmp_path.as_uri()))
    await process.save(1)
    await process.send(await process.begin(2), {0: 0, 1: 0})
    upload = await process.begin(2, base=1)
    record = await process.store.uploads.record(upload)
    assert record.base
    assert record.predecessor
    rotten = PLACES.checkpoint(1) if step == 1 else PLACES.upload(record.predecessor)
    await process.bucket.write(rotten, b"rot")

    opened = await process._open(upload)
    sources = await Reuse(
        process.bucket, process.store.catalog, process.store.uploads
    ).sources(opened)
    assert 1 == len(sources)
    await process.send(upload, {0: 1, 1: 1, 2: 1})
    await process.finish(upload, (1, 1, 1))
    await process.commit(upload, (1, 1, 1))


@pytest.mark.parametrize(
    "table",
    [
        b"\xff" * 40,
        pb.Receipt(chunks=b"\xff" * 40),
        pb.Receipt(
            chunks=tree_pb2.ChunkTable(
                ordinal=[10_000],
                crc32c=[1],
                digests=[bytes(16)],
                file=[0],
                offset=[0],
                length=[9],
                files=[f"{'a' * 32}/{'b' * 32}"],
            ).SerializeToString()
        ),
    ],
    ids=["noise", "noise under seal", "a chunk that the tree does not have"],
)
async def test_a_damaged_staging_table_is_reported_as_damage(
    table: bytes | pb.Receipt,
) -> None:
    process = await Process.over(await FaultyBucket.faulty("memory://"))
    upload = await process.begin(1)
    await process.send(upload, {0: 0, 1: 0})
    place = PLACES.staged(upload.upload, 0, "rot")
    data = table if isinstance(table, bytes) else seal(table, place=place)
    await process.bucket.write(place, data)
    with pytest.raises(CorruptDataError, match="rot"):
        await process.finish(upload, (0, 0, 0))
    # an upload that takes the step over claims nothing of it
    await process.save(1, (1, 1, 1))


class TestASaveThatWasCutOff:
    """Goes on where it stopped, when the step is saved again."""

    def test_sends_only_what_is_missing(
        self, server_address: str, client: store.Client, name: str
    ) -> None:
        first = Writer(server_address, name, 1)
        assert not first.begin().resumes
        first.write(frame(0, 2))
        second = Writer(server_address, name, 1)

        assert second.begin().resumes
        assert [0, 2] == second.find(sums(0, 1, 2))
        second.write(frame(1))
        second.finish(sums(0, 1, 2))
        second.commit()
        with refused("CHECKPOINT_EXISTS"):
            first.write(frame(1))
        ((_, array),) = client.run(name).open(1).read(["x"])
        assert WHOLE == array.tobytes()

    @pytest.mark.slow
    def test_goes_on_at_another_server(
        self, start_server: Callable[..., ServerProcess], name: str
    ) -> None:
        server = start_server()
        first = Writer(server.address, name, 1, writers=2)
        first.begin()
        first.write(frame(0), writer=0)
        first.write(frame(2), writer=1)
        server.kill()
        other = start_server(root=server.root)
        second = Writer(other.address, name, 1)

        second.begin()
        assert [0, 2] == second.find(sums(0, 1, 2))

    def test_takes_over_what_it_asks_for_of_a_chunk_that_was_sent_twice(
        self, server_address: str, name: str
    ) -> None:
        first = Writer(server_address, name, 1)
        first.begin()
        first.write(frame(0, 1))
        first.write(frame(0, version=1))
        second = Writer(server_address, name, 1)
        second.begin()

        assert [0, 1] == second.find(sums(0, 1, 2))
        assert [0] == second.find(sums(0, version=1))
        assert [] == second.find(sums(0, version=2))

    def test_takes_nothing_over_of_an_upload_that_was_aborted(
        self, server_address: str, name: str
    ) -> None:
        first = Writer(server_address, name, 1)
        first.begin()
        first.write(frame(0, 1, 2))
        first.abort()
        second = Writer(server_address, name, 1)

        assert not second.begin().resumes
        assert [] == second.find(sums(0, 1, 2))

    def test_is_not_robbed_by_a_late_abort_of_the_first_upload(
        self, server_address: str, name: str
    ) -> None:
        first = Writer(server_address, name, 1)
        first.begin()
        first.write(frame(0, 1, 2))
        second = Writer(server_address, name, 1)
        second.begin()
        second.finish(sums(0, 1, 2))
        first.abort()

        second.commit()

    @pytest.mark.slow
    def test_resumes_by_the_client_alone(
        self, run: store.Run, server_address: str
    ) -> None:
        from storesvc_client._chunks.slabs import FilledSlab, SumsInProgress, frames
        from storesvc_client._pytree.save_plan import Planner, TreeSource
        from storesvc_client._telemetry.progress import Meter

        plan, values = Planner().plan(TREE, b"")
        source = TreeSource(plan, values)
        first = Writer(server_address, run.name, 3)
        first._tree = plan.tree
        first.begin()
        filled = []
        for slab in plan.slabs:
            buffer = np.zeros(slab.size, np.uint8)
            for ordinal, at, size in slab.rows():
                source.copy(ordinal, buffer[at : at + size])
            filled.append(
                FilledSlab(slab, [o for o, *_ in slab.rows() if o < 2], buffer)
            )
        sums, meter = SumsInProgress(plan.tree.chunk_count), Meter("save", "")
        requests = frames(filled, sums, meter)
        first.write(
            *(upload_api.WriteChunksRequest.FromString(r).frame for r in requests)
        )
        report = run.save(3, TREE).report()

        assert 0 < report.reused_bytes < report.total_bytes
        assert_equal(TREE, run.restore(3))


ARRAYS = st.dictionaries(
    st.sampled_from("abcdef"), st.integers(0, 3), min_size=1, max_size=6
)


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(saves=st.lists(st.tuples(ARRAYS, st.integers(-1, 3)), min_size=1, max_size=6))
def test_any_saves_on_any_bases_come_back_exactly(
    server: ServerProcess, client: store.Client, saves: list[tuple[dict[str, int], int]]
) -> None:
    run = client.run(f"tests/any-{next(_names)}")
    for step, (values, back) in enumerate(saves):
        base = step - 1 - back if 0 <= back < step else None
        tree = {k: np.full(500, v, np.int16) for k, v in values.items()}
        run.save(step, tree, base=base).result()
    for step, (values, _) in enumerate(saves):
        restored, viewed = run.restore(step), view(server, run, step)
        for key, value in values.items():
            assert (restored[key] == value).all()
            assert (viewed(key) == value).all()


def view(server: ServerProcess, run: store.Run, step: int) -> Callable[[str], Any]:
    """The leaves of a step as plain TensorStore shows them."""
    places = server.root / RunPaths(RunName.parse(run.name)).root
    key_space = run.checkpoint(step).key_space

    def leaf(key: str) -> Any:
        spec = {
            "driver": "zarr3",
            "kvstore": {
                "driver": "ocdbt",
                "base": f"file://{places}/pool/",
                "manifest": f"file://{places}/trees/{key_space}/",
                "path": f"{key}/",
            },
            "fill_missing_data_reads": False,
        }
        opened = ts.open(spec, open=True, read=True).result()
        return np.asarray(opened.read().result())

    return leaf
