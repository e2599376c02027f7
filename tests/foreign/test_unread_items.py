"""One item of a step of Orbax that cannot be read hides no other, and is named with its
reason; an import is rejected unless the item is left out by name."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import orbax.checkpoint as ocp
import pytest

import storesvc_client as store
from storesvc_client.errors import DataLossError
from tests.support.command_line import document, printed, refusal, storectl
from tests.support.examples import sampled

NOWHERE: Final = "127.0.0.1:1"
"""A store that is not there: no command that reads needs one."""

TREE: Final = {"w": np.arange(6.0), "b": np.ones(2, np.float32)}


def _custom(folder: Path, count: int) -> None:
    """Writes files as a handler of a user would."""
    (folder / "sub").mkdir(parents=True)
    for k in range(count):
        (folder / f"part_{k}.bin").write_bytes(bytes([k]))
    (folder / "sub" / "state.pkl").write_bytes(pickle.dumps({"a": 1}))


def _rewritten(path: str, data: bytes) -> Callable[[Path], object]:
    return lambda step: (step / path).write_bytes(data)


def _linked_out(step: Path) -> None:
    shutil.rmtree(step / "ema")
    (step / "ema").symlink_to("/etc")


def _some_states(step: Path) -> None:
    (step / "data").mkdir()
    (step / "data" / "process_1-of-2.json").write_text("{}")


def _same_names(step: Path) -> None:
    _custom(step / "my-state", 1)
    _custom(step / "my_state", 1)


DAMAGE: Final[dict[str, tuple[str, str, Callable[[Path], object]]]] = {
    "metadata that is no JSON": ("ema", "JSON", _rewritten("ema/_METADATA", b"{")),
    "no metadata": ("ema", "_METADATA", lambda d: (d / "ema/_METADATA").unlink()),
    "manifest of zeros": (
        "ema",
        "missing or damaged",
        _rewritten("ema/manifest.ocdbt", bytes(64)),
    ),
    "an unknown type": (
        "ema",
        "of the types",
        lambda d: (d / "ema/_METADATA").write_text(
            (d / "ema/_METADATA").read_text().replace("np.ndarray", "os.system")
        ),
    ),
    "a link out": ("ema", "link", _linked_out),
    "a text that is no JSON": (
        "model_config",
        "JSON",
        _rewritten("model_config/metadata", b"["),
    ),
    "states of some processes": ("data", "processes", _some_states),
    "too many files": ("mine", "at most 64", lambda d: _custom(d / "mine", 80)),
    "an axis that is no Unicode": (
        "ema",
        "UnicodeEncodeError",
        _rewritten(
            "ema/_sharding",
            json.dumps(
                {
                    "dw==": '{"sharding_type": "NamedSharding", "shape": [1], '
                    '"axis_names": ["\\ud800"], "partition_spec": []}'
                }
            ).encode(),
        ),
    ),
    "names that become one": ("my_state", "of its own", _same_names),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a manager with a step of three items."""
    folder = tmp_path_factory.mktemp("composite") / "run"
    with ocp.CheckpointManager(folder) as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                items=ocp.args.PyTreeSave(TREE),
                ema=ocp.args.StandardSave({"w": TREE["w"] / 2}),
                model_config=ocp.args.JsonSave({"layers": 1}),
            ),
        )
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which a test may change."""
    return shutil.copytree(whole, tmp_path / "run")


@pytest.fixture
def damaged(copied: Path) -> Callable[[str], str]:
    """Returns the URL of the copy with one kind of damage."""

    def damage(kind: str) -> str:
        DAMAGE[kind][2](copied / "3")
        return f"orbax:{copied}"

    return damage


@pytest.mark.parametrize("kind", DAMAGE)
def test_storectl_shows_the_other_items_and_names_the_one_that_is_not_read(
    kind: str, damaged: Callable[[str], str]
) -> None:
    url = damaged(kind)
    name, reason, _ = DAMAGE[kind]
    for command, path in ("ls", url), ("ls", f"{url}@3"), ("tree", f"{url}@3"):
        result = storectl(NOWHERE, command, path)
        assert 0 == result.exit_code, result.stderr
        assert f"not read: {name}: " in result.stderr
        assert reason in result.stderr
        assert 1 == result.stderr.count("\n")
    assert "items" in printed(NOWHERE, "tree", f"{url}@3")
    assert f"not read   {name}: " in printed(NOWHERE, "stat", f"{url}@3")
    for command in "stat", "tree":
        found = document(NOWHERE, command, f"{url}@3")
        assert [name] == list(found["unread"])
        assert reason in found["unread"][name]
    assert [name] == list(document(NOWHERE, "ls", url)[0]["unread"])
    assert 2.5 == document(NOWHERE, "get", f"{url}@3:items/w")[0]["mean"]


def test_names_that_are_no_utf_8_are_imported_with_escapes_in_their_labels(
    copied: Path, tmp_path: Path
) -> None:
    mine = copied / "3/mine"
    mine.mkdir()
    (mine / "a.bin").write_bytes(b"a")
    (mine / os.fsdecode(b"caf\xe9.bin")).write_bytes(b"b")
    with store.connect(f"file://{tmp_path}/store") as client:
        (done,) = client.run("a/b").import_from(f"orbax:{tmp_path}/run")
        labels = done.checkpoint.labels
        assert "mine/caf\\udce9.bin" == labels["orbax.item.mine-caf-bin"]
        assert b"b" == client.run("a/b").items(3)["mine-caf-bin"]


def test_a_tree_whose_name_is_no_utf_8_hides_no_other_and_is_left_out_by_name(
    copied: Path, tmp_path: Path
) -> None:
    name = os.fsdecode(b"caf\xe9")
    (copied / "3/ema").rename(copied / "3" / name)
    url = f"orbax:{copied}"
    assert [name] == list(store.open_foreign(url).checkpoint(3).unread)
    with store.connect(f"file://{tmp_path}/store") as client:
        with pytest.raises(DataLossError, match="expected Unicode"):
            list(client.run("a/b").import_from(url))
        without = store.open_foreign(url, without=[name])
        (done,) = client.run("a/b").import_from(without)
        assert "caf\\udce9" == done.checkpoint.labels["orbax.without"]


@pytest.mark.parametrize("kind", sampled(DAMAGE, every=3))
def test_an_import_is_rejected_whole_unless_the_item_is_left_out_by_name(
    kind: str, damaged: Callable[[str], str], tmp_path: Path
) -> None:
    url, root = damaged(kind), str(tmp_path / "store")
    name, reason, _ = DAMAGE[kind]
    store.connect(f"file://{root}").close()

    text = refusal(root, "import", url, "a/b")
    assert f"--without {name}" in text
    assert reason in text
    assert [] == document(root, "ls")
    assert printed(root, "import", url, "a/b", "--without", name).startswith("a/b@3")
    again = printed(root, "import", url, "a/b", "--without", name)
    assert "a/b@3: was there already\n" == again

    (found,) = document(root, "ls", "a/b")
    assert name == found["labels"]["orbax.without"]
    with store.connect(f"file://{root}") as client:
        run = client.run("a/b")
        restored = run.restore(3, select="items/**")["items"]
        assert TREE["w"].tobytes() == np.asarray(restored["w"]).tobytes()
        assert run.verify().ok
        assert (name == "ema") == ("ema/w" not in run.open(3).leaves)


def test_a_restore_of_all_is_rejected_and_one_of_readable_items_is_not(
    damaged: Callable[[str], str],
) -> None:
    run = store.open_foreign(damaged("manifest of zeros"))
    like = {"items": TREE}
    assert TREE["w"].tolist() == run.restore(like=like)["items"]["w"].tolist()
    chosen = run.restore(select="items/**")
    assert TREE["w"].tolist() == np.asarray(chosen["items"]["w"]).tolist()
    for target in (None, "error"), ({**like, "ema": {"w": TREE["w"]}}, "keep"):
        with pytest.raises(store.DataLossError, match="item ema, which cannot"):
            run.restore(like=target[0], missing=target[1])
    with pytest.raises(store.MismatchError, match="not read: the item ema"):
        run.restore(like={**like, "ema": {"w": TREE["w"]}})
    with pytest.raises(store.NotFoundError, match="not read: the item ema"):
        run.restore(select="ema/**")
    assert "the item ema of" in refusal(NOWHERE, "get", f"{run.name}@3:ema/w")


def test_a_document_that_cannot_be_read_is_an_error_only_where_it_is_asked_for(
    damaged: Callable[[str], str],
) -> None:
    run = store.open_foreign(damaged("a text that is no JSON"))
    assert {"items", "ema"} == set(run.restore())
    items = run.items()
    assert "model-config" not in items
    for read in items.__getitem__, items.get:
        with pytest.raises(store.DataLossError, match="metadata: expected JSON"):
            read("model-config")


def test_keys_do_not_depend_on_damage_of_another_item(copied: Path) -> None:
    step = copied / "3"
    (step / "items").rename(step / "default")
    run = store.open_foreign(f"orbax:{copied}")
    keys = {key for key in run.open().leaves if key.startswith("default/")}
    (step / "ema" / "_METADATA").unlink()
    assert keys == set(run.open().leaves)
    without = store.open_foreign(run.name, without=["ema"])
    assert keys == set(without.open().leaves)


def test_a_step_without_any_item_that_can_be_read_is_its_first_error(
    damaged: Callable[[str], str],
) -> None:
    url = damaged("manifest of zeros")
    step = Path(url.removeprefix("orbax:")) / "3"
    (step / "items" / "_METADATA").write_text("{")
    (step / "model_config" / "metadata").write_text("{")
    with pytest.raises(store.DataLossError, match="run/3/ema"):
        store.open_foreign(url).open()


def test_files_of_a_handler_that_is_not_known_are_items(copied: Path) -> None:
    _custom(copied / "3" / "mine", 1)
    run = store.open_foreign(f"orbax:{copied}")
    expected = {"model-config", "mine-part-0-bin", "mine-sub-state-pkl"}
    assert expected == set(run.items())
    assert pickle.dumps({"a": 1}) == run.items()["mine-sub-state-pkl"]
    assert {} == run.checkpoint().unread


def test_one_damaged_step_does_not_hide_the_others_of_a_list(copied: Path) -> None:
    shutil.copytree(copied / "3", copied / "4")
    (copied / "4" / "_CHECKPOINT_METADATA").write_text("{")
    result = storectl(NOWHERE, "ls", f"orbax:{copied}")
    assert (1, True) == (result.exit_code, "4/_CHECKPOINT_METADATA" in result.stderr)
    assert ["3"] == [line.split()[0] for line in result.stdout.splitlines()[1:]]


@pytest.mark.parametrize(
    ("url", "names", "error", "message"),
    [
        ("orbax:{0}", ["emma"], store.NotFoundError, "emma, got ema, items, model_co"),
        ("orbax:{0}/3/items", ["ema"], store.NotFoundError, "got one tree"),
        ("levanter:{0}", ["ema"], store.InvalidRequestError, "of Orbax only"),
        ("orbax:{0}", 7, store.InvalidRequestError, "expected texts"),
    ],
)
def test_an_item_that_cannot_be_left_out_is_an_error(
    url: str, names: Any, error: type[Exception], message: str, whole: Path
) -> None:
    with pytest.raises(error, match=message):
        store.open_foreign(url.format(whole), without=names).open()
