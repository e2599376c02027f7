"""Checkpoints of Orbax become checkpoints of a run, with every leaf and its type."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import storesvc_client as store
from tests.foreign.orbax_checkpoints import WRITERS, mesh, tree_for
from tests.foreign.test_mounts import assert_same, bytes_read
from tests.support.command_line import printed
from tests.support.examples import sampled


@pytest.mark.parametrize(
    "writer", sampled([w for w in WRITERS if "composite" not in w], every=3)
)
def test_a_state_of_each_writer_is_imported(
    writer: str, tmp_path: Path, run: store.Run
) -> None:
    tree = tree_for(writer)
    WRITERS[writer](tmp_path / "orbax", tree)

    done = run.import_from(f"orbax:{tmp_path / 'orbax'}")

    assert [True] * len(done) == [one.is_new for one in done]
    assert_same(tree, run.restore(like=tree))
    assert run.verify().ok


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_uncompressed_chunks_are_read_without_tensorstore(
    tmp_path: Path, run: store.Run, *, ocdbt: bool, zarr3: bool
) -> None:
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=ocdbt, use_zarr3=zarr3, use_compression=False
    )
    spread = NamedSharding(mesh(), PartitionSpec("x", "y"))
    numbers = np.random.default_rng(0).standard_normal((2048, 512), np.float32)
    tree = {"w": jax.device_put(numbers, spread), "b": np.ones(3)}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "orbax" / "7", tree)
    read = bytes_read(tmp_path)

    run.import_from(f"orbax:{tmp_path / 'orbax'}")

    assert read() < numbers.nbytes // 10
    assert_same(tree, run.restore(like=tree))
    assert run.verify().ok


def test_an_export_is_imported_with_its_checksums_compared(
    tmp_path: Path, run: store.Run
) -> None:
    tree = {"w": np.arange(6.0), "z": np.zeros((3, 2)), "step": 7}
    run.save(7, tree).result()
    run.export(7, f"orbax:{tmp_path / 'ours'}")
    WRITERS["v0-zarr3"](tmp_path / "theirs", tree)

    ours = store.open_foreign(f"orbax:{tmp_path / 'ours'}").open()
    theirs = store.open_foreign(f"orbax:{tmp_path / 'theirs'}").open()

    assert (True, False) == (ours.info.is_verified, theirs.info.is_verified)
    assert_same(tree, ours.restore(like=tree))
    assert ours.report is not None
    assert ours.report.is_verified


def test_metrics_that_are_not_finite_come_back_from_an_export(
    tmp_path: Path, client: store.Client
) -> None:
    metrics = {"loss": math.nan, "low": -math.inf, "high": math.inf, "x": 1.0}
    client.run("a/from").save(1, {"w": np.ones(2)}, metrics=metrics).result()
    client.run("a/from").export(1, f"orbax:{tmp_path}")

    client.run("a/to").import_from(f"orbax:{tmp_path}")

    found = client.run("a/to").checkpoint(1).metrics
    assert math.isnan(found["loss"])
    assert {**metrics, "loss": 0} == {**found, "loss": 0}
    assert [] == list(client.run("a/to").items(1))


def test_metrics_that_a_manager_wrote_need_not_be_finite(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        args = ocp.args.StandardSave({"w": np.ones(2)})
        manager.save(1, args=args, metrics={"loss": math.inf})

    assert {"loss": math.inf} == store.open_foreign(
        f"orbax:{tmp_path}"
    ).checkpoint().metrics


@pytest.mark.parametrize("metrics", ['{"n": 1%s}' % ("0" * 400), '{"n": "x"}'])
def test_metrics_that_are_no_floats_stay_an_item(
    metrics: str, tmp_path: Path, run: store.Run
) -> None:
    run.save(1, {"w": np.ones(2)}, metrics={"n": 1}).result()
    run.export(1, f"orbax:{tmp_path}")
    (tmp_path / "1" / "metrics" / "metrics").write_text(metrics)

    mounted = store.open_foreign(f"orbax:{tmp_path}").open()

    assert {} == mounted.info.metrics
    assert metrics.encode() == mounted.items["metrics"]


def test_custom_metadata_too_long_for_a_label_becomes_an_item(
    tmp_path: Path, run: store.Run
) -> None:
    long = {"notes": "x" * 300}
    with ocp.CheckpointManager(tmp_path) as manager:
        args = ocp.args.StandardSave({"w": np.ones(2)})
        manager.save(1, args=args, custom_metadata=long)
    mounted = store.open_foreign(f"orbax:{tmp_path}")
    assert long == json.loads(mounted.checkpoint().labels["orbax.custom_metadata"])

    run.import_from(mounted)

    assert long == json.loads(run.items()["orbax-custom-metadata"])
    assert "orbax.custom_metadata" not in run.checkpoint(1).labels


@pytest.mark.slow
def test_an_export_of_an_import_is_imported_again_and_again(
    tmp_path: Path, client: store.Client
) -> None:
    tree = {"w": np.arange(6.0), "step": 7}
    WRITERS["v1-save"](tmp_path / "0", tree)
    for age in range(3):  # each has the labels of all before it as custom metadata
        run = client.run(f"tests/generation-{age}")
        run.import_from(f"orbax:{tmp_path / str(age)}")
        assert_same(tree, run.restore(like=tree))
        run.export("latest", f"orbax:{tmp_path / str(age + 1)}")
    assert ["orbax-custom-metadata", "orbax-custom-metadata-2"] == sorted(run.items())


def test_an_export_with_a_text_has_no_checksums_of_all(
    tmp_path: Path, run: store.Run
) -> None:
    run.save(7, {"w": np.ones(2), "name": "a text"}).result()
    run.export(7, f"orbax:{tmp_path / 'ours'}")

    assert not store.open_foreign(f"orbax:{tmp_path / 'ours'}").checkpoint().is_verified


def test_a_flipped_bit_of_an_export_is_damage(tmp_path: Path, run: store.Run) -> None:
    tree = {"w": np.arange(600.0)}
    run.save(7, tree).result()
    run.export(7, f"orbax:{tmp_path / 'ours'}")
    (data,) = (
        path
        for path in (tmp_path / "ours").rglob("d/*")
        if tree["w"].tobytes() in path.read_bytes()
    )
    flipped = bytearray(data.read_bytes())
    flipped[flipped.index(tree["w"].tobytes())] ^= 1
    data.unlink()  # it may be a link to a file of the store
    data.write_bytes(flipped)

    with pytest.raises(store.DataLossError, match="leaf 'w'"):
        store.open_foreign(f"orbax:{tmp_path / 'ours'}").open().restore(like=tree)


@pytest.mark.slow
def test_storectl_imports_a_step_of_a_manager(tmp_path: Path) -> None:
    tree = {"params": {"w": jax.numpy.arange(12.0)}, "step": 7}
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        for step in (100, 200):
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    root = (tmp_path / "store").as_uri()
    store.connect(root).close()

    text = printed(root, "import", f"orbax:{tmp_path / 'orbax'}", "a/b", "--latest")

    assert text.startswith("a/b@200: ")
    with store.connect(root) as client:
        run = client.run("a/b")
        assert [200] == run.steps()
        assert_same(tree, run.restore(like=tree))


@pytest.mark.slow
def test_storectl_says_of_how_much_a_source_has_checksums(tmp_path: Path) -> None:
    root, state = str(tmp_path / "store"), {"w": np.ones(2), "b": np.ones(3)}
    with store.connect(f"file://{root}") as client:
        client.run("a/all").save(7, state).result()
        client.run("a/some").save(7, {**state, "name": "x"}, items={"i": 1}).result()
        for name in "all", "some":
            client.run(f"a/{name}").export(7, f"orbax:{tmp_path / name}")
    WRITERS["v0-zarr3"](tmp_path / "none" / "7", state)

    texts = {
        name: (
            printed(root, "import", f"orbax:{tmp_path / name}", f"b/{name}"),
            printed(root, "stat", f"orbax:{tmp_path / name}@7"),
        )
        for name in ("all", "some", "none")
    }

    assert texts["all"][0].endswith(" stored\n")
    assert "checksums  of all elements" in texts["all"][1]
    assert texts["some"][0].endswith(
        " stored, 2 of 4 leaves and items compared with checksums, source has none of "
        "the others\n"
    )
    assert "checksums  of 2 of 4 leaves and items\n" in texts["some"][1]
    assert texts["none"][0].endswith(" stored, source has no checksums\n")
    assert "checksums  none: unverified\n" in texts["none"][1]
