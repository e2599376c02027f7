"""Paths and globs of storectl: what they match and reject."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.format.keys import join_key
from storesvc.format.names import InvalidNameError
from storesvc_client._values.key_patterns import keys_below, matching_keys, nearest_keys
from storesvc_client.cli.paths import (
    CheckpointPath,
    LeafPath,
    NamespacePath,
    RunPath,
    parse_path,
    parse_target,
)

KEYS = [
    "opt_state/0/mu/blocks/0/kernel",
    "params/blocks/0/attn/kernel",
    "params/blocks/0/bias",
    "params/blocks/10/attn/kernel",
    "params/embed/embedding",
    "params/kernel",
    "step",
]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("step", ["step"]),
        ("params/*", ["params/kernel"]),
        ("params/*/embedding", ["params/embed/embedding"]),
        ("params/**/bias", ["params/blocks/0/bias"]),
        ("params/**/kernel", [KEYS[1], KEYS[3], KEYS[5]]),
        ("**/kernel", [KEYS[0], KEYS[1], KEYS[3], KEYS[5]]),
        ("**/0/**/kernel", [KEYS[0], KEYS[1]]),
        ("params/blocks/?/**", [KEYS[1], KEYS[2]]),
        ("params/blocks/[1-9]*/**", [KEYS[3]]),
        ("params/[!b]*/*", ["params/embed/embedding"]),
        ("**", KEYS),
        ("**/**", KEYS),
        ("step/**", ["step"]),
        ("params", []),
        ("Params/**", []),
        ("*", ["step"]),
    ],
)
def test_a_glob_names_leaves_part_by_part(glob: str, expected: list[str]) -> None:
    assert expected == matching_keys(glob, KEYS)


def test_a_key_with_the_letters_of_a_glob_names_itself() -> None:
    keys = ["a[0]", "a0", "**", "x/*"]

    assert [["a[0]"], ["**"], ["x/*"]] == [
        matching_keys(key, keys) for key in ("a[0]", "**", "x/*")
    ]


def test_the_empty_glob_names_the_tree_that_is_one_leaf() -> None:
    assert [""] == matching_keys("", [""])
    assert [""] == matching_keys("**", [""])
    assert [] == matching_keys("", KEYS)


def test_stars_in_a_key_match_literally() -> None:
    assert ["a/**/**/b"] == matching_keys("a/?*/?*/b", ["a/**/**/b", "a/b"])


@given(st.lists(st.text(max_size=4), min_size=1, max_size=5))
def test_every_key_is_found_by_itself_and_among_all(parts: list[str]) -> None:
    key = join_key(parts)

    assert [key] == matching_keys(key, [key, "other/leaf"][:1])
    assert [key] == matching_keys("**", [key])
    assert [key] == matching_keys("/".join("*" * len(key.split("/"))), [key])


@given(st.text("ab*?[]!/", max_size=12), st.lists(st.text("ab/", max_size=8)))
def test_a_glob_names_nothing_that_is_not_there(glob: str, keys: list[str]) -> None:
    assert set(matching_keys(glob, keys)) <= set(keys)


def test_many_stars_are_matched_in_no_time() -> None:
    key = "/".join("ab" * 20)

    assert [] == matching_keys("**/a/" * 8 + "x", [key] * 20)


def test_the_nearest_keys_are_those_that_look_alike() -> None:
    assert "params/embed/embedding" == nearest_keys("params/embed/embeding", KEYS)[0]
    assert [] == nearest_keys("zzzz", KEYS)


def test_the_keys_below_a_subtree_are_its_leaves() -> None:
    assert KEYS[1:4] == keys_below("params/blocks", KEYS)
    assert KEYS[1:4] == keys_below("params/blocks/", KEYS)
    assert [] == keys_below("params/block", KEYS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prod", NamespacePath("prod")),
        ("prod/llama-8b", RunPath("prod/llama-8b")),
        ("prod/llama-8b@latest", CheckpointPath("prod/llama-8b", "latest")),
        ("prod/llama-8b@0", CheckpointPath("prod/llama-8b", 0)),
        (
            "prod/llama-8b@7:params/**/kernel",
            LeafPath(CheckpointPath("prod/llama-8b", 7), "params/**/kernel"),
        ),
        ("a/b@7:", LeafPath(CheckpointPath("a/b", 7), "")),
        ("a/b@7:x:y@z", LeafPath(CheckpointPath("a/b", 7), "x:y@z")),
    ],
)
def test_a_path_narrows_from_left_to_right(text: str, expected: object) -> None:
    path = parse_path(text)

    assert expected == path
    assert text == str(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "prod.",
        "prod/",
        "prod/a/b",
        "prod/llama:params",
        "prod@latest",
        "prod/llama@",
        "prod/llama@Latest",
        "prod/llama@-1",
        "prod/llama@007",
        "prod/llama@9223372036854775808",
        "prod/../llama",
    ],
)
def test_a_path_that_nothing_can_have_is_rejected_with_the_rule(text: str) -> None:
    with pytest.raises(InvalidNameError, match="expected"):
        parse_path(text)


@pytest.mark.parametrize(
    "target", ["127.0.0.1:7070", "[::1]:7070", "file:///ckpts", "gs://bucket/prefix"]
)
def test_a_store_stays_as_it_was_typed(target: str) -> None:
    assert target == parse_target(target)


@pytest.mark.parametrize(
    ("typed", "target"),
    [
        ("/ckpts", "file:///ckpts"),
        ("/with space/100%", "file:///with%20space/100%25"),
        ("./ckpts", f"{Path.cwd().as_uri()}/ckpts"),
        ("..", Path.cwd().parent.as_uri()),
        ("~/ckpts", f"{Path.home().as_uri()}/ckpts"),
    ],
)
def test_a_path_is_a_root(typed: str, target: str) -> None:
    assert target == parse_target(typed)


@pytest.mark.parametrize(
    ("typed", "target"),
    [
        ("ckpt.example", "ckpt.example:7070"),
        ("10.0.0.1,10.0.0.2:7171", "10.0.0.1:7070,10.0.0.2:7171"),
        ("[::1]", "[::1]:7070"),
    ],
)
def test_a_server_without_a_port_has_the_one_of_serve(typed: str, target: str) -> None:
    assert target == parse_target(typed)


@pytest.mark.parametrize("typed", ["", "a:", "a:b", "me@a", "a/b", "[::1", "a:99999"])
def test_an_invalid_server_is_passed_unchanged_to_connect(typed: str) -> None:
    assert typed == parse_target(typed)


def test_a_store_that_no_command_can_work_with_is_rejected() -> None:
    with pytest.raises(InvalidNameError, match="expected host:port"):
        parse_target("memory://")
