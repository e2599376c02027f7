"""Documents of rules: what is accepted, and errors that name the place."""

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._mapping import planning
from storesvc_client._mapping.rules import MAX_RULES, Rules, check_rules, parse_rules
from storesvc_client._mapping.templates import Template
from tests.mapping.drawn import describe_tree, plan

W = np.zeros((4, 6), np.float32)


def document(*rules: Any, **more: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [*rules], **more}


def parse(value: object) -> Rules:
    return parse_rules(json.dumps(value).encode(), name="r.json", is_toml=False)


def test_a_document_is_toml_or_json() -> None:
    text = b"""
        version = 1
        otherwise = "keep"
        [[rules]]
        from = ["a/{n:int}/q", "a/{n:int}/k"]
        to = "b/qk"
        operations = [{concatenate = {axis = 0}}, {stack = {axis = 0, by = "n"}}]
        [[rules]]
        from = "c/{rest*}"
        drop = true
    """
    rules = parse_rules(text, name="r.toml", is_toml=True)

    assert rules.rules == parse(rules.document).rules
    assert "keep" == rules.otherwise
    assert ["concatenate", "stack"] == [each.name for each in rules.rules[0].operations]


OPERATION = {"from": "a", "to": "b"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([], r"r.json: expected a table, got \[\]"),
        ({}, "expected version = 1, got None"),
        ({"version": 2}, "expected version = 1, got 2"),
        ({"version": 1, "rule": []}, "otherwise, rules, version, got 'rule'"),
        ({"version": 1, "rules": {}}, "rules: expected a list of at most 100000"),
        (document(otherwise="guess"), "one of error, keep, drop, got 'guess'"),
        (document(3), "rule 1: expected a table, got 3"),
        (
            document({"to": "a"}),
            "rule 1: expected from, or default .*, got none of them",
        ),
        (document({"from": "a"}), "expected to, or drop = true, got neither"),
        (document({"from": "a", "to": "b", "drop": True}), "drop = true, got both"),
        (document({"from": [], "to": "b"}), "from: expected at least one key"),
        (document({"from": [1], "to": "b"}), "from: expected keys, got 1"),
        (document({"from": "a", "to": 3}), "to: expected a list"),
        (document(OPERATION | {"why": 1}), "rule 1: expected the fields .*, got 'why'"),
        (document(OPERATION | {"optional": 1}), "expected true or false, got 1"),
        (document(OPERATION | {"operations": [{}]}), "tables of one operation"),
        (document(OPERATION | {"operations": [{"x": 1}]}), "one of transpose, .*'x'"),
        (
            document(OPERATION | {"operations": [{"slice": {"axis": 0}}]}),
            "slice: expected the fields axis, start, stop, got no start",
        ),
        (
            document(OPERATION | {"operations": [{"reshape": [1.5]}]}),
            r"rule 1: reshape: expected a list of integers, got \[1.5\]",
        ),
        (
            document(OPERATION | {"operations": [{"reshape": [10**30]}]}),
            "expected a list of integers",
        ),
        (document(OPERATION | {"operations": [{"cast": "f99"}]}), "expected a dtype"),
        (
            document({"default": {"shape": [2], "dtype": "int8"}, "to": "x"}),
            "default: expected the fields dtype, shape, value, got no value",
        ),
        (document({"from": "a/{x", "to": "b"}), r"expected \{name\}, .* got '\{x'"),
        (document({"from": "a/{x}/{x}", "to": "b"}), "each placeholder once"),
        *(
            (document({"from": f"a/{{n{ends}}}", "to": "b"}), expected)
            for ends, expected in [
                ("[3:]", "expected {name}, {name:int}"),
                ("*[3:]", "expected {name}, {name:int}"),
                (":int[]", "expected {name}, {name:int}"),
                (":int[3]", "expected {name}, {name:int}"),
                (":int[-1:]", r"got '{n:int\[-1:\]}'"),
                (":int[:-1]", r"got '{n:int\[:-1\]}'"),
                (":int[03:]", r"got '{n:int\[03:\]}'"),
                (":int[1:9:2]", r"got '{n:int\[1:9:2\]}'"),
                (f":int[{10**18}:]", "expected {name}, {name:int}"),
                (":int[:0]", r"expected integers, such as \[3:5\], got {n:int\[:0\]}"),
                (":int[3:3]", r"such as \[3:5\], got {n:int\[3:3\]}"),
                (":int[5:3]", r"such as \[3:5\], got {n:int\[5:3\]}"),
            ]
        ),
        (document({"from": "{a*}/{b*}", "to": "c"}), "at most one placeholder with a"),
        (
            document({"from": "{a}{b}/x", "to": "c"}),
            r"expected text or an integer up to the next '/' or '.' behind \{a\}",
        ),
        (document({"from": "{a}_{b}", "to": "c"}), r"behind \{a\}, got _\{b\}"),
        (document({"from": "{a}_1{b:int}", "to": "c"}), r"\{a\}, got _1\{b:int\}"),
        (document({"from": "{a:int}1", "to": "c"}), r"expected no digit behind"),
        (document({"from": "x/{a}", "to": "c"}), r"expected the placeholders \{a\} in"),
        (document({"from": "x/{a}", "to": "c/{b}"}), r"placeholders \{a\} in to"),
        (document({"from": "x", "to": "c/{b}"}), r"placeholders \(none\) in to"),
        (
            document({"from": ["x/{a}", "y"], "to": "c"}),
            "the same placeholders in each",
        ),
        (
            document({"from": ["x", "y", "z"], "to": ["a", "b"]}),
            "expected 3 keys in to, one for each array, got 2",
        ),
        (
            document(OPERATION | {"operations": [{"stack": {"axis": 0, "by": "n"}}]}),
            "stack: expected by = the name of a placeholder",
        ),
        (
            document(OPERATION | {"operations": [{"concatenate": {"axis": 0}}]}),
            "concatenate: expected several keys in from, got one",
        ),
    ],
    ids=str,
)
def test_a_document_that_is_none_is_rejected_at_its_place(
    value: object, expected: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=expected):
        parse(value)


def test_a_value_that_the_dtype_lacks_is_rejected() -> None:
    rule = {"default": {"shape": [2], "dtype": "int8", "value": 300}, "to": "x"}

    with pytest.raises(store.MismatchError, match="a value that int8 has, got 300"):
        plan([rule], {})


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("a/{n:int}/w", "a/12/w", {"n": 12}),
        ("a/{n:int}/w", "a/012/w", None),
        ("a/{n}/w", "a/x/y/w", None),
        ("a.{n}.w", "a.b.w", {"n": "b"}),
        ("{rest*}/{n:int}.{name}", "x/1.y/2.w", {"rest": "x/1.y", "n": 2, "name": "w"}),
        ("{rest*}/w", "w", None),
        ("{{{x}}}/w", "{a}/w", {"x": "a"}),
        ("{{{x}/w", "{a/w", {"x": "a"}),
        ("", "", {}),
        ("a/{n:int[3:]}/w", "a/3/w", {"n": 0}),
        ("a/{n:int[3:]}/w", "a/2/w", None),
        ("a/{n:int[:3]}/w", "a/2/w", {"n": 2}),
        ("a/{n:int[:3]}/w", "a/3/w", None),
        ("a/{n:int[3:5]}/w", "a/4/w", {"n": 1}),
        ("a/{n:int[3:5]}/w", "a/5/w", None),
        ("a/{n:int[1:]}", f"a/{10**18 - 1}", {"n": 10**18 - 2}),
        ("a/{n:int[1:]}", f"a/{10**18}", None),
    ],
)
def test_a_template_matches_in_one_way_and_makes_the_key_again(
    text: str, key: str, values: dict[str, Any] | None
) -> None:
    template = Template.parse(text)

    assert values == template.match(key)
    assert text == str(template)
    if values is not None:
        assert key == template.fill(values)


HOSTILE: dict[str, bytes] = {
    "deep JSON": b"[" * 200_000,
    "deep table": b'{"a":' * 200_000,
    "no text": b"\xff\xfe",
    "large number": b"9" * 10_000,
    "too large": b" " * ((16 << 20) + 1),
}


@pytest.mark.parametrize("is_toml", [False, True], ids=["json", "toml"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_document_is_rejected_soon(name: str, *, is_toml: bool) -> None:
    since = time.monotonic()

    with pytest.raises(store.InvalidRequestError, match="expected"):
        parse_rules(HOSTILE[name], name="rules", is_toml=is_toml)

    assert time.monotonic() - since < 20


def test_a_document_that_is_nested_too_deeply_is_rejected() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]

    with pytest.raises(store.InvalidRequestError, match="expected"):
        check_rules(document({"from": nested, "to": "x"}), name="rules")


@pytest.mark.parametrize(
    "text",
    ["a" * 1_000_000, "{a*}" * 1_000, "{a}/" * 1_000, "{" * 3_999, "{{" * 3_000],
    ids=["long", "rests", "places", "open", "braces"],
)
def test_a_hostile_key_is_rejected(text: str) -> None:
    with pytest.raises(store.InvalidRequestError) as caught:
        parse(document({"from": text, "to": "x"}))

    assert len(str(caught.value)) < 10_000


def test_a_key_of_many_separators_is_matched_in_linear_time() -> None:
    places = "".join(f"/{{p{n}}}" for n in range(15))
    template = Template.parse("{rest*}" + places + "/w")
    template.check_source()
    since = time.monotonic()

    for _ in range(100):
        assert template.match("a/" * 2_000 + "x") is None
        assert template.match("a/" * 2_000 + "w") is not None

    assert time.monotonic() - since < 10


def test_as_many_rules_as_leaves_take_no_quadratic_time() -> None:
    count = 4_000  # with a comparison of each with each, 16 million
    arrays = {f"l{n}/w": W for n in range(count)}
    rules = [{"from": f"l{n}/{{x}}", "to": f"m{n}/{{x}}"} for n in range(count)]

    assert count == len(plan(rules, arrays).leaves)


@pytest.mark.slow
def test_the_most_rules_on_as_many_leaves_are_planned() -> None:
    arrays = {f"l{n}/w": W for n in range(MAX_RULES)}
    rules = [{"from": f"l{n}/w", "to": f"m{n}/w"} for n in range(MAX_RULES)]

    assert MAX_RULES == len(plan(rules, arrays).leaves)
    with pytest.raises(store.InvalidRequestError, match="at most 100000, got 100001"):
        check_rules(document(*rules, rules[0]), name="rules")


@pytest.mark.slow
def test_rules_that_need_too_many_comparisons_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "MAX_COMPARISONS", 200_000)
    arrays = {f"l{n}": W for n in range(500)}
    rules = [{"from": f"{{x}}.{n}", "to": f"m{n}.{{x}}"} for n in range(500)]
    checked = check_rules(document(*rules), name="rules")
    tree = describe_tree(arrays)

    with pytest.raises(store.InvalidRequestError, match=r"rules: .*at most 200,000 c"):
        planning.plan_mapping(checked, tree, name="source")


def test_an_axis_of_too_many_parts_is_rejected() -> None:
    unstack = {"unstack": {"axis": 0, "by": "n"}}
    pad = {"pad": {"axis": 0, "size": 2**40, "value": 0}}
    rule = {"from": "w", "to": "x/{n}", "operations": [pad, unstack]}

    with pytest.raises(store.MismatchError, match="at most 1000000 parts"):
        plan([rule], {"w": W})


PLACES = ["{p}", "{q}", "{r*}", "{m:int}", "{n:int}", "{k:int[7:]}", "{l:int[9:12]}"]
TOKENS = [*PLACES, "_", "1", "0", "a", "/", "."]
TEXTS = st.text("a_10", min_size=1, max_size=4)


@given(st.data())
def test_a_template_takes_a_key_apart_in_the_one_way_that_makes_it(
    data: st.DataObject,
) -> None:
    """If a key had two ways, one of them would come back as the other."""
    tokens = data.draw(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=7))
    try:
        template = Template.parse("".join(tokens))
        template.check_source()
    except ValueError:
        reject()
    values: dict[str, Any] = {
        each.name: data.draw(
            st.integers(0, min(120, len(each.numbers) - 1))
            if each.kind == ":int"
            else TEXTS
        )
        for each in template.placeholders
    }
    if "r" in values:
        values["r"] += data.draw(st.sampled_from(["", "/a", ".1", "/_/a"]))

    key = template.fill(values)

    assert values == template.match(key)


FIVE = {f"l/{n}/w": W + n for n in range(5)}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            [("l/{n:int[:3]}/w", "a/{n}"), ("l/{n:int[2:]}/w", "b/{n}")],
            r"'l/2/w': expected one rule, got rule 1 \(l/{n:int\[:3\]}/w\) and rule 2",
        ),
        (
            [("l/{n:int[:2]}/w", "a/{n}"), ("l/{n:int[3:]}/w", "b/{n}")],
            "expected a rule for each leaf, got none for l/2/w; nearest: rule",
        ),
        (
            [("l/{n:int[:2]}/w", "a/{n}"), ("l/{n:int[2:]}/w", "a/{n}")],
            "target leaf 'a/0': expected one rule that makes it, got rule 1 .* and",
        ),
        (
            [("l/{n:int[:6]}/w", "a/{n}")],
            r"rule 1 .*: expected n = 0 to 5, each once, got no n = 5",
        ),
        (
            [("l/{n:int[2:7]}/w", "a/{n}"), ("l/{n:int[:2]}/w", "b/{n}")],
            r"rule 1 .*: expected n = 2 to 6, each once, got no n = 5",
        ),
        (
            [(f"l/{{n:int[:{10**18 - 1}]}}/w", "a/{n}")],
            f"expected n = 0 to {10**18 - 2}, each once, got no n = 5",
        ),
        (
            [("l/{n:int}/w", "a/{n:int[3:6]}")],
            "rule 1 .*: expected n = 3 to 5, each once, got 5 of them",
        ),
        (
            [("l/{n:int}/w", "a/{n:int[3:9]}")],
            "rule 1 .*: expected n = 3 to 8, each once, got no n = 8",
        ),
    ],
)
def test_ranges_that_do_not_fit_the_leaves_are_rejected(
    rules: list[tuple[str, str]], expected: str
) -> None:
    with pytest.raises(store.MismatchError, match=expected):
        plan([{"from": one, "to": other} for one, other in rules], FIVE)


def test_a_range_numbers_leaves_from_its_first_integer() -> None:
    stack = {"stack": {"axis": 0, "by": "n"}}
    rules: list[dict[str, Any]] = [
        {"from": "l/{n:int[:2]}/w", "to": "a/{n:int[7:]}"},
        {"from": "l/{n:int[2:4]}/w", "to": "b", "operations": [stack]},
        {"from": "l/{n:int[4:]}/{rest*}", "drop": True},
    ]

    made = plan(rules, FIVE)

    assert ["a/7", "a/8", "b"] == [each.leaf.key for each in made.leaves]
    assert (2, 4, 6) == made.leaves[2].leaf.shape
    assert ("l/4/w",) == made.dropped


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("h.{n:int}.{p}_proj.weight", "h.3.q_proj.weight", {"n": 3, "p": "q"}),
        ("w{p}_{n:int}", "wa_1_12", {"p": "a_1", "n": 12}),
        ("{p}_{n:int}x_{m:int}/k", "a_1x_2/k", {"p": "a", "n": 1, "m": 2}),
        ("pre_{p}", "pre_", None),
    ],
)
def test_a_placeholder_may_be_a_piece_of_a_part(
    text: str, key: str, values: dict[str, Any] | None
) -> None:
    template = Template.parse(text)
    template.check_source()

    assert values == template.match(key)
