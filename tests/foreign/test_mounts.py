"""Checkpoints of Orbax are restored in place, with the planner of a store."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc_client._foreign.locations import open_location
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.foreign.orbax_checkpoints import WRITERS, arrays, mesh, tree_for
from tests.foreign.web_server import RangeHandler, RedirectHandler, serving
from tests.foreign.written_files import files_below, put_files


def assert_same(expected: Any, actual: Any) -> None:
    """Compares two trees as bytes, types and shardings of their leaves included."""
    shapes = [jax.tree.structure(tree) for tree in (expected, actual)]
    assert shapes[:1] == shapes[1:]
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True
    ):
        assert type(one) is type(other)
        if not isinstance(one, jax.Array):
            np.testing.assert_array_equal(one, other)
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            assert_same(jax.random.key_data(one), jax.random.key_data(other))
            continue
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    "writer", [name for name in WRITERS if "composite" not in name]
)
def test_a_state_is_restored_into_like(
    writer: str, written: Callable[[str], Path]
) -> None:
    state = tree_for(writer)
    run = store.open_foreign(f"orbax:{written(writer)}")
    opened = run.open()
    assert_same(state, opened.restore(like=state))
    assert opened.report is not None
    assert not opened.report.is_verified
    assert "unverified" in repr(opened.report)


def test_a_restore_without_like_returns_empty_containers_too(
    written: Callable[[str], Path],
) -> None:
    restored = store.open_foreign(f"orbax://{written('v1-save')}").restore()
    assert [None, {}, [], ()] == restored["empty"]
    assert "übung" == restored["name"]
    assert (7, 0.5, True) == (restored["step"], restored["lr"], restored["flag"])


def test_leaves_are_selected_cast_and_placed_on_the_recorded_mesh(
    written: Callable[[str], Path],
) -> None:
    run = store.open_foreign(f"orbax:{written('v0-manager')}")
    restored = run.restore(
        5, select="layers/**", cast="float32", mesh=mesh(), rules="recorded"
    )
    assert ["layers"] == list(restored)
    expected = jax.tree.map(lambda x: x.astype(jnp.float32), arrays()["layers"])
    assert_same(expected, restored["layers"])


def test_names_and_steps_of_a_run(written: Callable[[str], Path]) -> None:
    path = written("v0-manager")
    run = store.open_foreign(f"orbax:{path}")
    assert f"orbax:{path.as_uri()}" == run.name
    assert [100, 5] == [each.step for each in run.checkpoints()]
    assert 100 == run.checkpoint("latest").step
    assert f"{run.name}@5" == run.open(5).name
    assert {"loss": 0.5} == run.checkpoint(5).metrics
    with pytest.raises(
        store.NotFoundError, match="expected a finished step 7, got none"
    ):
        run.open(7)
    with pytest.raises(store.InvalidRequestError, match="other projects have no tags"):
        run.open("best")
    with pytest.raises(store.NotFoundError, match=r"no leaf of .* matches 'layer/\*'"):
        run.restore(select="layer/*")
    with pytest.raises(store.MismatchError, match="does not fit the target"):
        run.restore(like={"other": jnp.ones(2)})


def test_items_of_a_run(written: Callable[[str], Path]) -> None:
    items = store.open_foreign(f"orbax:{written('v0-composite')}").items()
    assert {"layers": [1, 2]} == items["model-config"]
    assert 1 == items.info("iter").process_count


def bytes_read(root: Path) -> Callable[[], int]:
    """Returns a function that returns the bytes that TensorStore has read from files
    since then."""

    def total() -> int:
        found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/")
        return sum(
            int(value["value"])
            for metric in found
            if metric["name"].endswith("bytes_read")
            for value in metric["values"]
        )

    before = total()
    return lambda: total() - before


def test_a_sharded_restore_reads_the_chunks_that_it_needs_and_no_more(
    tmp_path: Path,
) -> None:
    spread = NamedSharding(mesh(), PartitionSpec("x", "y"))
    numbers = np.random.default_rng(0).integers(0, 2**31, (1024, 512), np.int32)
    state = {f"w{k}": jax.device_put(jnp.asarray(numbers), spread) for k in range(4)}
    WRITERS["v0-pytree"](tmp_path / "step", state)
    run = store.open_foreign(f"orbax:{tmp_path / 'step'}")
    opened = run.open()
    # of one leaf, to half as many parts along each dimension, rows then columns
    other = NamedSharding(mesh(), PartitionSpec("y", "x"))
    like = {"w1": jax.ShapeDtypeStruct((1024, 512), jnp.int32, sharding=other)}
    read = bytes_read(tmp_path)
    restored: Any = opened.restore(like=like, select="w1")
    assert np.array_equal(numbers, restored["w1"])
    assert restored["w1"].sharding == other
    forced = numbers.nbytes  # 8 chunks of the writer, which zstd cannot shrink
    assert forced == opened.report.read_bytes  # type: ignore[union-attr]  # restored
    assert forced * 0.8 < read() < forced * 1.2


@pytest.mark.emulated
def test_in_a_bucket_a_step_without_its_commit_file_is_unfinished_unless_trusted(
    written: Callable[[str], Path], gcs: FakeGcs
) -> None:
    root = gcs_root()
    copy_to_bucket(
        written("v0-manager"), root, without="ckpt_000100/commit_success.txt"
    )
    run = store.open_foreign(f"orbax:{root}")
    assert [5] == list(run.steps())
    with pytest.raises(
        store.NotFoundError, match="accept it with trust_uncommitted=True"
    ):
        run.open(100)
    trusted = store.open_foreign(f"orbax:{root}", trust_uncommitted=True)
    assert [5, 100] == list(trusted.steps())
    state = tree_for("v0-manager")
    assert_same(state, trusted.restore(100, like=state))


def copy_to_bucket(folder: Path, root: str, *, without: str = "") -> None:
    """Copies a folder into a bucket, with the exception of one file."""
    files = files_below(folder)
    files.pop(without, None)
    put_files(files, open_location(root))


def test_like_decides_what_orbax_does_not_record(tmp_path: Path) -> None:
    state = {"by number": {0: jnp.ones(2), 1: (jnp.zeros(3), 5)}}
    WRITERS["v0-pytree"](tmp_path / "step", state)
    run = store.open_foreign(f"orbax:{tmp_path / 'step'}")
    assert_same(state, run.restore(like=state))
    assert {"0", "1"} == set(run.restore()["by number"])
    assert isinstance(run.restore()["by number"]["1"], list)


@pytest.mark.parametrize("writer", ["v0-files", "v0-pytree", "v0-zarr3"])
def test_an_empty_key_is_read(writer: str, tmp_path: Path) -> None:
    state = {"": jnp.arange(3), "w": {"": jnp.ones(2), "x": jnp.zeros(2)}}
    WRITERS[writer](tmp_path / "step", state)
    assert_same(state, store.open_foreign(f"orbax:{tmp_path / 'step'}").restore())


def test_the_state_of_a_list_of_modules_is_restored(tmp_path: Path) -> None:
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(k)) for k in range(2)]
    state = nnx.state(nnx.List(layers))
    WRITERS["v0-standard"](tmp_path / "step", state)
    like = jax.tree.map(jnp.zeros_like, state)
    run = store.open_foreign(f"orbax:{tmp_path / 'step'}")
    assert_same(state, run.restore(like=like))


def test_a_web_server_with_ranges_is_read(written: Callable[[str], Path]) -> None:
    state = tree_for("v1-save")
    folder = written("v1-save")
    with serving(folder.parent, RangeHandler) as url:
        run = store.open_foreign(f"orbax:{url}/{folder.name}", trust_uncommitted=True)
        assert_same(state, run.restore(like=state))


def test_a_web_server_that_redirects_is_named_and_no_damage(
    written: Callable[[str], Path],
) -> None:
    folder = written("v1-save")
    with serving(folder.parent, RedirectHandler) as url:
        run = store.open_foreign(f"orbax:{url}/{folder.name}", trust_uncommitted=True)
        with pytest.raises(store.PreconditionError, match="got a redirect to another"):
            run.restore()


def test_a_damaged_data_file_fails_the_restore(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("v0-zarr3"), tmp_path / "step")
    # All of them: it differs between runs which one is the largest, and whether the
    # merged index still refers to it.
    for data in (tmp_path / "step").rglob("d/*"):
        os.truncate(data, 10)
    with pytest.raises(
        store.DataLossError, match="stored bytes are missing or damaged"
    ):
        store.open_foreign(f"orbax:{tmp_path / 'step'}").restore()


@pytest.mark.parametrize("url", ["/ckpts", "orbax:", "orbax://host/x", "other:/x", ""])
def test_urls_without_a_known_format_are_rejected(url: str) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected FORMAT:LOCATION"):
        store.open_foreign(url)
