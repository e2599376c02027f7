"""A URL with the wrong format leads to an error that names the right one."""

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from flax import serialization

import storesvc_client as store
from storesvc_client._foreign.formats import FORMATS
from tests.foreign.written_files import to_memory
from tests.support.old_checkpoints import write_old_checkpoints


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints of several projects."""
    folder = tmp_path_factory.mktemp("old")
    write_old_checkpoints(folder)
    return folder


RIGHT = {
    "llama": "orbax",
    "easydel": "eformer",
    "levanter": "levanter",
    "hf": "safetensors",
}

# Folders of eformer have the file by which levanter says that a step is finished, and
# may have files of safetensors.
ALIKE = {("levanter", "easydel"), ("safetensors", "easydel"), ("eformer", "hf")}


@pytest.mark.slow
def test_each_wrong_format_is_answered_with_the_right_one(old: Path) -> None:
    for folder, right in RIGHT.items():
        for wrong in set(RIGHT.values()) - {right}:
            if (wrong, folder) in ALIKE:
                continue
            with pytest.raises(
                store.NotFoundError, match=f"use .*{right}:{old}/{folder}"
            ):
                store.open_foreign(f"{wrong}:{old / folder}").steps()


def test_a_folder_of_no_format_names_none(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")

    with pytest.raises(store.NotFoundError) as caught:
        store.open_foreign(f"levanter:{tmp_path}").steps()

    assert "use " not in str(caught.value)


@pytest.mark.parametrize("place", ["file", "memory"])
@pytest.mark.parametrize("scheme", FORMATS)
def test_a_file_is_named_as_one_with_what_reads_it(
    scheme: str, place: str, tmp_path: Path
) -> None:
    url = str(tmp_path) if place == "file" else f"memory://{tmp_path.name}"
    weights = safetensors.numpy.save({"w": np.arange(3.0)})
    files = {
        "checkpoint_100": serialization.msgpack_serialize({"w": np.arange(3.0)}),
        "notes.txt": b"none",
        "weights": weights,
        "a/model.safetensors": weights,
        "a/config.json": b"{}",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    to_memory(files if place == "memory" else {}, url)

    def advice(name: str) -> str:
        with pytest.raises(store.NotFoundError) as caught:
            store.open_foreign(f"{scheme}:{url}/{name}").steps()
        start, file, found = str(caught.value).partition(
            ": expected a folder, got a file; "
        )
        assert file, start
        return found

    assert "flax.serialization.msgpack_restore" in advice("checkpoint_100")
    assert "only files of safetensors are read alone" in advice("notes.txt")
    assert "if it is one of safetensors, name it weights.saf" in advice("weights")
    name = "a/model.safetensors"
    alone = f"safetensors:{url}/{name}"
    if scheme != "safetensors":
        assert f"use {alone}" == advice(name)
    assert [0] == list(store.open_foreign(alone).steps())
    start, use, found = advice("a/config.json").partition("part of a checkpoint, use ")
    assert use, start
    for each in found.split(" or "):
        assert [0] == list(store.open_foreign(each).steps())


def test_what_flax_wrote_as_msgpack_is_saved_as_its_error_says(tmp_path: Path) -> None:
    data = serialization.msgpack_serialize({"w": np.arange(3.0)})
    with store.connect(f"file://{tmp_path}/store") as client:
        run = client.run("a/b")
        run.save(100, serialization.msgpack_restore(data)).result()
        assert [0.0, 1.0, 2.0] == run.restore()["w"].tolist()
