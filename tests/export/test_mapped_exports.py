"""Exports of the tree that a mapping makes, read by the packages of each format."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import storesvc_client as store
from tests.export.parts import Save, bits, data_files, flip
from tests.support.safetensors_files import load_file

LAYERS, SIZE, VALUES = 3, 8, 4
STATE: dict[str, Any] = {
    "params": {
        "layers": {
            "qkv": np.arange(LAYERS * SIZE * 3 * VALUES, dtype=np.float32).reshape(
                LAYERS, SIZE, 3 * VALUES
            )
        },
        "embed": np.arange(5.0 * SIZE).reshape(5, SIZE).astype(np.float32),
    },
    "step": np.array(7),
}
"""A model whose layers are stacked and whose projections are joined."""

UNSTACKED: dict[str, Any] = {
    "version": 1,
    "rules": [
        {
            "from": "params/layers/qkv",
            "operations": [
                {"unstack": {"axis": 0, "by": "n"}},
                {"transpose": [1, 0]},
                {"split": {"axis": 0, "sizes": [VALUES] * 3}},
            ],
            "to": [f"model/layers/{{n:int}}/{p}_proj/weight" for p in "qkv"],
        },
        {"from": "params/embed", "to": "model/embed_tokens/weight"},
        {"from": "step", "drop": True},
    ],
}


def expected(separator: str) -> dict[str, np.ndarray[Any, Any]]:
    """Returns what ``UNSTACKED`` makes of ``STATE``, by NumPy."""
    params = STATE["params"]
    found: dict[tuple[str, ...], Any]
    found = {("model", "embed_tokens", "weight"): params["embed"]}
    for n, layer in enumerate(params["layers"]["qkv"]):
        for p, part in zip("qkv", np.split(layer.T, 3), strict=True):
            found["model", "layers", str(n), f"{p}_proj", "weight"] = part
    return {separator.join(parts): value for parts, value in found.items()}


@pytest.fixture(params=["file", "memory"])
def opened(
    request: pytest.FixtureRequest, saved: Save, tmp_path: Path
) -> store.OpenCheckpoint:
    root = (tmp_path / "store").as_uri() if request.param == "file" else "memory://"
    return saved(root, STATE, items={"config": {"tied": True}}, metrics={"loss": 1.5})


def test_safetensors_has_the_tensors_that_the_rules_make(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    target = f"safetensors:{tmp_path}/hf"

    report = opened.export(target, mapping=UNSTACKED)

    found = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = expected(".")
    assert wanted.keys() == found.keys()
    assert all(bits(wanted[name]) == bits(found[name]) for name in wanted)
    assert len(wanted) == report.leaf_count
    assert ("model.safetensors", "config.json") == report.files
    assert {"tied": True} == json.loads((tmp_path / "hf" / "config.json").read_text())


def test_a_selection_and_a_cast_are_of_the_mapped_leaves(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    opened.export(
        f"npz:{tmp_path}/x.npz",
        mapping=UNSTACKED,
        select="model/layers/2/**",
        cast="float16",
    )

    wanted = {k: v for k, v in expected("/").items() if "layers/2" in k}
    with np.load(tmp_path / "x.npz") as found:
        assert wanted.keys() == {*found.files}
        for name, value in wanted.items():
            assert bits(value.astype(np.float16)) == bits(found[name])


def test_orbax_restores_the_tree_and_the_items(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    report = opened.export(f"orbax:{tmp_path}/x", mapping=UNSTACKED)

    with ocp.CheckpointManager(tmp_path / "x") as manager:
        leaves = manager.restore(100)["model"]
        loss = manager.metrics(100)["loss"]
    with ocp.CheckpointManager(tmp_path / "x", item_names=("config",)) as manager:
        asked = ocp.args.Composite(config=ocp.args.JsonRestore())
        config = manager.restore(100, args=asked)["config"]
    assert ({"tied": True}, 1.5) == (config, loss)
    wanted = expected("/")
    for n, layer in leaves["layers"].items():
        for name, leaf in layer.items():
            value = wanted.pop(f"model/layers/{n}/{name}/weight")
            assert value.tobytes() == np.asarray(leaf["weight"]).tobytes()
    embed = wanted.pop("model/embed_tokens/weight")
    assert embed.tobytes() == np.asarray(leaves["embed_tokens"]["weight"]).tobytes()
    assert {} == wanted
    assert (0, 0) == (report.linked_bytes, report.copied_bytes)


def test_items_are_not_left_out_in_silence(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(store.PreconditionError, match="drop_items=True"):
        opened.export(f"safetensors:{tmp_path}/hf/a.safetensors", mapping=UNSTACKED)

    assert not (tmp_path / "hf").exists()


def test_rules_that_do_not_fit_write_nothing(
    opened: store.OpenCheckpoint, tmp_path: Path
) -> None:
    rules = UNSTACKED | {"rules": UNSTACKED["rules"][1:]}

    with pytest.raises(store.MismatchError, match="got none for params/layers/qkv"):
        opened.export(f"orbax:{tmp_path}/x", mapping=rules)

    assert not (tmp_path / "x").exists()


def test_an_export_by_other_rules_is_not_continued(saved: Save, tmp_path: Path) -> None:
    """Names and shapes of both are the same: only the rules differ."""
    opened = saved(
        (tmp_path / "store").as_uri(),
        {name: np.full((1 << 20,), at, np.float32) for at, name in enumerate("abc")},
    )
    target, size = f"safetensors:{tmp_path}/hf", 4 << 20

    def rules(**names: str) -> dict[str, Any]:
        made = [{"from": old, "to": new} for old, new in names.items()]
        return {"version": 1, "rules": made}

    def finish(mapping: dict[str, Any]) -> set[str]:
        report = opened.export(target, mapping=mapping, max_shard_bytes=size)
        return {file for file in report.files if file.endswith(".safetensors")}

    first, other = rules(a="x", b="y", c="z"), rules(a="y", b="x", c="z")
    damaged = find_file_with(tmp_path / "store", np.full((1 << 10,), 2, np.float32))
    whole = damaged.read_bytes()
    at = whole.index(np.full((1 << 10,), 2, np.float32).tobytes())
    flip(damaged, at)
    with pytest.raises(store.DataLossError, match="leaf 'c'"):
        finish(first)
    assert (tmp_path / "hf" / "model-00001-of-00003.safetensors").exists()
    damaged.write_bytes(whole)

    files = finish(other)

    found = {k: v[0] for f in files for k, v in load_file(tmp_path / "hf" / f).items()}
    assert {"x": 1, "y": 0, "z": 2} == found


def find_file_with(root: Path, values: np.ndarray[Any, Any]) -> Path:
    """Returns the data file with some elements."""
    return next(f for f in data_files(root) if values.tobytes() in f.read_bytes())
