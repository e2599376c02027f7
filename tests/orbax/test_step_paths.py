"""Paths below ``manager.directory`` read as the paths of Orbax do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint import args

import storesvc_client as store
import storesvc_client.orbax as store_orbax
from tests.orbax.conftest import NewManager, commit
from tests.orbax.test_handlers import TextRestore, TextSave

TREE = {"w": np.arange(4.0, dtype=np.float32)}
FILES = {
    "process_0-of-2.json": '{"next": 7}',
    "process_1-of-2.json": '{"next": 8}',
    "deep/notes.txt": "words, and ü",
}


@pytest.fixture
def manager(new_manager: NewManager) -> Any:
    """A manager with a step of a tree, and of files that a handler wrote."""
    made = new_manager()
    items = args.Composite(state=args.StandardSave(TREE), iter=TextSave(FILES))
    commit(made, 100, items)
    return made


def test_files_are_found_by_a_pattern(manager: Any) -> None:
    path = manager.directory / "100" / "iter"
    found = sorted(path.glob("process_*-of-*.json"))
    assert [each.name for each in found] == [*FILES][:2]
    assert [json.loads(each.read_text())["next"] for each in found] == [7, 8]
    assert [each.name for each in path.glob("*/*.txt")] == ["notes.txt"]
    assert [*path.glob("other*")] == []
    assert [each.name for each in manager.directory.glob("1*/iter")] == ["iter"]
    assert [*(manager.directory / "7").glob("*")] == []


def test_a_file_reads_as_a_file(manager: Any) -> None:
    path = manager.directory / "100" / "iter" / "deep" / "notes.txt"
    assert (path.exists(), path.is_file(), path.is_dir()) == (True, True, False)
    assert path.read_text() == FILES["deep/notes.txt"]
    assert path.read_bytes() == FILES["deep/notes.txt"].encode()
    with path.open() as text, path.open("rb") as data:
        assert text.read().encode() == data.read()
    found = path.stat()
    assert (found.is_directory, found.length) == (False, len(path.read_bytes()))
    assert found.mtime > 0
    assert path.parent.stat().is_directory
    assert (path.parent.name, int(path.parent.parent.parent.name)) == ("deep", 100)


def test_folders_list_what_is_in_them(manager: Any) -> None:
    item = manager.directory / "100" / "iter"
    assert {each.name for each in item.iterdir()} >= {"deep", *[*FILES][:2]}
    assert [each.name for each in (item / "deep").iterdir()] == ["notes.txt"]
    assert [each.is_dir() for each in (item, item / "deep", item / "none")] == [
        *(True, True, False)
    ]
    assert "100" in {each.name for each in manager.directory.iterdir()}


def test_what_is_not_there_is_a_missing_file(manager: Any) -> None:
    path = manager.directory / "100" / "iter" / "none.json"
    assert [path.exists(), path.is_file(), path.is_dir()] == [False] * 3
    for read in (path.read_text, path.read_bytes, path.open, path.stat):
        with pytest.raises(FileNotFoundError, match=r"none\.json"):
            read()
    with pytest.raises(FileNotFoundError):
        list(path.iterdir())


def test_a_step_is_not_written_through_its_path(our_manager: NewManager) -> None:
    manager = our_manager()
    commit(manager, 1, args.Composite(notes=TextSave(FILES)))
    path = manager.directory / 1 / "notes" / "deep" / "notes.txt"
    with pytest.raises(store.InvalidRequestError, match="written once"):
        path.open("w")
    with pytest.raises(TypeError):
        epath.Path(path)
    found = (manager.directory / 1).rglob("*.txt")
    assert [each.name for each in found] == ["notes.txt"]
    assert manager.directory.stat().is_directory


class NamedHandler(ocp.CheckpointHandler):  # type: ignore[misc]  # no annotations
    """Reads the step and the item of the folder that it is given."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "folder").write_text(f"{directory.parent.name} {directory.name}")

    def restore(self, directory: Any, args: Any = None) -> Any:
        saved = Path(directory, "folder").read_text()
        return saved, f"{directory.parent.name} {directory.name}"


@ocp.args.register_with_handler(NamedHandler, for_save=True)
class NamedSave(ocp.args.CheckpointArgs):  # type: ignore[misc]  # no annotations
    pass


@ocp.args.register_with_handler(NamedHandler, for_restore=True)
class NamedRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]  # no annotations
    pass


def test_the_folder_of_a_handler_is_named_as_the_step(our_manager: NewManager) -> None:
    manager = our_manager()  # Orbax's has the name of a temporary folder at a save
    items = {"iter": NamedSave(), "../out": NamedSave()}
    commit(manager, 100, args.Composite(**items))
    found = manager.restore(
        100, args=args.Composite(**dict.fromkeys(items, NamedRestore()))
    )
    assert found["iter"] == ("100 iter", "100 iter")
    assert found["../out"] == ("100 out", "100 out")


def test_files_of_another_handler_come_back(manager: Any) -> None:
    found = manager.restore(100, args=args.Composite(iter=TextRestore()))
    assert found.iter == FILES


def test_every_public_name_is_there() -> None:
    """Each name of the package is found where the package looks for it."""
    assert store_orbax.__all__ == [
        getattr(store_orbax, name).__name__ for name in store_orbax.__all__
    ]
