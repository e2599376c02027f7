"""Rules are proposed from two trees, and what is not certain is left to the reader."""

import time
import tomllib
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.format.grids import part, whole
from storesvc_client._mapping.learning import Read, learn_rules
from storesvc_client._mapping.rules import parse_rules
from tests.mapping.drawn import (
    Array,
    Arrays,
    DrawnMapping,
    build_all,
    describe_tree,
    plan,
)
from tests.support.examples import examples

randoms = st.integers(0, 2**32).map(Random)


def make_read(arrays: Arrays) -> Read:
    def read(wanted: Any) -> list[Array]:
        return [part(arrays[key], whole(arrays[key].shape), at) for key, at in wanted]

    return read


def learn(source: Arrays, target: Arrays, *, values: bool = False) -> str:
    read = (make_read(source), make_read(target)) if values else None
    return learn_rules(describe_tree(source), describe_tree(target), read)


def apply(text: str, arrays: Arrays) -> dict[str, Array]:
    rules = parse_rules(text.encode(), name="learned", is_toml=True)
    return build_all(plan(rules.document["rules"], arrays), arrays)


def check_same(wanted: Arrays, found: Arrays) -> None:
    assert wanted.keys() == found.keys()
    for key, array in wanted.items():
        assert array.dtype == found[key].dtype
        np.testing.assert_array_equal(array, found[key])


def draw_family(random: Random, name: str) -> tuple[dict[str, Any], Arrays]:
    """Draws a rule that can be learned, and its arrays."""
    layers = random.randint(2, 4)
    shape = [random.randint(2, 5) for _ in range(random.randint(1, 3))]
    swap = [*range(len(shape))]
    random.shuffle(swap)
    parts, targets, operations = ["w"], ["kernel"], list[dict[str, Any]]()
    kind = random.choice(["equal", "turn", "heads", "join", "split", "cast"])
    if kind == "turn":
        operations = [{"transpose": swap}]
    elif kind == "heads":
        shape = [shape[0], 6]
        operations = [{"reshape": [shape[0], 2, 3]}]
        if random.random() < 0.5:
            operations = [{"transpose": [1, 0]}, {"reshape": [2, 3, shape[0]]}]
    elif kind == "join":
        parts = ["q", "k", "v"][: random.randint(2, 3)]
        operations = [{"concatenate": {"axis": random.randrange(len(shape))}}]
    elif kind == "split":
        axis = random.randrange(len(shape))
        cut = random.randint(1, shape[axis] - 1)
        sizes = [cut, shape[axis] - cut]
        targets, operations = ["a", "b"], [{"split": {"axis": axis, "sizes": sizes}}]
    elif kind == "cast":
        operations = [{"cast": "float64"}]
    where = "{n}/"
    if random.random() < 0.5:
        where = ""
        operations = [*operations, {"stack": {"axis": 0, "by": "n"}}]
    rule = {
        "from": [f"{name}/{{n:int}}/{each}/weight" for each in parts],
        "to": [f"new/{name}/{where}{each}" for each in targets],
        "operations": operations,
    }
    rng = np.random.default_rng(random.randrange(2**32))
    keys = [f"{name}/{n}/{each}/weight" for n in range(layers) for each in parts]
    return rule, {key: rng.normal(size=shape).astype(np.float32) for key in keys}


@given(randoms)
@settings(max_examples=examples(60))
def test_rules_that_were_drawn_are_learned_from_values(random: Random) -> None:
    rules, arrays = [], dict[str, Array]()
    for number in range(random.randint(1, 3)):
        rule, more = draw_family(random, f"f{'abc'[number]}")
        rules.append(rule)
        arrays |= more
    target = build_all(plan(rules, arrays), arrays)

    text = learn(arrays, target, values=True)

    check_same(target, apply(text, arrays))
    assert "give --values" not in text
    assert text.startswith(f"# {len(arrays)} of {len(arrays)} leaves of the source, ")


LEARNED = {"transpose", "stack", "unstack", "concatenate", "split"}


@given(randoms)
@settings(max_examples=examples(150))
def test_rules_that_are_complete_make_the_target_and_others_say_so(
    random: Random,
) -> None:
    # slices, repeats and others cannot be learned
    drawn = DrawnMapping(random, starts=[0])
    target = {f"{key[:-1]}p{key[-1]}": each for key, each in drawn.wanted.items()}

    text = learn(drawn.arrays, target, values=True)

    if "decide" not in text and "drop?" not in text:
        check_same(target, apply(text, drawn.arrays))
        return
    with pytest.raises((store.InvalidRequestError, store.MismatchError)):
        apply(text, drawn.arrays)
    used = [{*operation} for x in drawn.rules for operation in x["operations"]]
    assert len(used) > 1 or not set[str]().union(*used) <= LEARNED


HF = {
    "model/embed_tokens/weight": (96, 64),
    "model/norm/weight": (64,),
    "lm_head/weight": (96, 64),
}
for n in range(3):
    HF |= {
        f"model/layers/{n}/self_attn/q_proj/weight": (64, 64),
        f"model/layers/{n}/self_attn/k_proj/weight": (32, 64),
        f"model/layers/{n}/self_attn/v_proj/weight": (32, 64),
        f"model/layers/{n}/self_attn/o_proj/weight": (64, 64),
        f"model/layers/{n}/mlp/gate_proj/weight": (80, 64),
        f"model/layers/{n}/mlp/up_proj/weight": (80, 64),
        f"model/layers/{n}/mlp/down_proj/weight": (64, 80),
        f"model/layers/{n}/input_layernorm/weight": (64,),
        f"model/layers/{n}/post_attention_layernorm/weight": (64,),
    }


def draw_arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=n).astype(np.float32) for key, n in shapes.items()}


def to_easydel(arrays: Arrays) -> dict[str, Array]:
    """Returns the weights of Llama as EasyDeL names and turns them."""
    found = dict[str, Array]()
    for key, array in arrays.items():
        if "embed" in key:
            found[key.replace("weight", "embedding")] = array
        else:
            found[key.replace("weight", "kernel")] = array.T
    return found


@pytest.mark.parametrize("values", [False, True])
def test_the_rules_of_llama_are_learned(values: bool) -> None:
    source = draw_arrays(HF)
    target = to_easydel(source)

    text = learn(source, target, values=values)

    check_same(target, apply(text, source))
    assert "30 of 30 leaves of the source, 30 of 30 leaves of the target" in text
    # q and o are square: what is known of the others decides, and it is said
    assert (0 if values else 2) == text.count("square: other operations fit, too")


def test_layers_are_stacked_and_projections_joined() -> None:
    source = draw_arrays(HF)
    target = dict[str, Array]()
    for key, array in source.items():
        if "/0/" in key and "_proj" not in key:
            each = [source[key.replace("/0/", f"/{n}/")] for n in range(3)]
            target[key.replace("/0/", "/")] = np.stack(each)
        elif "layers" not in key:
            target[key] = array
    for joined, names in (("qkv", "qkv"), ("gate_up", ("gate", "up"))):
        block = "self_attn" if joined == "qkv" else "mlp"
        layers = [
            np.concatenate(
                [source[f"model/layers/{n}/{block}/{x}_proj/weight"] for x in names]
            )
            for n in range(3)
        ]
        target[f"model/layers/{block}/{joined}_proj/weight"] = np.stack(layers)
    for name in "self_attn/o", "mlp/down":
        parts = [source[f"model/layers/{n}/{name}_proj/weight"] for n in range(3)]
        target[f"model/layers/{name}_proj/weight"] = np.stack(parts)

    text = learn(source, target)
    proved = learn(source, target, values=True)

    check_same(target, apply(proved, source))
    check_same(target, apply(text, source))
    assert 2 == text.count("the order of the parts is not known; give --values")
    rules = tomllib.loads(text)["rules"]
    assert {
        "from": [
            f"model/layers/{{n:int}}/self_attn/{x}_proj/weight" for x in ("q", "k", "v")
        ],
        "to": "model/layers/self_attn/qkv_proj/weight",
        "operations": [
            {"concatenate": {"axis": 0}},
            {"stack": {"axis": 0, "by": "n"}},
        ],
    } in rules


def test_what_has_no_match_is_left_to_the_reader() -> None:
    source = draw_arrays({"a/w": (4, 6), "b/0/x": (3,), "b/1/x": (3,)})
    target = draw_arrays({"c/a/w": (4, 6), "new/{0}": (7,)})

    text = learn(source, target)

    assert "# 1 of 3 leaves of the source, 1 of 2 leaves of the target" in text
    assert '# from = "b/{n:int}/x"\n# drop = true' in text
    with pytest.raises(store.InvalidRequestError, match="expected a number, got"):
        apply(text, source)
    decided = text.replace('"decide"', "0")
    with pytest.raises(store.MismatchError, match="none for b/0/x, b/1/x"):
        apply(decided, source)
    dropped = decided.replace("# [[", "[[").replace("# from", "from")
    found = apply(dropped.replace("# drop =", "drop ="), source)
    assert {"c/a/w", "new/{0}"} == found.keys()
    assert (7,) == found["new/{0}"].shape


def test_tied_leaves_are_learned_from_values() -> None:
    source = draw_arrays({"embed/weight": (8, 4)})
    target = {"embed/kernel": source["embed/weight"].T}
    target["head/kernel"] = target["embed/kernel"]

    check_same(target, apply(learn(source, target, values=True), source))
    assert 'value = "decide"' in learn(source, target)


def test_experts_in_layers_are_stacked_twice() -> None:
    keys = [f"l/{n}/experts/{e}/w" for n in range(3) for e in range(2)]
    source = draw_arrays(dict.fromkeys(keys, (4, 6)))
    stacked = [[source[f"l/{n}/experts/{e}/w"].T for e in range(2)] for n in range(3)]
    target: Arrays = {"l/experts/w": np.array(stacked)}

    for one, other in (source, target), (target, source):
        for values in False, True:
            check_same(other, apply(learn(one, other, values=values), one))


def test_a_number_that_all_keys_have_is_part_of_their_name() -> None:
    keys = [f"opt/0/mu/l/{n}/w" for n in range(3)]
    source = draw_arrays(dict.fromkeys(keys, (4, 6)))
    target = {f"opt/1/0/mu/h_{n}/w": source[key].T for n, key in enumerate(keys)}

    text = learn(source, target)

    check_same(target, apply(text, source))
    assert 'from = "opt/0/mu/l/{n:int}/w"\nto = "opt/1/0/mu/h_{n}/w"' in text


def test_layers_that_do_not_begin_with_zero_are_not_stacked() -> None:
    source = draw_arrays({f"l/{n}/w": (4, 6) for n in (3, 4, 5)})
    target = {"l/w": np.stack([*source.values()])}

    assert "# 0 of 3 leaves of the source, 0 of 1" in learn(source, target)
    kept = {key.replace("l/", "h/"): array for key, array in source.items()}
    check_same(kept, apply(learn(source, kept), source))


def test_other_integers_are_not_cast() -> None:
    source = {"a/step": np.ones(3, np.int32), "a/w": np.ones(3, np.float32)}
    target = {"b/step": np.ones(3, np.int64), "b/w": np.ones(3, np.float64)}

    text = learn(source, target)

    assert "# 1 of 2 leaves of the source, 1 of 2" in text
    assert 'operations = [{cast = "float64"}]' in text


def test_equal_values_decide_and_names_do_not() -> None:
    source = draw_arrays({"a/w": (4, 4), "b/w": (4, 4)})
    target = {"a/x": source["b/w"].T, "b/x": source["a/w"]}

    check_same(target, apply(learn(source, target, values=True), source))


def test_many_leaves_take_little_time() -> None:
    names = [f"{n}/e/{e}" for n in range(30) for e in range(40)]
    keys = [f"l/{name}/{w}" for name in names for w in ("gate", "up", "down")]
    source = dict.fromkeys(keys, np.zeros((2, 3), np.float32))
    singles = {f"x{n}y": np.zeros(n % 7 + 1, np.float32) for n in range(500)}

    text = learn(source | singles, {f"m/{key}": x for key, x in source.items()})

    assert "# 3,600 of 4,100 leaves of the source, 3,600 of 3,600" in text
    started = time.monotonic()
    learn(singles, {f"y{key}": x for key, x in singles.items()})
    many = {f"m{n % 200}/{n // 200}a": np.zeros(n + 2, np.uint8) for n in range(1_600)}
    learn(many, {f"y/{key}": np.zeros(len(x) + 1, np.uint8) for key, x in many.items()})
    assert time.monotonic() - started < 20
