"""An import with a mapping stores the tree that the rules make, and reads each stored
byte once."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import storesvc_client as store
from storesvc_client import ForeignRun
from storesvc_client._foreign import source as source_module
from storesvc_client._foreign.locations import open_location
from storesvc_client._foreign.source import plan_mapped_units, stored_tree
from storesvc_client._restore.mapped import MappedReader, load_rules
from storesvc_client._restore.open_tree import get_reader
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.foreign.written_files import files_below, put_files
from tests.foreign.zarr_format import ZarrRoot

LAYERS, WIDTH = 3, 512


def make_tensors(width: int = WIDTH) -> dict[str, NDArray[Any]]:
    """Layers with a fused projection, as Hugging Face's files have them."""
    random = np.random.default_rng(width)
    tensors = {
        f"model.layers.{n}.{name}": random.normal(size=shape).astype(np.float32)
        for n in range(LAYERS)
        for name, shape in {
            "qkv.weight": (3 * width, width),
            "norm.weight": (width,),
        }.items()
    }
    return tensors | {"model.embed": random.normal(size=(40, width))}


RULES: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "from": "model/layers/{n:int}/qkv/weight",
            "to": [f"params/{name}/kernel" for name in "qkv"],
            "operations": [
                {"transpose": [1, 0]},
                {"split": {"axis": 1, "sizes": [WIDTH, WIDTH, WIDTH]}},
                {"stack": {"axis": 0, "by": "n"}},
            ],
        },
        {
            "from": "model/layers/{n:int}/norm/weight",
            "to": "params/norm",
            "operations": [{"stack": {"axis": 0, "by": "n"}}],
        },
        {"from": "model/embed", "to": "params/embed"},
        {
            "default": {"shape": [7], "dtype": "float32", "value": 2},
            "to": "params/new",
        },
    ],
}


def map_tensors(tensors: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Returns what the rules make of the tensors."""
    layers = [f"model.layers.{n}" for n in range(LAYERS)]
    fused = np.stack([tensors[f"{layer}.qkv.weight"].T for layer in layers])
    parts = np.split(fused, 3, axis=2)
    return {
        **{
            f"params/{name}/kernel": part
            for name, part in zip("qkv", parts, strict=True)
        },
        "params/norm": np.stack([tensors[f"{layer}.norm.weight"] for layer in layers]),
        "params/embed": tensors["model.embed"],
        "params/new": np.full(7, 2, np.float32),
    }


def check_leaves(run: store.Run, step: int, wanted: dict[str, NDArray[Any]]) -> None:
    opened = run.open(step)
    found = {leaf.key: array for leaf, array in opened.read(opened.leaves)}
    assert wanted.keys() == found.keys()
    for key, array in wanted.items():
        assert (array.dtype, array.shape) == (found[key].dtype, found[key].shape)
        assert array.tobytes() == found[key].tobytes()
    assert run.verify(step).ok


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    save_file(make_tensors(), tmp_path / "model" / "model.safetensors")
    return f"safetensors:{tmp_path}/model"


def test_the_step_has_the_tree_of_the_rules(source: str, run: store.Run) -> None:
    (done,) = run.import_from(source, mapping=RULES)

    check_leaves(run, 0, map_tensors(make_tensors()))
    labels = done.checkpoint.labels
    assert load_rules(RULES).digest == labels["import.mapping"]


def test_a_run_of_another_project_is_opened_with_a_mapping(
    source: str, run: store.Run
) -> None:
    foreign = store.open_foreign(source, mapping=RULES)
    wanted = map_tensors(make_tensors())

    opened = foreign.open()
    restored = foreign.restore()
    run.import_from(foreign)

    assert sorted(wanted) == [*opened.leaves]
    np.testing.assert_array_equal(wanted["params/norm"], restored["params"]["norm"])
    check_leaves(run, 0, wanted)


def test_rules_that_do_not_fit_are_rejected_before_anything_is_read_or_stored(
    tmp_path: Path, run: store.Run
) -> None:
    root = ZarrRoot(tmp_path)
    root.write(1, {"a": np.ones(3)})
    root.write(2, {"a": np.ones(3), "b": np.ones(3)})
    rules = {"version": 1, "rules": [{"from": "a", "to": "c"}]}

    with pytest.raises(store.MismatchError, match="got none for b"):
        run.import_from(ForeignRun(root), mapping=rules)

    assert 0 == sum(array.read_count for array in root.arrays)
    with pytest.raises(store.NotFoundError):
        run.info()


def test_the_same_rules_skip_the_step_and_others_are_rejected(
    source: str, run: store.Run
) -> None:
    run.import_from(source, mapping=RULES)

    (again,) = run.import_from(source, mapping=RULES)

    assert not again.is_new
    others = {"version": 1, "otherwise": "keep", "rules": []}
    for mapping in None, others:
        with pytest.raises(store.AlreadyExistsError, match="other rules"):
            run.import_from(source, mapping=mapping)


def test_two_mappings_of_one_import_are_rejected(source: str, run: store.Run) -> None:
    foreign = store.open_foreign(source, mapping=RULES)

    with pytest.raises(store.InvalidRequestError, match="expected one mapping"):
        run.import_from(foreign, mapping=RULES)


def test_an_import_that_was_interrupted_is_repeated(
    tmp_path: Path, run: store.Run
) -> None:
    root = ZarrRoot(tmp_path)
    arrays = {"a": np.arange(4_000_000.0), "b": np.arange(6.0).reshape(2, 3)}
    root.write(1, arrays)
    rules = {
        "version": 1,
        "rules": [
            {"from": "a", "to": "x", "operations": [{"reshape": [2, -1]}]},
            {"from": "b", "to": "y", "operations": [{"transpose": [1, 0]}]},
        ],
    }
    damaged = tmp_path / "1" / "b" / "0.0"
    stored = damaged.read_bytes()
    damaged.write_bytes(stored[:8])

    with pytest.raises(store.DataLossError):
        run.import_from(ForeignRun(root), mapping=rules)
    damaged.write_bytes(stored)
    (done,) = run.import_from(ForeignRun(root), mapping=rules)

    assert done.is_new
    check_leaves(run, 1, {"x": arrays["a"].reshape(2, -1), "y": arrays["b"].T})


def test_a_stored_chunk_that_many_leaves_need_is_read_once(
    tmp_path: Path, run: store.Run
) -> None:
    """The format compresses its chunks: each is read whole."""
    tensors = {key.replace(".", "/"): x for key, x in make_tensors().items()}
    root = ZarrRoot(tmp_path)
    root.write(0, tensors, chunks={key: x.shape for key, x in tensors.items()})

    run.import_from(ForeignRun(root), mapping=RULES)

    check_leaves(run, 0, map_tensors(make_tensors()))
    assert len(tensors) == sum(array.read_count for array in root.arrays)


@pytest.mark.emulated
def test_a_bucket_sends_each_byte_once(
    tmp_path: Path, run: store.Run, gcs: FakeGcs
) -> None:
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    root = gcs_root()
    put_files(files_below(tmp_path), open_location(root))
    before = gcs.sent_bytes

    (done,) = run.import_from(f"safetensors:{root}", mapping=RULES)

    wanted = sum(array.nbytes for array in tensors.values())
    assert wanted <= gcs.sent_bytes - before <= 1.05 * wanted
    check_leaves(run, done.checkpoint.step, map_tensors(tensors))


def test_units_and_what_they_are_made_of_have_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "UNIT_BYTES", 4 << 20)
    tensors = {f"w{n}": np.full((512, 512), n, np.float32) for n in range(20)}
    save_file(tensors, tmp_path / "model.safetensors")
    rules = {
        "version": 1,
        "rules": [
            {
                "from": "w{n:int}",
                "to": "x{n}",
                "operations": [
                    {"transpose": [1, 0]},
                    {"pad": {"axis": 0, "size": 520, "value": 0}},
                ],
            }
        ],
    }
    url = f"safetensors:{tmp_path}"
    view = get_reader(store.open_foreign(url, mapping=rules).open())
    assert isinstance(view, MappedReader)
    stored = stored_tree(view.tree)

    units = plan_mapped_units(view, stored)

    assert [*range(stored.chunk_count)] == sorted(
        ordinal for unit in units for _, slab in unit.slabs for ordinal in slab.ordinals
    )
    assert len(units) >= 6
    for unit in units:
        regions = [
            region
            for read in unit.reads
            for _, region in view.expressions[read.row].requests(read.region)
        ]
        sizes = (math.prod(b - a for a, b in region) for region in regions)
        assert max(unit.size, 4 * sum(sizes)) <= 4 << 20
