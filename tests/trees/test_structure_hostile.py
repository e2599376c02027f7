"""Hostile documents cannot hide code in a module, or make reading slow."""

import json
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import pytest
from flax import nnx

from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.structure import (
    StructureError,
    decode_data,
    decode_graphdef,
    differences,
    encode_data,
    fingerprint,
    rows,
)
from storesvc_client.trees.structure.encoder import make_skeleton
from tests.modules import CASES, rngs
from tests.trees.test_structure_rejections import (
    LINEAR,
    VARIABLE,
    node,
    root,
    with_static,
)

RELU = {"static": {"function": "jax.nn:relu"}}
QUICK_S = 20.0
"""Maximum seconds; each takes a fraction of that, and took minutes before it was
fixed."""


class Layer(nnx.Module):
    """A class with everything that an attribute could shadow."""

    eps = 1e-6
    limit = None
    act: Any = nnx.relu

    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs())

    def helper(self) -> int:
        """A method."""
        return 1

    @classmethod
    def build(cls) -> int:
        """A class method."""
        return 1

    @staticmethod
    def pure() -> int:
        """A static method."""
        return 1

    @property
    def width(self) -> int:
        """A property."""
        return 1

    @cached_property
    def table(self) -> int:
        """A cached property."""
        return 1

    def _get_partition_rules(self) -> int:
        return 1


NAME = f"{__name__}:Layer"


@pytest.mark.parametrize(
    "key",
    [
        *("helper", "build", "pure", "width", "table", "_get_partition_rules"),
        *("train", "eval", "sow", "_setattr", "_graph_node_flatten"),
    ],
)
def test_no_attribute_shadows_a_method_of_its_class(key: str) -> None:
    with pytest.raises(StructureError, match="a method or property of it"):
        decode_graphdef(node([[key, RELU]], NAME), allow=[Layer])


def test_an_attribute_may_override_a_declaration_or_default() -> None:
    static = [["act", RELU], ["eps", {"static": 2.0}], ["limit", {"static": 3}]]

    module = nnx.merge(
        decode_graphdef(node(static, NAME), allow=[Layer]), nnx.State({})
    )

    assert (jax.nn.relu, 2.0, 3) == (module.act, module.eps, module.limit)


@pytest.mark.parametrize(
    "entry",
    [
        *(["on_get_value", {"function": "jax.nn:relu"}], ["on_set_value", 3]),
        *(["on_add_axis", None], ["ref", True]),
    ],
)
def test_no_hook_or_reference_comes_from_a_document(entry: Any) -> None:
    variable = {"variable": "flax.nnx:Param", "metadata": [entry]}

    with pytest.raises(StructureError, match="give the model's code in model="):
        decode_graphdef(root({"container": "dict", "items": [["a", variable]]}))


def test_no_hook_of_an_initializer_comes_from_a_document() -> None:
    relu = {"function": "jax.nn:relu"}
    arguments = [["initializer", relu], ["get_value_hooks", {"tuple": [relu]}]]

    with pytest.raises(StructureError):
        decode_graphdef(
            with_static({"call": "flax.nnx:with_metadata", "arguments": arguments})
        )


REF = {"ref": 0}
HIDDEN = {
    "a module": REF,
    "a list of one": {"container": "list", "items": [[0, REF]]},
    "a dict of one": {"container": "dict", "items": [["a", REF]]},
    "a tuple of a list of one": {
        "container": "tuple",
        "items": [[0, {"container": "list", "items": [[0, REF]]}]],
    },
    "a Variable": {"container": "list", "items": [[0, VARIABLE]]},
    "an array": {"container": "list", "items": [[0, {"leaf": True}]]},
}


@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("data", [[], [["zz", False]]], ids=["unmarked", "static"])
def test_no_static_attribute_holds(what: str, data: Any) -> None:
    attributes = [["aa", VARIABLE], ["zz", HIDDEN[what]]]
    flags = [["aa", True], *data]

    with pytest.raises(StructureError, match="modules and arrays that are data"):
        decode_graphdef(
            {**LINEAR, "root": {**node(attributes, index=0)["root"], "data": flags}}
        )


def test_an_attribute_that_is_data_may_hold_a_module() -> None:
    listed = {"container": "list", "items": [[0, REF]]}
    document = node([["zz", listed]], index=0)
    document["root"]["data"] = [["zz", True]]

    module = nnx.merge(decode_graphdef(document), nnx.State({}))

    assert module.zz[0] is module


def local(text: str) -> type[nnx.Module]:
    class Local(nnx.Module):
        said = text

    return Local


def claiming(name: str) -> Any:
    """Returns a function with the name of another."""

    def fake(x: Any) -> Any:
        return -x

    fake.__module__, fake.__qualname__ = name.split(":")
    return fake


@pytest.mark.parametrize(
    ("allow", "words"),
    [
        ([local("a"), local("b")], "expected one object named"),
        ([claiming("jax.nn:relu")], "another object of that name"),
        (None, "a list of classes and functions, got a NoneType"),
        (Layer, "a list of classes and functions, got Layer"),
        ("x", "a list of classes and functions, got a str"),
    ],
)
def test_allowed_names_are_unambiguous(allow: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"allow: .*{words}"):
        decode_graphdef(LINEAR, allow=allow)


def test_a_mapping_puts_another_function_in_the_place_of_a_built_in_one() -> None:
    fake = claiming("jax.nn:relu")
    document = node([["act", RELU]], NAME)

    graphdef = decode_graphdef(document, allow={"jax.nn:relu": fake, NAME: Layer})

    assert fake is nnx.merge(graphdef, nnx.State({})).act


def test_one_class_may_be_allowed_twice() -> None:
    assert 0 == decode_graphdef(node([], NAME), allow=[Layer, Layer]).num_leaves


def quick(read: Any, value: Any) -> None:
    """Reads a document, which may be rejected but not slowly."""
    start = time.monotonic()
    try:
        read(value)
    except StructureError as e:
        assert len(str(e)) < 1000
    assert time.monotonic() - start < QUICK_S


def colliding(length: int, count: int) -> Any:
    """Returns a dict of keys with one hash, as -1.0 and -2.0 have."""
    signs = [[-1.0 if i >> b & 1 else -2.0 for b in range(10)] for i in range(count)]
    return {"dict": [[{"tuple": [-1.0] * length + s}, 0] for s in signs]}


def chain(depth: int) -> Any:
    """Returns a value whose text turns out to be too long only at its end."""
    value: Any = {"dict": []}
    for _ in range(depth):
        value = {"tuple": [{"tuple": []}] * 90 + [value]}
    return value


SLOW = {
    "the same key 100000 times": {"dict": [["a", 1]] * 100_000},
    "keys of one hash": colliding(600, 1000),
    "texts within texts": chain(80),
    "many texts within texts": {"list": [json.loads(json.dumps(chain(6)))] * 200},
    "a key of a million characters": {
        "dict": [["k" * 1_000_000, {"tuple": list(range(2000))}]]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SLOW)
def test_a_reader_does_not_wait_for(what: str) -> None:
    quick(decode_data, SLOW[what])
    for read in (decode_graphdef, rows, fingerprint):
        quick(read, with_static(SLOW[what]))


def test_keys_that_are_too_many_to_be_read_are_described() -> None:
    keys = {(i,): i for i in range(101)}
    long = {tuple(range(17)): 1}

    assert {"opaque"} == encode_data(keys).keys() == encode_data(long).keys()
    assert {(1, 2): 3} == decode_data(encode_data({(1, 2): 3}))


@pytest.mark.parametrize("read", [decode_graphdef, rows])
def test_a_long_key_of_a_module_is_rejected_or_cut(read: Any) -> None:
    quick(read, node([["k" * 1_000_000, {"static": {"tuple": [1] * 300}}]]))


def test_a_long_key_of_json_is_rejected() -> None:
    with pytest.raises(StructureError, match="at most 1000 characters"):
        rows({**LINEAR, "k" * 1001: 1})


@pytest.mark.parametrize(
    "child", [{"leaf": True}, VARIABLE, {"static": 1}, {"ref": 0}], ids=str
)
def test_a_root_is_a_module_or_container(child: Any) -> None:
    with pytest.raises(StructureError, match="a module or container at its root"):
        decode_graphdef(root(child))
    with pytest.raises(StructureError, match="a module or container at its root"):
        decode_graphdef(root(child), template=CASES["linear"].make())


EVIL = "z\x1b[2Jz\nERROR \ud800\u202e" + "y" * 500


@pytest.mark.parametrize(
    "document",
    [
        *(node([[EVIL, {"static": 1}]]), node([], EVIL), node([[EVIL, {"leaf": 1}]])),
        *(with_static({"function": EVIL}), with_static({"dict": [[EVIL, EVIL]]})),
        with_static({"opaque": {"class": EVIL, "fields": [[EVIL, {"bytes": EVIL}]]}}),
        with_static({"opaque": {"array": EVIL, "shape": [EVIL], "digest": EVIL}}),
        with_static({"enum": EVIL, "member": EVIL}),
        with_static({"call": "jax.nn.initializers:normal", "arguments": [[EVIL, 1]]}),
        with_static({"ordered_dict": [[EVIL, 1]]}),
        with_static({"call": EVIL, "arguments": []}),
        node([["a", {"variable": "flax.nnx:Param", "metadata": [[EVIL, {}]]}]]),
        node([["a", {"variable": EVIL, "metadata": [[EVIL, 1]]}]]),
        node([["a", {"container": EVIL, "items": [[EVIL, {"static": 1}]]}]]),
        {**LINEAR, "format": EVIL},
    ],
)
def test_no_text_of_a_document_reaches_a_message_raw(document: Any) -> None:
    readers: list[Callable[[Any], list[str]]] = [
        lambda d: [str(decode_graphdef(d).num_leaves)],
        lambda d: [*map(str, differences(d, LINEAR))],
        lambda d: [fingerprint(d)],
    ]
    said: list[str] = []
    for read in readers:
        try:
            said += read(document)
        except StructureError as e:
            said.append(str(e))

    assert all(text.isascii() and text.isprintable() for text in said)
    assert max(map(len, said)) < 1000


def test_placeholders_hold_nothing_that_was_in_memory() -> None:
    _, leaves = make_skeleton(nnx.graphdef(nnx.Linear(2, 2, rngs=rngs())))

    assert [0.0, 0.0] == [float(leaf) for leaf in leaves]
