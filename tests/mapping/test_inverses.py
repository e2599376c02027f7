"""The way back of a mapping returns every bit, or says why there is none."""

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._mapping.inverses import invert_rules
from storesvc_client._mapping.planning import plan_mapping
from storesvc_client._mapping.rules import ARITHMETIC, Document, check_rules
from tests.mapping.drawn import Arrays, DrawnMapping, build_all, describe_tree, plan
from tests.support.examples import examples, soaked

randoms = st.integers(0, 2**32).map(Random)
W = np.arange(24, dtype=np.float32).reshape(4, 6)
LAYERS = {f"l/{n}/{name}": W + n for n in range(3) for name in "qk"}


def turn(document: Document, arrays: Arrays) -> tuple[Document, Arrays]:
    """Returns the inverse of a document, and what it makes of the target; composed with
    the document it makes the same of the source."""
    rules, tree = check_rules(document, name="rules"), describe_tree(arrays)
    mapped = plan_mapping(rules, tree, name="source")
    made = build_all(mapped, arrays)
    inverse = invert_rules(mapped, tree)
    checked = check_rules(inverse, name="inverse")
    back = plan_mapping(checked, describe_tree(made), name="target")
    found = build_all(back, made)
    composed = plan_mapping(checked, mapped, name="target")
    assert back.tree.by_key == composed.tree.by_key
    for key, array in build_all(composed, arrays).items():
        assert found[key].tobytes() == array.tobytes()
    return inverse, found


def check_turn(document: Document, arrays: Arrays) -> Document:
    inverse, back = turn(document, arrays)
    assert arrays.keys() == back.keys()
    for key, array in arrays.items():
        assert array.dtype == back[key].dtype
        assert array.shape == back[key].shape
        assert array.tobytes() == back[key].tobytes()
    return inverse


def check_drawn(random: Random) -> None:
    drawn = DrawnMapping(random)
    for rule in drawn.rules:
        names = {name for each in rule["operations"] for name in each}
        if names & {"slice", "repeat", *ARITHMETIC}:
            return
    check_turn({"version": 1, "rules": drawn.rules}, drawn.arrays)


@given(randoms)
@settings(max_examples=examples(250))
def test_a_mapping_and_its_inverse_return_every_bit(random: Random) -> None:
    check_drawn(random)


@pytest.mark.parametrize("part", soaked(range(5), every=5))
@given(randoms)
@settings(max_examples=300)
def test_many_mappings_and_their_inverses_return_every_bit(
    part: int, random: Random
) -> None:
    del part
    check_drawn(random)


def test_the_inverse_is_a_document_that_is_read_as_it_is_written() -> None:
    rule = {
        "from": ["l/{n:int}/q", "l/{n:int}/k"],
        "to": "x/{n}",
        "operations": [
            {"transpose": [1, 0]},
            {"concatenate": {"axis": 1}},
            {"pad": {"axis": 0, "size": 9, "value": 0}},
        ],
    }

    inverse = check_turn({"version": 1, "rules": [rule]}, LAYERS)

    assert {
        "version": 1,
        "otherwise": "error",
        "rules": [
            {
                "from": ["x/{n:int}"],
                "to": ["l/{n:int}/q", "l/{n:int}/k"],
                "operations": [
                    {"slice": {"axis": 0, "start": 0, "stop": 6}},
                    {"split": {"axis": 1, "sizes": [4, 4]}},
                    {"transpose": [1, 0]},
                ],
            }
        ],
    } == inverse


def test_layer_numbers_go_back_to_their_range() -> None:
    """Each kind of layer is numbered from 0, and one kind is stacked."""
    stack = {"stack": {"axis": 1, "by": "n"}}
    names = ["l/{n:int[1:]}/q", "l/{n:int[1:]}/k"]
    rules = [
        {"from": "l/{n:int[:1]}/{x}", "to": "dense/{n}/{x}"},
        {"from": names, "to": ["moe/q", "moe/k"], "operations": [stack]},
    ]

    inverse = check_turn({"version": 1, "rules": rules}, LAYERS)

    assert [
        {"from": ["dense/{n:int}/{x}"], "to": ["l/{n:int[:1]}/{x}"], "operations": []},
        {
            "from": ["moe/q", "moe/k"],
            "to": names,
            "operations": [{"unstack": {"axis": 1, "by": "n"}}],
        },
    ] == inverse["rules"]


def draw_kinds(random: Random, first: int, count: int) -> list[dict[str, Any]]:
    """Draws rules that number layers in several ranges from 0, or stack them."""
    cuts = random.sample(range(1, count), random.randint(0, count - 1))
    ends = [0, *sorted(cuts), count]
    rules = list[dict[str, Any]]()
    for number, (start, stop) in enumerate(pairwise(ends)):
        is_open = stop == count and random.random() < 0.5
        key = f"l/{{n:int[{first + start}:{'' if is_open else first + stop}]}}/{{x}}"
        rules.append({"from": key, "to": f"kind{number}/{{n}}/{{x}}"})
        if random.random() < 0.5:
            stack = {"stack": {"axis": random.randint(0, 2), "by": "n"}}
            rules[-1] = {"from": key, "to": f"k{number}/{{x}}", "operations": [stack]}
    return rules


@given(randoms)
def test_mixed_layers_go_back_to_their_numbers(random: Random) -> None:
    """Without one of the ranges, or with another one over them, no rules fit."""
    first, count = random.choice([0, 1, 7, 10**17]), random.randint(1, 6)
    arrays = {f"l/{first + n}/{x}": W + n for n in range(count) for x in "qk"}
    rules = draw_kinds(random, first, count)
    document = {"version": 1, "rules": rules}

    inverse = check_turn(document, arrays)

    made = build_all(plan(rules, arrays), arrays)
    check_turn(inverse, made)
    lost = random.choice([*rules])
    with pytest.raises(store.MismatchError, match="expected a rule for each leaf"):
        plan([each for each in rules if each != lost], arrays)
    with pytest.raises(store.MismatchError, match="expected one rule, got rule"):
        plan([*rules, {"from": f"l/{{n:int[{first}:]}}/k", "to": "other/{n}"}], arrays)


def test_leaves_that_are_kept_are_kept_and_new_ones_are_dropped() -> None:
    rules = [
        {"from": "l/{n:int}/q", "to": "x/{n}"},
        {"default": {"shape": [2], "dtype": "int8", "value": 1}, "to": "new"},
        {"from": "none/{a}", "to": "some/{a}", "optional": True},
    ]

    check_turn({"version": 1, "otherwise": "keep", "rules": rules}, LAYERS)


OPERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"slice": {"axis": 0, "start": 1, "stop": 4}}, "slice leaves out elements"),
    ({"multiply": 0.5}, "multiply computes, and its result does not contain every"),
    ({"repeat": {"axis": 0, "times": 2}}, "repeat makes several elements of one"),
    ({"cast": "bfloat16"}, "a cast from float32 to bfloat16 loses digits"),
]


@pytest.mark.parametrize(("operation", "expected"), OPERATIONS, ids=str)
def test_an_operation_without_an_inverse_is_named(
    operation: dict[str, Any], expected: str
) -> None:
    rule = {"from": "l/{n:int}/{x}", "to": "m/{n}/{x}", "operations": [operation]}

    with pytest.raises(store.InvalidRequestError, match=expected) as caught:
        turn({"version": 1, "rules": [rule]}, LAYERS)

    assert "rules: rule 1 (l/{n:int}/{x}) has no inverse" in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([{"from": "{rest*}", "drop": True}], "it leaves out 'l/0/k'"),
        (
            [{"from": "l/{n:int}/{x}", "to": ["a/{n}/{x}", "b/{n}/{x}"]}],
            "several leaves of one, which may differ later",
        ),
        (
            [{"from": "l/{n:int}/{x}", "to": "{x}{n}"}],
            r"the inverse of rules: rule 1: .* behind \{x\}, got \{n:int\}",
        ),
    ],
    ids=["drop", "tie", "ambiguous"],
)
def test_rules_without_an_inverse_are_named(
    rules: list[dict[str, Any]], expected: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=expected):
        turn({"version": 1, "rules": rules}, LAYERS)


def test_arrays_of_several_shapes_need_a_rule_for_each() -> None:
    arrays = {"a/x": W, "a/y": W[:2]}
    rule = {"from": "a/{n}", "to": "b/{n}", "operations": [{"reshape": [-1]}]}

    with pytest.raises(store.InvalidRequestError, match="arrays of several shapes"):
        turn({"version": 1, "rules": [rule]}, arrays)


def test_a_kept_leaf_that_the_way_back_would_take_is_named() -> None:
    arrays = {"a/x": W, "b/y": W}
    rule = {"from": "a/{n}", "to": "b/{n}"}

    with pytest.raises(store.InvalidRequestError, match="other leaves, such as 'a/y'"):
        turn({"version": 1, "otherwise": "keep", "rules": [rule]}, arrays)
