"""Rules that do not fit a tree are rejected with all names, before anything is read."""

import re
import tomllib
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._mapping import planning
from storesvc_client._mapping.rules import check_rules
from tests.mapping.drawn import describe_tree, plan

W = np.zeros((4, 6), np.float32)
LAYERS = {f"layers/{n}/{name}": W for n in range(3) for name in ("q", "k")}


def refusal(rules: list[dict[str, Any]], arrays: Any = None, **more: Any) -> str:
    with pytest.raises(store.MismatchError) as caught:
        plan(rules, LAYERS if arrays is None else arrays, **more)
    return str(caught.value)


def test_leaves_that_no_rule_takes_are_named_with_the_rule_to_add() -> None:
    text = refusal([{"from": "layers/{n:int}/q", "to": "q/{n}"}])

    assert "none for layers/0/k, layers/1/k, layers/2/k; nearest: rule 1" in text


@pytest.mark.parametrize("key", ["k", 'a "b"', "{x}", "é\\"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_rules_that_an_error_advises_fit(key: str, number: int) -> None:
    arrays = {"w": W, key: W}
    rules: list[dict[str, Any]] = [{"from": "w", "to": "v"}]

    text = refusal(rules, arrays)
    advised = re.findall(r"(?s)\{from = .*?(?:true|\")\}", text)
    rule = tomllib.loads(f"rule = {advised[number]}")["rule"]

    keys = [leaf.key for leaf in plan([*rules, rule], arrays).tree.leaves]
    assert sorted([["v", key], ["v"]][number]) == keys


def test_what_no_rule_takes_is_kept_or_dropped_only_if_the_document_says_so() -> None:
    rule = {"from": "layers/{n:int}/q", "to": "q/{n}"}

    kept = plan([rule], LAYERS, otherwise="keep")
    dropped = plan([rule], LAYERS, otherwise="drop")

    keys = [leaf.key for leaf in kept.tree.leaves]
    assert ["layers/0/k", "layers/1/k", "layers/2/k", "q/0", "q/1", "q/2"] == keys
    assert ["q/0", "q/1", "q/2"] == [leaf.key for leaf in dropped.tree.leaves]
    assert ("layers/0/k", "layers/1/k", "layers/2/k") == dropped.dropped


def test_a_leaf_that_two_rules_take_is_named_with_both() -> None:
    text = refusal(
        [
            {"from": "layers/{n}/{name}", "to": "a/{n}/{name}"},
            {"from": "layers/{n:int}/q", "drop": True},
        ]
    )

    assert "leaf 'layers/0/q': expected one rule, got rule 2" in text
    assert "rule 1 (layers/{n}/{name})" in text


def test_a_leaf_that_is_made_twice_is_named_with_both_rules() -> None:
    text = refusal(
        [
            {"from": "layers/{n}/q", "to": "x/{n}"},
            {"from": "layers/{n}/k", "to": "x/{n}"},
        ]
    )

    assert "target leaf 'x/0': expected one rule that makes it, got rule 1" in text
    assert "and rule 2 (layers/{n}/k)" in text


def test_a_leaf_below_another_one_is_rejected() -> None:
    rules = [
        {"from": "layers/{n:int}/q", "to": "x/{n}"},
        {"from": "layers/{n:int}/k", "to": "x/{n}/y"},
    ]

    assert "leaf 'x/0/y' is below the leaf 'x/0'" in refusal(rules)


def test_a_rule_without_a_leaf_is_rejected_unless_it_is_optional() -> None:
    rules = [{"from": "layrs/{n}/q", "to": "x/{n}"}]

    text = refusal(rules, otherwise="keep")

    assert "rule 1 (layrs/{n}/q): expected leaves that match, got none" in text
    assert "nearest: layers/" in text
    assert 6 == len(
        plan([rules[0] | {"optional": True}], LAYERS, otherwise="keep").leaves
    )


def test_an_absent_layer_and_an_absent_part_are_named() -> None:
    arrays = {key: array for key, array in LAYERS.items() if key != "layers/1/q"}
    stack = {"stack": {"axis": 0, "by": "n"}}
    joined = ["layers/{n:int}/q", "layers/{n:int}/k"]

    text = refusal(
        [{"from": joined[0], "to": "q", "operations": [stack]}],
        arrays,
        otherwise="drop",
    )
    assert "expected n = 0 to 2, each once, got no n = 1" in text
    text = refusal(
        [{"from": joined, "to": "{n}/x", "operations": [{"concatenate": {"axis": 0}}]}],
        arrays,
    )
    assert "expected all its leaves, got none of the key 'layers/1/q'" in text


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ({"transpose": [0]}, r"each of the axes 0 to 1 once .* \[4, 6\], got \[0\]"),
        ({"reshape": [5, -1]}, r"a shape of 24 elements, .* got \[5, -1\]"),
        ({"reshape": [-1, -1]}, r"at most one -1"),
        ({"reshape": [2**61, 2**61]}, r"a shape of 24 elements"),
        ({"reshape_axes": {"axis": 1, "sizes": [4, -1]}}, r"got \[4, 4, -1\]"),
        ({"reshape_axes": {"axis": 2, "sizes": [6]}}, r"an axis of the shape \[4, 6"),
        (
            {"reshape_axes": {"axis": -1, "count": 2, "sizes": [6]}},
            r"a count of at most 1 for axis 1 of the shape \[4, 6\], got 2",
        ),
        ({"slice": {"axis": 2, "start": 0, "stop": 1}}, r"an axis of the shape \[4, 6"),
        ({"slice": {"axis": 0, "start": 3, "stop": 9}}, r"stop <= 4, the size of"),
        ({"pad": {"axis": 0, "size": 2**60, "value": 0}}, "at most .* elements"),
        ({"pad": {"axis": 0, "size": 2, "value": 0}}, "a size of at least 4"),
        ({"repeat": {"axis": 0, "times": 2**60}}, "at most .* elements"),
        ({"repeat": {"axis": 0, "times": 0}}, "times of at least 1"),
        ({"cast": "int8"}, "floating-point dtypes, got float32 to int8"),
        ({"unstack": {"axis": 5, "by": "m"}}, "an axis of the shape"),
        (
            {"permute_heads": {"axis": 0, "heads": 3, "from": "halves"}},
            "heads of an even size along axis 0 of 4, got 3 heads",
        ),
    ],
    ids=str,
)
def test_an_operation_that_does_not_fit_is_named_with_its_leaf(
    operation: dict[str, Any], expected: str
) -> None:
    to = "x/{n}/{m}" if "unstack" in operation else "x/{n}"
    rule = {"from": "layers/{n:int}/q", "to": to, "operations": [operation]}

    text = refusal([rule], otherwise="drop")

    assert text.startswith(
        "rules does not fit source: rule 1 (layers/{n:int}/q): n = 0"
    )
    assert re.search(expected, text), text


def test_only_the_key_of_a_text_or_a_random_key_can_change() -> None:
    tree = describe_tree({"note": np.zeros(3, np.uint8)})
    (leaf,) = tree.leaves
    kind = 6  # of a text
    text = type(tree)(
        (type(leaf)(**{n: getattr(leaf, n) for n in leaf.__slots__} | {"kind": kind}),)
    )
    rule = {"from": "note", "to": "x"}
    rules = check_rules({"version": 1, "rules": [rule]}, name="rules")
    reshape = rule | {"operations": [{"reshape": [3, 1]}]}
    shaped = check_rules({"version": 1, "rules": [reshape]}, name="rules")

    assert kind == planning.plan_mapping(rules, text, name="x").tree.leaves[0].kind
    with pytest.raises(
        store.MismatchError, match="leaf 'note': expected an array, got"
    ):
        planning.plan_mapping(shaped, text, name="x")


def test_an_error_names_some_of_very_many_problems_and_their_number() -> None:
    arrays = {f"layers/{n:06}/w": W for n in range(5_000)}
    rules = [{"from": f"layers/{n:06}/w", "to": "x"} for n in range(5_000)]

    text = refusal(rules, arrays)

    assert len(text) < 10_000
    assert "and 4,979 more" in text
