"""Keys: one path, one key; hostile names stay in their place."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.keys import (
    InvalidKeyError,
    check_keys,
    escape_part,
    join_key,
    split_key,
    unescape_part,
)
from storesvc.format.names import (
    CheckpointName,
    InvalidNameError,
    RunName,
    TagName,
    UploadName,
)

HOSTILE = [
    *("", ".", "..", "../x", "/abs", "a//b", "a/./b", "\\..\\", "%2e%2e%2f", "%25"),
    *("%", "%2F", "a/b", "a.b", "a b", " ", "\n", "\t", "\x00", "\x7f", "é", "e\u0301"),
    *("\u202eabc", ".__lock", "con", "zarr.json", "c", "0", "x" * 300, "Ω" * 100),
]
TEXTS = st.text(st.characters(codec="utf-8"))


@given(parts=st.lists(TEXTS, max_size=5))
def test_a_key_gives_its_path_back(parts: list[str]) -> None:
    assert tuple(parts) == split_key(join_key(parts))


@given(part=TEXTS)
def test_an_escaped_part_is_a_plain_file_name(part: str) -> None:
    escaped = escape_part(part)

    assert escaped not in ("", ".", "..")
    assert not any(c == "/" or c < " " or c == "\x7f" for c in escaped)


@given(text=TEXTS)
def test_only_escapes_are_unescaped(text: str) -> None:
    try:
        part = unescape_part(text)
    except InvalidKeyError:
        return
    assert text == escape_part(part)


@pytest.mark.parametrize("text", ["%2f", "a%", "%2", "..", ".", "a/b", "%41", "%%"])
def test_what_no_part_escapes_to_is_rejected(text: str) -> None:
    with pytest.raises(InvalidKeyError):
        unescape_part(text)


def test_a_lone_surrogate_is_rejected_by_name() -> None:
    with pytest.raises(InvalidKeyError, match=r"'a/\\ud800'.*surrogate"):
        join_key(["a", "\ud800"])


def test_a_long_key_is_rejected_with_its_size() -> None:
    with pytest.raises(InvalidKeyError, match="4096 bytes, got 4097"):
        join_key(["x" * 4097])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["b", "a"], "'a': expected keys in strictly ascending order"),
        (["a", "a"], "'a': expected keys in strictly ascending order"),
        (["a", "a!", "a/b"], "'a/b' is below the leaf 'a'"),
        (["", "a"], "'a' is below the leaf ''"),
    ],
)
def test_keys_that_are_not_those_of_a_tree_are_rejected(
    keys: list[str], message: str
) -> None:
    with pytest.raises(InvalidKeyError, match=message):
        check_keys(keys)


def test_hostile_names_come_back_and_stay_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "inner" / "store"
    tree: dict[str, Any] = {
        name: {"inner": np.array([i])} for i, name in enumerate(HOSTILE)
    }
    tree["seq"] = [np.arange(2), {"a/b": np.arange(3)}]
    with store.connect(root.as_uri()) as client:
        run = client.run("tests/hostile")
        run.save(0, tree).result()
        back = run.restore(0)

    assert str(jax.tree.structure(tree)) == str(jax.tree.structure(back))
    assert jax.tree.all(jax.tree.map(np.array_equal, tree, back))
    assert ["inner"] == [path.name for path in tmp_path.iterdir()]
    assert ["store"] == [path.name for path in (tmp_path / "inner").iterdir()]


class Odd:
    """A container whose children have paths of one key."""

    def __init__(self, *children: Any) -> None:
        self.children = children


jax.tree_util.register_pytree_with_keys(
    Odd,
    lambda odd: (
        [
            (jax.tree_util.DictKey(key), child)
            for key, child in zip((0, "0"), odd.children, strict=True)
        ],
        None,
    ),
    lambda _, children: Odd(*children),
)


def test_two_paths_of_one_key_are_rejected_naming_both(run: store.Run) -> None:
    with pytest.raises(
        store.UnsupportedLeafError, match=r"\['a'\]\[0\] and \['a'\]\['0'\].*'a/0'"
    ):
        run.save(0, {"a": Odd(1, 2)})


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({0: 1, "0": 2}, "^the tree: expected dict keys .*, got keys of int and str; "),
        (
            {"a": [3, {1j: 1, 2j: 2}]},
            r"^\['a'\]\[1\]: expected .*, got keys of complex;",
        ),
        (
            {"a": Odd({"b": 1, None: 2}, 1)},
            r"^\['a'\]\[0\]: .*keys of NoneType and str;",
        ),
    ],
    ids=["the tree", "list", "class"],
)
def test_dict_keys_that_jax_cannot_order_are_rejected_with_their_dict(
    run: store.Run, tree: Any, match: str
) -> None:
    run.save(0, {"a": 1}).result()  # its plan would be used again for the same tree

    for _ in range(2):
        with pytest.raises(store.UnsupportedLeafError, match=match):
            run.save(1, tree)
    with pytest.raises(store.UnsupportedLeafError, match=match):
        run.restore(0, like=tree)


def test_a_tree_that_contains_itself_is_rejected(run: store.Run) -> None:
    tree: list[Any] = []
    tree.append(tree)

    for step in (0, 1):
        with pytest.raises(
            store.UnsupportedLeafError, match="one that contains itself"
        ):
            run.save(step, {"a": tree})
        run.save(step, {"a": 1}).result()


@pytest.mark.parametrize(
    "text",
    [
        *("", "a", "a/b/c", "-a/b", "a/b-", "../x", "a/..", "a/b..c", "a/.b", "a/b."),
        *("a/_b", "a/b_", "a/b._c", "a/b.-c", "a/" + "b" * 64, "a /b", "a/b\n", "é/b"),
        *("a%2f/b", "a/b.__lock"),
    ],
)
def test_names_that_break_the_rules_are_rejected(text: str) -> None:
    with pytest.raises(InvalidNameError):
        RunName.parse(text)


@pytest.mark.parametrize(
    "text",
    [*("a/b", "Prod/Llama_3.1", "0/1", "a_b/c", "a/b--c", "a/v1.2.3", "a/" + "B" * 63)],
)
def test_names_of_models_and_of_other_tools_are_names(text: str) -> None:
    name = RunName.parse(text)

    assert text == str(name)
    assert name == RunName.from_resource(name.resource)
    assert name == layout.parse_run_record(layout.run_record(name))


@pytest.mark.parametrize(
    ("text", "similar"), [("a/Llama 3.1 (8B)", "Llama-3-1-8B"), ("a/x..y", "x-y")]
)
def test_a_rejected_name_gets_one_that_is_valid(text: str, similar: str) -> None:
    with pytest.raises(InvalidNameError, match=f", such as '{similar}'$"):
        RunName.parse(text)
    RunName.parse(f"a/{similar}")


@pytest.mark.parametrize("tag", ["Latest", "LATEST", "1a", "a..b"])
def test_tags_that_break_the_rules_are_rejected(tag: str) -> None:
    with pytest.raises(InvalidNameError):
        TagName(RunName("a", "b"), tag)


@pytest.mark.parametrize(
    "resource",
    [
        *("namespaces/a/runs/b/checkpoints/01", "namespaces/a/runs/b/checkpoints/-1"),
        *("namespaces/a/runs/b/checkpoints/", "namespaces/a/runs/b/checkpoints/9e3"),
        *("namespaces/a/runs/../checkpoints/1", "a/b@1", "namespaces/a/runs/b"),
        f"namespaces/a/runs/b/checkpoints/{2**63}",
    ],
)
def test_checkpoint_names_that_break_the_rules_are_rejected(resource: str) -> None:
    with pytest.raises(InvalidNameError):
        CheckpointName.from_resource(resource)


@pytest.mark.parametrize("upload", ["", "x", "../" * 10 + "ab", "A" * 32, "a" * 33])
def test_upload_names_that_break_the_rules_are_rejected(upload: str) -> None:
    with pytest.raises(InvalidNameError):
        UploadName.from_resource(f"namespaces/a/runs/b/uploads/{upload}")
