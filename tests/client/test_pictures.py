"""Checkpoints and runs of a store have pictures, and leaves have statistics."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import storesvc_client as store
from tests.pictures.parsed import SVG, parsed, texts, titles

LARGE = np.arange(6 << 20, dtype=np.float32)  # two chunks


def test_a_treemap_has_the_leaves_of_a_checkpoint(
    run: store.Run, tmp_path: Path
) -> None:
    run.save(1, {"a": np.ones((4, 8), np.float32), "b": {"c": np.ones(3)}}).result()

    picture = run.open().pictures.treemap()

    root = parsed(picture.svg)
    assert {"a\nfloat32[4,8]\n128 B, 84 %", "b/c\nfloat64[3]\n24 B, 16 %"} == {
        *titles(root)
    }
    assert f"<Picture: treemap of {run.name}@1>" == repr(picture)
    assert picture.svg == picture._repr_svg_()
    file = picture.save(tmp_path / "tree.svg")
    assert picture.svg == file.read_text(encoding="utf-8")
    with pytest.raises(store.InvalidRequestError, match=r"ends in \.svg, got "):
        picture.save(tmp_path / "tree.png")


def test_a_picture_file_has_grey_texts_and_a_drawing_those_of_its_page(
    run: store.Run,
) -> None:
    run.save(1, {"a": np.ones(3)}).result()

    picture = run.open().pictures.treemap()

    assert "#767676" == parsed(picture.svg).get("color")
    assert parsed(picture.drawing).get("color") is None


def test_changes_since_a_checkpoint_colour_its_treemap_and_layers(
    run: store.Run,
) -> None:
    tree = {f"layer_{at}": {"w": np.full(8, at)} for at in range(4)}
    run.save(1, tree).result()
    run.save(2, tree | {"layer_2": {"w": np.full(8, 9)}}).result()
    opened, diff = run.open(), run.diff(1)

    treemap = titles(parsed(opened.pictures.treemap(diff).svg))
    layers = titles(parsed(opened.pictures.layers(diff).svg))

    assert ["layer_2/w"] == [
        one.split("\n")[0] for one in treemap if one.endswith("100 % changed")
    ]
    assert "layer_2\n1 leaf, 64 B\n100 % changed" in layers
    assert 3 == sum(one.endswith("0 % changed") for one in layers) - 1
    for picture in (run.open(1).pictures.treemap, run.open(1).pictures.layers):
        with pytest.raises(store.InvalidRequestError, match=f"got one of {run.name}@2"):
            picture(diff)


def test_the_chunks_that_changed_since_a_checkpoint_are_filled(run: store.Run) -> None:
    run.save(1, {"w": LARGE}).result()
    changed = LARGE.copy()
    changed[-1] = 0
    run.save(2, {"w": changed}).result()
    opened = run.open(2)
    assert 2 == opened.leaves["w"].chunk_count

    root = parsed(opened.pictures.chunks("w", base=run.open(1)).svg)

    assert ["unchanged", "changed"] == [one.split("\n")[-1] for one in titles(root)]
    assert ["2 chunks of [3145728], 1 changed"] == texts(root)
    alone = parsed(opened.pictures.chunks("w").svg)
    assert ["2 chunks of [3145728]"] == texts(alone)


def test_chunks_that_cannot_be_compared_are_rejected(run: store.Run) -> None:
    run.save(1, {"w": np.ones(3)}).result()
    run.save(2, {"w": np.ones(4)}).result()
    pictures = run.open(2).pictures

    with pytest.raises(store.InvalidRequestError, match=r"expected float64 \(4,\)"):
        pictures.chunks("w", base=run.open(1))
    with pytest.raises(store.NotFoundError, match="has no leaf 'v'"):
        pictures.chunks("v")
    with pytest.raises(store.NotFoundError, match="has no leaf 'v'"):
        pictures.sharding("v")


def test_a_leaf_without_a_mesh_has_a_picture_that_says_so(run: store.Run) -> None:
    run.save(1, {"w": np.ones(3)}).result()

    picture = run.open().pictures.sharding("w")

    assert ["saved without a mesh"] == texts(parsed(picture.svg))


def test_statistics_of_a_leaf_are_those_of_its_values(run: store.Run) -> None:
    values = np.random.default_rng(6).normal(size=(50, 70)).astype(np.float32)
    values[0, 0] = np.nan
    run.save(1, {"w": values}).result()

    found = run.open().statistics("w")

    assert (3500, 1, 1) == (found.count, found.nan_count, found.read_chunk_count)
    assert np.nanmin(values) == found.minimum
    assert np.nanmean(values, dtype=float) == pytest.approx(found.mean)
    assert np.nanstd(values, dtype=float) == pytest.approx(found.std)
    assert "all 3,500 elements" == found.sample
    assert "<Picture: histogram of w>" == repr(found.histogram())
    parsed(found.heatmap().svg)


@pytest.mark.slow
def test_statistics_read_no_more_than_their_budget(run: store.Run) -> None:
    run.save(1, {"w": LARGE}).result()
    opened = run.open()

    every = opened.statistics("w")
    some = opened.statistics("w", budget_bytes=LARGE.nbytes // 2)

    assert (len(LARGE), len(LARGE) // 2) == (every.count, some.count)
    assert "sample of 3,145,728 elements in 1 of 2 chunks" == some.sample
    assert (0, LARGE[-1]) == (every.minimum, every.maximum)
    with pytest.raises(store.InvalidRequestError, match="of at least one chunk"):
        opened.statistics("w", budget_bytes=1000)
    with pytest.raises(store.NotFoundError, match="has no leaf 'v'"):
        opened.statistics("v")


@pytest.mark.parametrize(
    ("leaf", "count", "mean"),
    [(np.full((), 3.0), 1, 3.0), (np.ones((0, 3)), 0, None), (7, 1, 7.0)],
)
def test_scalars_and_empty_leaves_have_statistics(
    run: store.Run, leaf: object, count: int, mean: float | None
) -> None:
    run.save(1, {"w": leaf}).result()

    found = run.open().statistics("w")

    assert (count, mean) == (found.count, found.mean)
    parsed(found.histogram().svg)


def test_the_devices_of_a_sharded_leaf_are_those_of_its_mesh(run: store.Run) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    sharding = NamedSharding(mesh, PartitionSpec("model"))
    run.save(1, {"w": jax.device_put(np.ones((8, 8)), sharding)}).result()

    shown = texts(parsed(run.open().pictures.sharding("w").svg))

    assert ["0, 2, 4, 6", "1, 3, 5, 7"] == shown[:2]
    assert "mesh of 8 devices: data=4, model=2" in shown
    assert "each block on 4 devices" == shown[-1]


def test_a_checkpoint_of_another_project_has_pictures_but_no_digests(
    tmp_path: Path,
) -> None:
    save_file({"a.w": LARGE, "b": np.ones(3)}, tmp_path / "model.safetensors")
    opened = store.open_foreign(f"safetensors:{tmp_path}").open()

    assert 2 == len(titles(parsed(opened.pictures.treemap().svg)))
    assert LARGE[-1] == opened.statistics("a/w").maximum
    with pytest.raises(store.InvalidRequestError, match="which has no digests"):
        opened.pictures.chunks("b", base=opened)


@pytest.mark.slow
def test_a_timeline_has_the_states_of_the_checkpoints_of_a_run(run: store.Run) -> None:
    for step in range(5):
        run.save(step, {"w": np.ones(1)}, metrics={"loss": 1.0 / (step + 1)}).result()
    run.delete(2)
    run.update(1, pinned=True)
    run.tags.set("best", 3)
    with run.holds.create(4, owner="eval"):
        picture = run.timeline("loss")

    root = parsed(picture.svg)
    assert f"timeline of {run.name}" == picture.name
    label = "loss and 5 checkpoints, 1 tagged, 1 pinned, 1 held, 1 deleted, over steps"
    assert label == root.attrib["aria-label"]
    assert {"best", "loss", "held", "pinned"} <= {*texts(root)}
    hollow = [one for one in root.iter(f"{SVG}circle") if one.get("fill") == "none"]
    assert "step 2" in (hollow[0].findtext(f"{SVG}title") or "")
    assert "time" in texts(parsed(run.timeline(axis="time").svg))


def test_a_timeline_over_another_axis_is_rejected(run: store.Run) -> None:
    run.save(1, {"w": np.ones(1)}).result()

    with pytest.raises(
        store.InvalidRequestError, match="one of 'step', 'time', got 'loss'"
    ):
        run.timeline(axis="loss")  # type: ignore[arg-type]
    with pytest.raises(store.InvalidRequestError, match="the name of a metric"):
        run.timeline(3)  # type: ignore[arg-type]
