"""Exports to Orbax, read by Orbax itself: every kind of leaf, bit by bit."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import storesvc_client as store
from tests.export.parts import RUN, STEP, Save, bits, data_files, flip, saving

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:Sharding info not provided"),
    # of futures that the new interface of Orbax leaves to event loops that it closed
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ITEMS: dict[str, Any] = {"config": {"layers": [1, None]}, "notes": "two\nlines"}


def state() -> dict[str, Any]:
    """Returns a tree of every kind of leaf that Orbax holds."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    across = NamedSharding(mesh, PartitionSpec("data", "model"))
    return {
        "params": {
            "sharded": jax.device_put(jnp.arange(60.0).reshape(6, 10)[:, :8], across),
            "half": jnp.arange(20, dtype=jnp.bfloat16).reshape(4, 5),
            "eight": jnp.arange(4, dtype=jnp.float8_e4m3fn),
            "four bits": jnp.arange(-3, 6).astype(jnp.int4).reshape(3, 3),
            "two bits": jnp.arange(-2, 2).astype(jnp.int2),
            "float of 4 bits": jnp.arange(-3, 4).astype(jnp.float4_e2m1fn),
            "scales": jnp.arange(1, 4).astype(jnp.float8_e8m0fnu),
            "scalar": jnp.float32(2.5),
            "haiku/~/linear": jnp.ones(2),
        },
        "": jnp.arange(7),
        "host": np.arange(6.0).reshape(2, 3),
        "flags": np.array([True, False]),
        "waves": np.array([1 + 2j]),
        "none_of_it": np.zeros((0, 3), np.int16),
        "rng": jax.random.key(7),
        "rngs": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "step": 3,
        "rate": 0.1,
        "done": True,
        "list": [1, jnp.ones(2, jnp.int32)],
        "empty": {"none": None, "dict": {}, "list": [], "tuple": ()},
    }


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    return state()


@pytest.fixture(scope="module", params=["linked", "copied"])
def exports(
    request: pytest.FixtureRequest,
    tree: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the exports of both layouts, by links or by copies."""
    folder = tmp_path_factory.mktemp(request.param)
    root = (folder / "store").as_uri() if request.param == "linked" else "memory://"
    options = {"metrics": {"loss": 1.5}, "labels": {"seed": "17"}}
    with saving() as save:
        opened = save(root, tree, items=ITEMS, **options)
        for layout in ("v0", "v1"):
            report = opened.export(f"orbax:{folder}/{layout}", layout=layout)
            assert (request.param == "linked") == (report.linked_bytes > 0)
    return folder


def check(expected: Any, actual: Any) -> None:
    """Compares trees leaf by leaf, bit by bit."""

    def is_none(leaf: Any) -> bool:
        return leaf is None

    theirs, shape = jax.tree.flatten(actual, is_leaf=is_none)
    ours, our_shape = jax.tree.flatten(expected, is_leaf=is_none)
    assert str(our_shape) == str(shape)
    assert list(map(bits, ours)) == list(map(bits, theirs))


def restored(step: Path, item: str = "default", *target: Any) -> Any:
    """Returns what Orbax restores of a step."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(step / item, *target)


def test_a_standard_checkpointer_restores_every_leaf(
    exports: Path, tree: dict[str, Any]
) -> None:
    check(tree, restored(exports / "v0" / "100"))


def test_a_standard_checkpointer_restores_into_a_target(
    exports: Path, tree: dict[str, Any]
) -> None:
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    found = restored(exports / "v0" / "100", "default", target)

    check(tree, found)
    assert tree["params"]["sharded"].sharding == found["params"]["sharded"].sharding


def test_a_pytree_checkpointer_restores_every_leaf(
    exports: Path, tree: dict[str, Any]
) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        check(tree, checkpointer.restore(exports / "v0" / "100" / "default"))


def test_a_checkpoint_manager_finds_step_items_and_metrics(
    exports: Path, tree: dict[str, Any]
) -> None:
    with ocp.CheckpointManager(exports / "v0") as manager:
        assert ([STEP], STEP) == (manager.all_steps(), manager.latest_step())
        check(tree, manager.restore(STEP))
        assert {"seed": "17"} == manager.metadata(STEP).custom_metadata
    options = ocp.CheckpointManagerOptions(best_fn=lambda found: found["loss"])
    with ocp.CheckpointManager(exports / "v0", options=options) as manager:
        assert {"loss": 1.5} == manager.metrics(STEP)
        assert STEP == manager.best_step()
    asked = ocp.args.Composite(
        config=ocp.args.JsonRestore(), notes=ocp.args.JsonRestore()
    )
    with ocp.CheckpointManager(
        exports / "v0", item_names=("config", "notes")
    ) as manager:
        assert ITEMS == dict(manager.restore(STEP, args=asked))


def test_the_new_interface_loads_both_layouts(
    exports: Path, tree: dict[str, Any]
) -> None:
    check(tree, ocp1.load(exports / "v1" / "100"))
    check(tree, ocp1.load(exports / "v0" / "100", checkpointable_name="default"))
    found = ocp1.load_checkpointables(exports / "v1" / "100")
    check(tree, found["state"])
    assert ITEMS == {name: found[name] for name in ITEMS}
    with ocp1.training.Checkpointer(exports / "v1") as checkpointer:
        check(tree, checkpointer.load(STEP))
        metadata = checkpointer.metadata(STEP)
        assert ({"loss": 1.5}, {"seed": "17"}) == (
            metadata.metrics,
            metadata.custom_metadata,
        )


def test_texts_are_texts_of_orbax(saved: Save, tmp_path: Path) -> None:
    tree = {"name": "héllo\n", "w": np.ones(2)}
    saved("memory://", tree).export(f"orbax:{tmp_path}")

    with ocp.PyTreeCheckpointer() as checkpointer:
        check(tree, checkpointer.restore(tmp_path / "100" / "default"))


def test_leaves_are_selected_and_cast(saved: Save, tmp_path: Path) -> None:
    opened = saved((tmp_path / "store").as_uri(), state())

    report = opened.export(
        f"orbax:{tmp_path}/x",
        select=["params/**", "step"],
        cast="float32",
        item="model",
    )

    found = restored(tmp_path / "x" / "100", "model")
    assert (0, 10) == (report.linked_bytes, report.leaf_count)
    assert {"params", "step"} == found.keys()
    for name, leaf in state()["params"].items():
        is_integer = "int" in leaf.dtype.name
        expected = leaf.dtype if is_integer else np.float32
        assert expected == found["params"][name].dtype
        np.testing.assert_array_equal(np.float32(leaf), found["params"][name])


def test_files_of_selected_leaves_hold_nothing_else(
    saved: Save, tmp_path: Path
) -> None:
    secret = np.full(500, 17.25)
    opened = saved((tmp_path / "store").as_uri(), {"w": np.ones(9), "secret": secret})

    report = opened.export(f"orbax:{tmp_path}/x", select="w")

    files = [file for file in (tmp_path / "x").rglob("*") if file.is_file()]
    assert 0 == report.linked_bytes
    assert not any(secret[:1].tobytes() in file.read_bytes() for file in files)


def test_links_survive_the_end_of_the_checkpoint(saved: Save, tmp_path: Path) -> None:
    tree = {"w": np.arange(1000.0)}
    root = (tmp_path / "store").as_uri()
    opened = saved(root, tree)
    opened.export(f"orbax:{tmp_path}/x")
    with store.connect(root) as client:
        client.run(RUN).delete(STEP)
        client.run(RUN).purge(STEP)
    for file in data_files(tmp_path / "store"):  # as a collection does
        file.unlink()

    check(tree, restored(tmp_path / "x" / "100"))


def test_steps_of_one_root_are_exported_one_after_the_other(
    run: store.Run, tmp_path: Path
) -> None:
    for step in (1, 2):
        run.save(step, {"w": np.full(3, step)}).result()
        run.export(step, f"orbax:{tmp_path}")

    with ocp.CheckpointManager(tmp_path) as manager:
        assert [1, 2] == sorted(manager.all_steps())
        np.testing.assert_array_equal(np.full(3, 2), manager.restore(2)["w"])
    with pytest.raises(store.PreconditionError, match="a step is never replaced"):
        run.export(2, f"orbax:{tmp_path}")


@pytest.mark.parametrize("layout", ["v0", "v1"])
def test_orbax_reports_a_flipped_bit(saved: Save, layout: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tree = {f"w{at}": rng.standard_normal(2000) for at in range(4)}
    saved((tmp_path / "store").as_uri(), tree).export(
        f"orbax:{tmp_path}/x", layout=layout
    )
    item = tmp_path / "x" / "100" / ("default" if layout == "v0" else "state")
    outcomes = []
    for file in sorted((item / "d").iterdir()):
        whole = file.read_bytes()
        for position in rng.integers(len(whole), size=3).tolist():
            flip(file, position)
            outcomes.append(_outcome(item, layout, tree))
            file.write_bytes(whole)

    assert "wrong" not in outcomes
    assert outcomes.count("reported") > len(outcomes) / 2


def _outcome(item: Path, layout: str, tree: Any) -> str:
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = ocp1.load(item.parent) if layout == "v1" else None
            found = found or checkpointer.restore(item)
    except Exception:  # noqa: BLE001 - any error reports the damage
        return "reported"
    return "same" if all(np.array_equal(tree[k], found[k]) for k in tree) else "wrong"


def test_a_damaged_chunk_leaves_no_step_and_a_retry_completes_it(
    saved: Save, tmp_path: Path
) -> None:
    tree = {"w": np.arange(1000.0)}
    opened = saved((tmp_path / "store").as_uri(), tree)
    file = data_files(tmp_path / "store")[0]
    flip(file, 100)

    with pytest.raises(store.DataLossError, match="leaf 'w'"):
        opened.export(f"orbax:{tmp_path}/x", cast="float32")
    assert [] == list((tmp_path / "x").iterdir())
    flip(file, 100)
    opened.export(f"orbax:{tmp_path}/x", cast="float32")

    assert ["100"] == [each.name for each in (tmp_path / "x").iterdir()]


def test_a_missing_data_file_is_data_loss(saved: Save, tmp_path: Path) -> None:
    opened = saved((tmp_path / "store").as_uri(), {"w": np.arange(1000.0)})
    for file in data_files(tmp_path / "store"):
        file.unlink()

    with pytest.raises(store.DataLossError, match="at least 8004 bytes, got no"):
        opened.export(f"orbax:{tmp_path}/x")

    assert not (tmp_path / "x" / "100").exists()


def test_an_export_that_fails_keeps_no_link(saved: Save, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with store.connect(root.as_uri()) as client:
        run = client.run(RUN)
        tree = {"a": np.arange(1000.0), "b": np.arange(1000.0)}
        run.save(1, tree).result()
        (first,) = data_files(root)[:1]
        run.save(2, tree | {"b": np.ones(1000)}).result()
        (second,) = [each for each in data_files(root)[:2] if each != first]
        second.rename(tmp_path / "moved")

        with pytest.raises(store.DataLossError, match="got no file"):
            run.open(2).export(f"orbax:{tmp_path}/x")

    assert 1 == first.stat().st_nlink
    assert [] == list((tmp_path / "x").iterdir())


KILLED = """
import resource, signal, sys
import storesvc_client as store

target, run, url = sys.argv[1:]
with store.connect(target) as client:
    opened = client.run(run).open(100)
    # The first file beyond the limit kills the process: the documents of the item,
    # which are written after the links.
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    opened.export(url)
"""


@pytest.mark.slow
def test_a_repeated_export_removes_the_links_of_one_that_was_killed(
    saved: Save, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    tree = {f"leaf-{n:03}": np.arange(10.0) for n in range(200)}
    opened = saved(root.as_uri(), tree)
    url = f"orbax:{tmp_path}/x"
    largest = data_files(root)[0]

    arguments = [sys.executable, "-c", KILLED, root.as_uri(), RUN, url]
    killed = subprocess.run(arguments, check=False)
    assert -signal.SIGXFSZ == killed.returncode
    assert 2 == largest.stat().st_nlink
    with ocp.CheckpointManager(tmp_path / "x") as manager:
        assert [] == manager.all_steps()
    opened.export(url)

    assert 2 == largest.stat().st_nlink
    assert ["100"] == [each.name for each in (tmp_path / "x").iterdir()]


@pytest.mark.parametrize(
    ("tree", "options", "problem"),
    [
        (
            {"a": {"b": np.ones(2)}, "a.b": np.ones(3)},
            {},
            r"leaf 'a/b': .* joins .* got 'a\.b', which leaf 'a\.b' has",
        ),
        ({"raw": b"bytes"}, {}, "leaf 'raw': .* got the kind bytes"),
        ({"large": 2**70}, {}, "leaf 'large': .* got the kind integer"),
        ({"z": 1 + 2j}, {}, "leaf 'z': .* complex number of Python"),
        ({"q": jnp.ones(2, jnp.uint4)}, {}, "leaf 'q': .* Orbax restores, got uint4"),
        (np.ones(2), {}, "leaf '': expected a path that Orbax can name"),
        (
            {"w": np.ones(2)},
            {"items": {"tokens": b"raw"}},
            "item 'tokens': expected JSON or a text, .* got bytes",
        ),
        (
            {"w": np.ones(2)},
            {"items": {"data": store.PerProcess(1)}},
            "item 'data': .* got a value of each process",
        ),
    ],
)
def test_what_orbax_would_lose_is_rejected_by_name(
    saved: Save, tree: Any, options: Any, problem: str, tmp_path: Path
) -> None:
    opened = saved("memory://", tree, **options)

    with pytest.raises(store.PreconditionError, match=problem):
        opened.export(f"orbax:{tmp_path}/x")

    assert not (tmp_path / "x").exists()


def test_items_that_orbax_cannot_hold_are_left_out_if_asked(
    saved: Save, tmp_path: Path
) -> None:
    items = {"tokens": b"raw", "config": {"x": 1}}
    opened = saved("memory://", {"w": np.ones(2)}, items=items)

    report = opened.export(f"orbax:{tmp_path}", drop_items=True)

    assert ("tokens",) == report.dropped_items
    assert (tmp_path / "100" / "config" / "metadata").exists()


@pytest.mark.parametrize("item", ["config", "../x", "metrics", "a/b"])
def test_a_name_of_the_tree_that_is_taken_is_rejected(
    saved: Save, item: str, tmp_path: Path
) -> None:
    opened = saved(
        "memory://", {"w": np.ones(2)}, items={"config": {}}, metrics={"loss": 1}
    )

    with pytest.raises(
        store.InvalidRequestError, match="item=: expected at most 63 letters"
    ):
        opened.export(f"orbax:{tmp_path}", item=item)


def test_a_step_in_a_bucket_is_complete_when_its_last_file_is(
    saved: Save, tmp_path: Path
) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    tree = {"w": np.arange(1000.0)}
    opened = saved((tmp_path / "store").as_uri(), tree)
    file = data_files(tmp_path / "store")[0]
    flip(file, 100)

    with pytest.raises(store.DataLossError):
        opened.export("orbax:memory://exports/orbax")
    assert not files.exists("/exports/orbax/100/commit_success.txt")
    flip(file, 100)
    opened.export("orbax:memory://exports/orbax")

    assert files.exists("/exports/orbax/100/commit_success.txt")
    files.get("/exports/orbax/", str(tmp_path / "x"), recursive=True)
    check(tree, restored(tmp_path / "x" / "100"))
    with pytest.raises(store.PreconditionError, match="never replaced"):
        opened.export("orbax:memory://exports/orbax")
