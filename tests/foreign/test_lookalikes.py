"""A URL with the wrong format leads to an error that names the right one."""

from pathlib import Path

import pytest

import storesvc_client as store
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
