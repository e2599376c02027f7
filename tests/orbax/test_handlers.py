"""Custom handlers: what they write into a directory comes back from a store."""

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any

import grain.python as grain
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import args

import storesvc_client as store
from storesvc_client.orbax.items import pack_files, read_files
from tests.orbax.conftest import NewManager, commit


class TextHandler(ocp.CheckpointHandler):  # type: ignore[misc]  # no annotations
    """Keeps texts in files, as a handler of a user would."""

    def save(self, directory: Any, args: "TextSave") -> None:
        for name, text in args.item.items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    def restore(self, directory: Any, args: "TextRestore | None" = None) -> Any:
        found = {
            str(path.relative_to(directory)): path.read_text()
            for path in Path(directory).rglob("*")
            if path.is_file()
        }
        return {name: found[name] for name in found if name != "commit_success.txt"}


@ocp.args.register_with_handler(TextHandler, for_save=True)
@dataclasses.dataclass
class TextSave(ocp.args.CheckpointArgs):  # type: ignore[misc]  # no annotations
    item: dict[str, str]


@ocp.args.register_with_handler(TextHandler, for_restore=True)
@dataclasses.dataclass
class TextRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]  # no annotations
    pass


TEXTS = {"a.txt": "one", "deep/b.txt": "two", "empty": ""}


def test_a_registered_handler_reads_what_it_wrote(new_manager: NewManager) -> None:
    manager = new_manager()
    state = args.StandardSave({"w": jnp.ones(1)})
    commit(manager, 1, args.Composite(state=state, notes=TextSave(TEXTS)))
    found = manager.restore(1, args=args.Composite(notes=TextRestore()))
    assert found.notes == TEXTS


def test_a_handler_of_an_item_needs_no_argument(new_manager: NewManager) -> None:
    manager = new_manager(item_names=("notes",), item_handlers={"notes": TextHandler()})
    commit(manager, 1, args.Composite(notes=TextSave(TEXTS)))
    assert manager.restore(1).notes == TEXTS


def test_the_file_of_a_handler_exists(new_manager: NewManager) -> None:
    manager = new_manager()
    commit(manager, 1, args.Composite(notes=TextSave(TEXTS)))
    path = manager.directory / "1" / "notes"
    assert (path / "a.txt").exists()
    assert (path / "deep" / "b.txt").exists()
    assert not (path / "c.txt").exists()


def batches() -> Any:
    return iter(grain.MapDataset.range(10).to_iter_dataset())


def test_an_iterator_of_grain_goes_on_where_it_was(new_manager: NewManager) -> None:
    manager = new_manager()
    iterator = batches()
    passed = [next(iterator) for _ in range(3)]
    commit(manager, 1, args.Composite(iter=grain.PyGrainCheckpointSave(iterator)))
    assert (manager.directory / "1" / "iter" / "process_0-of-1.json").exists()
    again = batches()
    restored = grain.PyGrainCheckpointRestore(again)
    found = manager.restore(1, args=args.Composite(iter=restored)).iter
    assert (passed, [*found]) == ([0, 1, 2], [*range(3, 10)])


def test_names_of_items_that_differ_only_in_signs_stay_apart(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    given = {"my_notes": "a", "my.notes": "b", "orbax": "c", "_1": "d"}
    saves = {name: TextSave({"x": text}) for name, text in given.items()}
    commit(manager, 1, args.Composite(**saves))
    found = manager.restore(
        1, args=args.Composite(**dict.fromkeys(given, TextRestore()))
    )
    assert {name: found[name]["x"] for name in given} == given


def test_what_a_handler_fails_with_leaves_the_run_as_it_was(
    our_manager: NewManager,
) -> None:
    manager = our_manager()
    with pytest.raises(TypeError):
        manager.save(1, args=args.Composite(notes=TextSave({"x": 3})))
    assert manager.all_steps() == []


def test_equal_files_are_equal_bytes(tmp_path: Path) -> None:
    packed = []
    for name in ("first", "second"):
        folder = tmp_path / name
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "b").write_text("two")
        (folder / "a").write_text("one")
        packed.append(pack_files("item", folder))
    assert packed[0] == packed[1]


def archive(
    *entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as made:
        for name, contents in entries:
            made.writestr(zipfile.ZipInfo(name), contents, compression)
    return data.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"no archive",
        archive(("../out", b"x")),
        archive(("/out", b"x")),
        archive(("a/../../out", b"x")),
        archive(("a\\b", b"x")),
        archive(("a/", b"")),
        archive(("a", b"x"), ("a/b", b"y")),
        archive(("a", b"x" * 100), compression=zipfile.ZIP_DEFLATED),
        archive(("a", b"some contents")).replace(b"some contents", b"other content"),
        archive(("a", b"x"))[:-30],
    ],
    ids=[
        "no-archive",
        "above",
        "absolute",
        "above-a-folder",
        "backslash",
        "folder",
        "below-a-file",
        "compressed",
        "checksum",
        "cut",
    ],
)
def test_a_hostile_archive_is_damage(data: bytes) -> None:
    with pytest.raises(store.DataLossError, match="item"):
        read_files("item", [data])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name_are_rejected() -> None:
    with pytest.raises(store.DataLossError, match="two of one name"):
        read_files("item", [archive(("a", b"x"), ("a", b"y"))])


def test_processes_that_saved_other_files_of_one_name_are_rejected() -> None:
    first, second = archive(("a", b"x")), archive(("a", b"y"))
    assert read_files("item", [first, first]) == {"a": b"x"}
    with pytest.raises(store.MismatchError, match="'a'"):
        read_files("item", [first, second])


def test_a_link_of_a_handler_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(store.InvalidRequestError, match="'link'"):
        pack_files("item", tmp_path)
