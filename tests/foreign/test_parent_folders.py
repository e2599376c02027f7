"""A folder of checkpoints that are no steps of one run is rejected; the error names the
URLs of those that it holds."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.array_serialization import pytree_serialization
from orbax.checkpoint import v1
from safetensors.numpy import save_file

import storesvc_client as store
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.foreign.test_hostile_files import write_eformer, write_levanter
from tests.foreign.test_mounts import copy_to_bucket
from tests.support.command_line import refusal, storectl
from tests.support.examples import sampled

NOWHERE: Final = "127.0.0.1:1"
TREE: Final[dict[str, Any]] = {"w": np.arange(6.0)}


def _tree(folder: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, TREE)


def _version_1(folder: Path) -> None:
    v1.save(folder, TREE)


def _manager(folder: Path) -> None:
    with ocp.CheckpointManager(folder) as manager:
        for step in (5, 100):
            manager.save(step, args=ocp.args.StandardSave(TREE))
            manager.wait_until_finished()


def _without_metadata(folder: Path) -> None:
    """Writes steps as releases of Orbax did that had no metadata of a step."""
    _manager(folder)
    for step in folder.iterdir():
        for name in "_CHECKPOINT_METADATA", "commit_success.txt":
            (step / name).unlink(missing_ok=True)


def _safetensors(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(TREE, folder / "model.safetensors")


def _steps_of(write: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def steps(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True)
        write(folder / name)

    return steps


def _levanter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_levanter(folder)


def _eformer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_eformer(folder, [{"path": "w", "shape": [2], "dtype": "float32"}])


def _jax(folder: Path) -> None:
    pytree_serialization.save({"w": jnp.ones(3)}, folder)


WRITERS: Final[Mapping[str, tuple[str, Callable[[Path], None]]]] = {
    "trees of Orbax": ("orbax", _tree),
    "checkpoints of Orbax 1": ("orbax", _version_1),
    "managers of Orbax": ("orbax", _manager),
    "old managers of Orbax": ("orbax", _without_metadata),
    "models of safetensors": ("safetensors", _safetensors),
    "runs of safetensors": ("safetensors", _steps_of(_safetensors, "checkpoint-100")),
    "checkpoints of levanter": ("levanter", _levanter),
    "runs of levanter": ("levanter", _steps_of(_levanter, "step-100")),
    "models of eformer": ("eformer", _eformer),
    "runs of eformer": ("eformer", _steps_of(_eformer, "run-100")),
    "trees of jax": ("jax", _jax),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the folder of a writer once; returns it."""
    root = tmp_path_factory.mktemp("written")

    def write(kind: str) -> Path:
        folder = root / kind.replace(" ", "-")
        if not folder.exists():
            WRITERS[kind][1](folder)
        return folder

    return write


@pytest.mark.parametrize("names", [("a", "b"), ("best",)], ids=["two", "one"])
@pytest.mark.parametrize("kind", sampled(WRITERS, every=3))
def test_a_folder_of_checkpoints_is_rejected_with_the_url_of_each(
    kind: str, names: tuple[str, ...], written: Callable[[str], Path], tmp_path: Path
) -> None:
    scheme = WRITERS[kind][0]
    for name in names:
        shutil.copytree(written(kind), tmp_path / "ckpts" / name)
    root = tmp_path / "ckpts"
    store.connect((tmp_path / "store").as_uri()).close()

    line = ("import", f"{scheme}:{root}", "a/b")
    assert refusal(f"{tmp_path}/store", *line).endswith(f"/{names[-1]}")
    for command, *to in ("ls",), ("import", "a/b", "--create"):
        text = refusal(f"{tmp_path}/s", command, f"{scheme}:{root}", *to)
        wanted = " or ".join(f"{scheme}:{root}/{name}" for name in names)
        assert text.endswith(f"use {wanted}")
    assert not (tmp_path / "s").exists()
    for name in names:
        assert 0 == storectl(NOWHERE, "ls", f"{scheme}:{root}/{name}").exit_code


@pytest.mark.parametrize("names", [("run_1", "run_2"), ("a_1", "b_1")])
@pytest.mark.parametrize("kind", [kind for kind in WRITERS if "managers" in kind])
def test_managers_whose_folders_look_like_steps_are_no_steps(
    kind: str, names: tuple[str, ...], written: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in names:
        shutil.copytree(written(kind), tmp_path / name)

    text = refusal(NOWHERE, "ls", f"orbax:{tmp_path}")

    assert "expected one step, got a folder of the checkpoints 100, 5" in text
    assert any(text.endswith(f"orbax:{tmp_path.as_uri()}/{name}") for name in names)


@pytest.mark.parametrize("kind", [kind for kind in WRITERS if "runs" in kind])
def test_runs_whose_folders_look_like_steps_are_no_steps(
    kind: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written(kind), tmp_path / "run-1")

    scheme = WRITERS[kind][0]
    text = refusal(NOWHERE, "ls", f"{scheme}:{tmp_path}")

    assert text.endswith(f"use {scheme}:{tmp_path}/run-1")


def test_checkpoints_of_two_formats_are_named_with_their_own(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(written("trees of Orbax"), tmp_path / "a")
    shutil.copytree(written("models of safetensors"), tmp_path / "b")

    for scheme in "orbax", "safetensors", "levanter", "eformer", "jax":
        text = refusal(NOWHERE, "ls", f"{scheme}:{tmp_path}")
        other = scheme if scheme == "eformer" else "safetensors"
        assert text.endswith(f"use orbax:{tmp_path}/a or {other}:{tmp_path}/b")


@pytest.mark.slow
@pytest.mark.emulated
def test_a_folder_of_checkpoints_in_a_bucket_is_rejected_too(
    written: Callable[[str], Path], tmp_path: Path, gcs: FakeGcs
) -> None:
    for name in "a", "b":
        shutil.copytree(written("trees of Orbax"), tmp_path / name)
    root = gcs_root()
    copy_to_bucket(tmp_path, root)

    with pytest.raises(store.NotFoundError) as raised:
        store.open_foreign(f"orbax:{root}")

    assert str(raised.value).endswith(f"use orbax:{root}/a or orbax:{root}/b")


def test_more_folders_than_an_error_can_name_are_cut(tmp_path: Path) -> None:
    for k in range(20):
        _safetensors(tmp_path / f"model-of-{k:02}")

    text = refusal(NOWHERE, "ls", f"safetensors:{tmp_path}")

    assert 5 == text.count(f"safetensors:{tmp_path}/model-of-")
    assert text.endswith("model-of-04, ...")


def test_a_step_of_items_without_metadata_is_opened(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    """Shows that not every folder of trees is rejected."""
    (tmp_path / "step").mkdir()
    for item in "params", "ema":
        shutil.copytree(written("trees of Orbax"), tmp_path / "step" / item)
        (tmp_path / "step" / item / "_CHECKPOINT_METADATA").unlink()

    run = store.open_foreign(f"orbax:{tmp_path / 'step'}")

    assert {"params/w", "ema/w"} == set(run.open().leaves)


def test_a_link_that_leads_out_is_not_searched(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpts" / "a").symlink_to(written("trees of Orbax"))

    with pytest.raises(store.StoreError) as raised:
        store.open_foreign(f"orbax:{tmp_path / 'ckpts'}")

    assert "; use orbax:" not in str(raised.value)
