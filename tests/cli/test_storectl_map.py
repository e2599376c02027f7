"""``storectl map``: whether rules fit a checkpoint, and what they make of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import storesvc_client as store
from tests.support.command_line import document, printed, refusal, table

RULES = """
version = 1

[[rules]]
from = "model/layers/{n:int}/w"
to = "params/w"
operations = [{transpose = [1, 0]}, {stack = {axis = 0, by = "n"}}]

[[rules]]
from = "model/embed"
to = "params/embed"

[[rules]]
from = "step"
drop = true
"""


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server with a model of three layers."""
    layers = {str(n): {"w": np.ones((4, 6), np.float32)} for n in range(3)}
    model = {"embed": np.zeros((8, 4), np.float32), "layers": layers}
    with store.connect(server_address) as client:
        client.run("mapped/tiny").save(20, {"model": model, "step": 20}).result()
    return server_address


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """A file of rules that fit."""
    (tmp_path / "rules.toml").write_text(RULES)
    return str(tmp_path / "rules.toml")


def test_rules_that_fit_are_counted(address: str, rules: str) -> None:
    text = printed(address, "map", "check", rules, "mapped/tiny@latest")
    found = document(address, "map", "check", rules, "mapped/tiny@20")

    assert "mapped/tiny@20: 2 leaves of 5 leaves, 1 dropped\n" == text
    assert {
        "name": "mapped/tiny@20",
        "source_leaf_count": 5,
        "leaf_count": 2,
        "dropped": ["step"],
        "size_bytes": 4 * (3 * 24 + 32),
    } == found


def test_the_leaves_are_shown_with_what_they_are_made_of(
    address: str, rules: str
) -> None:
    header, *rows = table(printed(address, "map", "show", rules, "mapped/tiny@20"))
    found = document(address, "map", "show", rules, "mapped/tiny@20")

    assert ["KEY", "ARRAY", "FROM", "OPERATIONS"] == header
    assert ["params/embed", "float32[8,4]", "model/embed", "-"] == rows[0]
    assert ["params/w", "float32[3,6,4]"] == rows[1][:2]
    assert "model/layers/0/w and 2 more" in " ".join(rows[1])
    assert ["step"] == found["dropped"]
    assert {
        "key": "params/w",
        "shape": [3, 6, 4],
        "dtype": "float32",
        "from": [f"model/layers/{n}/w" for n in range(3)],
        "rule": "rule 1",
        "operations": ["transpose [1, 0]", 'stack {"axis": 0, "by": "n"}'],
        "is_computed": False,
    } == found["leaves"][1]


def test_a_leaf_that_is_computed_is_shown_as_such(address: str, rules: str) -> None:
    keys = [f"model/layers/{n}/w" for n in range(3)]
    text = "version = 1\notherwise = 'drop'\n[[rules]]\n"
    merge = "[{lora_merge = {scale = 2}}]"
    Path(rules).write_text(f"{text}from = {keys}\nto = 'w'\noperations = {merge}\n")
    with store.connect(address) as client:
        square = {str(n): {"w": np.ones((4, 4), np.float32)} for n in range(3)}
        tree = {"model": {"layers": square}}
        client.run("mapped/adapted").save(20, tree).result()

    _, row = table(printed(address, "map", "show", rules, "mapped/adapted@20"))
    found = document(address, "map", "show", rules, "mapped/adapted@20")

    assert row[-1].startswith('computed: lora_merge {"scale": 2')
    assert found["leaves"][0]["is_computed"]


def test_rules_that_do_not_fit_are_refused_with_all_names(
    address: str, rules: str
) -> None:
    Path(rules).write_text(RULES.replace('"step"', '"steps"'))

    for command in ("check", "show"):
        text = refusal(address, "map", command, rules, "mapped/tiny@20")
        assert "rule 3 (steps): expected leaves that match" in text
        assert "none for step" in text


def test_a_file_that_is_no_document_is_refused(address: str, rules: str) -> None:
    Path(rules).write_text("version = 1\n[[rules]\n")

    assert "expected TOML" in refusal(address, "map", "check", rules, "mapped/tiny@20")


def test_the_way_back_is_printed_as_a_document_of_rules(
    address: str, rules: str
) -> None:
    text = RULES.replace('"step"\ndrop = true', '"step"\nto = "number"')
    Path(rules).write_text(text)
    back = json.loads(printed(address, "map", "invert", rules, "mapped/tiny@20"))
    Path(rules).write_text(RULES)

    with store.connect(address) as client:
        Path(rules).with_name("all.toml").write_text(text)
        run = client.run("mapped/tiny")
        params = run.restore(20, mapping=Path(rules).with_name("all.toml"))
        client.run("mapped/again").save(20, params).result()
        found = client.run("mapped/again").restore(20, mapping=back)

    assert 20 == found["step"]
    assert (4, 6) == found["model"]["layers"]["2"]["w"].shape
    assert "leaves out 'step'" in refusal(
        address, "map", "invert", rules, "mapped/tiny@20"
    )


@pytest.mark.parametrize("values", [(), ("--values",)], ids=["shapes", "values"])
def test_rules_are_proposed_from_two_checkpoints(
    address: str, tmp_path: Path, values: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(3)]
    stored = {"l": {str(n): {"w": each} for n, each in enumerate(layers)}, "step": 20}
    save_file(
        {"l.w": np.array([x.T for x in layers], order="C")}, tmp_path / "b.safetensors"
    )
    with store.connect(address) as client:
        client.run(f"mapped/learned{len(values)}").save(20, stored).result()
    places = (
        f"mapped/learned{len(values)}@20",
        f"safetensors:{tmp_path}/b.safetensors@latest",
    )

    text = printed(address, "map", "learn", *places, *values)
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    undecided = refusal(address, "map", "check", str(rules), places[0])
    rules.write_text(text + '[[rules]]\nfrom = "step"\ndrop = true\n')
    checked = printed(address, "map", "check", str(rules), places[0])

    assert "# 3 of 4 leaves of the source, 1 of 1 leaves of the target" in text
    assert 'operations = [{transpose = [1, 0]}, {stack = {axis = 0, by = "n"}}]' in text
    assert "none for step" in undecided
    assert "1 leaf of 4 leaves, 1 dropped" in checked


def test_migrations_are_added_listed_and_removed(
    server_address: str, tmp_path: Path
) -> None:
    with store.connect(server_address) as client:
        run = client.run("mapped/migrated")
        run.save(1, {"a": np.ones(3)}).result()
        run.save(2, {"b": np.ones(3)}).result()
        file = tmp_path / "renamed.toml"
        file.write_text('version = 1\n[[rules]]\nfrom = "a"\nto = "b"\n')
        command = (server_address, "map", "migrate")

        assert [] == document(*command, "mapped/migrated")
        added = printed(*command, "mapped/migrated@1", str(file))
        (found,) = document(*command, "mapped/migrated")
        migrated = run.restore(1)
        removed = document(*command, "mapped/migrated", "--remove", found["digest"])
        error = refusal(*command, "mapped/migrated@2", str(file))

        assert [["renamed.toml", "1"]] == [row[1:] for row in table(added)[1:]]
        assert (["b"], []) == ([*migrated], removed)
        assert ["a"] == [*run.restore(1)]
        assert "none for b" in error


def test_a_mapped_checkpoint_is_compared_by_its_elements(
    address: str, rules: str
) -> None:
    made = {"w": np.ones((3, 6, 4), np.float32), "embed": np.zeros((8, 4), np.float32)}
    with store.connect(address) as client:
        run = client.run("mapped/made")
        run.save(1, {"params": made}).result()
        made["w"][2, 3, 1] = 0
        run.save(2, {"params": made}).result()

    same = printed(address, "diff", "mapped/tiny@20", "mapped/made@1", "--map", rules)
    found = document(
        *(address, "diff", "mapped/tiny@20", "mapped/made@2", "--map", rules)
    )

    assert "no leaf differs; 2 leaves the same\n" == same
    (leaf,) = found["differences"]
    assert ("params/w", "content") == (leaf["key"], leaf["kind"])
    assert f"mapped/tiny@20 mapped by {rules}" == found["base"]
