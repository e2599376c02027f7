"""Hostile documents are rejected, and nothing outside the table is ever called."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.structure import (
    StructureError,
    decode_data,
    decode_graphdef,
    differences,
    encode_graphdef,
    fingerprint,
    rows,
)
from storesvc_client.trees.structure.names import BUILT_IN
from tests.modules import CASES, rngs
from tests.support.examples import examples
from tests.trees.test_structure_golden import stored

LINEAR = stored(nnx.Linear(2, 2, rngs=rngs()))
VARIABLE = {"variable": "flax.nnx:Param", "metadata": []}


def with_static(value: Any, key: str = "dot_general") -> Any:
    """Returns a document of a Linear with one changed static attribute."""
    document = json.loads(json.dumps(LINEAR))
    for pair in document["root"]["attributes"]:
        if pair[0] == key:
            pair[1] = {"static": value}
    return document


def node(attributes: Any, name: str = "flax.nnx:Module", **more: Any) -> Any:
    """Returns a document of one module."""
    root = {"node": name, "attributes": attributes, "data": [], **more}
    return {**LINEAR, "root": root}


def root(child: Any) -> Any:
    """Returns a document of any other child."""
    return {**LINEAR, "root": child}


def variable(metadata: Any, name: str = "flax.nnx:Param") -> Any:
    """Returns a document of one Variable."""
    return root({"variable": name, "metadata": metadata})


def container(kind: Any, *keys: Any) -> Any:
    """Returns a document of a container with Variables."""
    return root({"container": kind, "items": [[key, VARIABLE] for key in keys]})


def partial(value: Any, *args: Any, keywords: Any = ()) -> Any:
    return {"partial": value, "args": [*args], "keywords": [*keywords]}


def nested(depth: int, key: str) -> Any:
    """Returns a deeply nested static value."""
    value: Any = None
    for _ in range(depth):
        value = {key: [value]}
    return value


FUNCTIONS = [
    *("os:system", "posix:system", "builtins:eval", "builtins:exec", "builtins:open"),
    *("builtins:__import__", "subprocess:run", "jax.numpy:load", "jax.numpy:save"),
    *("numpy:load", "numpy:save", "numpy:memmap", "jax:pure_callback", "jax:jit"),
    *("jax.experimental:io_callback", "jax.debug:callback", "jax:jit.__globals__"),
    *("jax._src.config:os.system", "flax.nnx:jit", "flax.serialization:from_bytes"),
    *("jax.numpy:vectorize", "jax.numpy:fromfile", "functools:partial", "jax.nn"),
    *("jax.nn:relu.__call__", "jax.nn:__builtins__", "", ":", "jax.nn:", "__main__:f"),
]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("tag", ["function", "class", "enum", "linen", "named_tuple"])
def test_a_name_outside_the_table_is_rejected(name: str, tag: str) -> None:
    more: dict[str, Any] = {
        "enum": {"member": "x"},
        "linen": {"fields": []},
        "named_tuple": {"items": ["x"]},
    }
    value = {tag: name, **more.get(tag, {})}

    with pytest.raises(StructureError):
        decode_graphdef(with_static(value))


VALUES = {
    "a call of no factory": {"call": "jax:devices", "arguments": []},
    "a call of a function": {"call": "jax.nn:relu", "arguments": []},
    "a call of a list": {"call": [], "arguments": []},
    "a partial of subprocess": partial({"function": "subprocess:run"}, "id"),
    "a partial of a class": partial({"class": "flax.nnx:Linear"}),
    "keywords that are numbers": partial(
        {"function": "jax.nn:relu"}, keywords=[[1, 2]]
    ),
    "a function as a class": {"class": "jax.nn:relu"},
    "a class as a function": {"function": "flax.nnx:Linear"},
    "a class as an enumeration": {"enum": "flax.nnx:Linear", "member": "mro"},
    "no member": {"enum": "jax.lax:Precision", "member": "__class__"},
    "a class as a NamedTuple": {"named_tuple": "builtins:tuple", "items": []},
    "too many items": {"named_tuple": "optax:EmptyState", "items": [1]},
    "a linen class that is none": {"linen": "flax.nnx:Linear", "fields": []},
    "a linen field that is none": {"linen": "flax.linen:Dense", "fields": [["x", 1]]},
    "a linen parent": {"linen": "flax.linen:Dense", "fields": [["parent", 1]]},
    "a linen module without fields": {"linen": "flax.linen:Dense", "fields": []},
    "an unknown argument": {
        "call": "jax.nn.initializers:normal",
        "arguments": [["x", 1]],
    },
    "hooks of metadata": {
        "call": "flax.nnx:with_metadata",
        "arguments": [
            ["initializer", {"function": "jax.nn:relu"}],
            ["on_set_value", {"function": "jax.nn:relu"}],
        ],
    },
    "keys twice": {"dict": [["a", 1], ["a", 2]]},
    "keys that collide": {"dict": [[1, 1], [True, 2]]},
    "a key without a hash": {"dict": [[{"list": []}, 1]]},
    "a set of lists": {"set": [{"list": []}]},
    "pairs of three": {"dict": [[1, 2, 3]]},
    "no pairs": {"dict": 3},
    "a bare list": [1, 2],
    "a float that is none": {"float": "one"},
    "bytes that are none": {"bytes": "xyz"},
    "bytes of a number": {"bytes": 3},
    "a dtype that is none": {"dtype": "object", "as": "numpy"},
    "a form that is none": {"dtype": "float32", "as": "os"},
    "a scalar too short": {"scalar": "float32", "data": "00"},
    "a scalar of a list": {"scalar": [], "data": "00"},
    "axes that are none": {"spec": [3]},
    "two tags": {"tuple": [], "list": []},
    "no tag": {},
    "an unknown tag": {"import": "os"},
    "a number of a million bits": {"tuple": [1 << 1_000_000]},
    "an object": {"tuple": [object()]},
    "keys that are no strings": {"tuple": [{1: 2}]},
    "tuples nested 100 deep": nested(100, "tuple"),
    "2000 keys of one hash": {"dict": [[{"tuple": [i]}, 0] for i in range(2000)]},
}


@pytest.mark.parametrize("what", VALUES)
def test_invalid_values_are_rejected(what: str) -> None:
    with pytest.raises(StructureError):
        decode_graphdef(with_static(VALUES[what]))


@pytest.mark.slow
def test_tuples_nested_a_million_deep_are_rejected() -> None:
    deep = nested(1_000_000, "tuple")

    with pytest.raises(StructureError):
        decode_graphdef(with_static(deep))


DOCUMENTS = {
    "nothing": None,
    "a list": [],
    "without a root": {"format": LINEAR["format"]},
    "of a later format": {**LINEAR, "format": "storesvc.structure/2"},
    "of a format that is a list": {**LINEAR, "format": []},
    "with a root of text": root("x"),
    "with a child of no kind": root({}),
    "with a child of two kinds": root({"leaf": True, "static": 1}),
    "with a node that is a function": node([], "jax.nn:relu"),
    "with a node that is no module": node([], "builtins:dict"),
    "with a node that is a Variable": node([], "flax.nnx:Param"),
    "with a node of no name": {**LINEAR, "root": {"node": None, "attributes": []}},
    "with a Variable that is a module": variable([], "flax.nnx:Linear"),
    "with a Variable that is an array": variable([], "jax:Array"),
    "with metadata of hijax": variable([["hijax", True]]),
    "with metadata of numbers": variable([[1, True]]),
    "with a flag that is text": variable([["ref", "yes"]]),
    "with an index that comes later": node([["a", {"ref": 0}]]),
    "with an index of text": node([["a", {"ref": "0"}]]),
    "with an index that is true": node([["a", {"ref": True}]], index=1),
    "with an index twice": node([["a", {**VARIABLE, "index": 0}]], index=0),
    "with a negative leaf": root({"leaf": -1}),
    "with attributes out of order": node([["b", VARIABLE], ["a", VARIABLE]]),
    "with an attribute twice": node([["a", VARIABLE], ["a", VARIABLE]]),
    "with keys that collide": node([[0, VARIABLE], ["0", VARIABLE]], "flax.nnx:List"),
    "with a key that is a list": node([[[], VARIABLE]]),
    "with a key that is a float": node([[1.5, VARIABLE]]),
    "with attributes of text": node("x"),
    "without attributes": node(None),
    "with data of numbers": node([], data=[["a", 1]]),
    "with data of flax": node([], data=[["_pytree__is_pytree", False]]),
    "with flags of text": node([], state=["x", "y"]),
    "with three flags": node([], state=[False, False, False]),
    "with a list that starts at 1": container("list", 1),
    "with a container of no kind": container("set"),
    "with a dict of two kinds of keys": container("dict", 0, "a"),
    "with a NamedTuple that is none": container({"named_tuple": "numpy:memmap"}, "a"),
    "with a NamedTuple of other fields": container(
        {"named_tuple": "optax:EmptyState"}, "a"
    ),
    "with a container that is a hole": container({"opaque": {"class": "x:Y"}}, "a"),
}


@pytest.mark.parametrize("what", DOCUMENTS)
def test_a_document_is_rejected(what: str) -> None:
    with pytest.raises(StructureError):
        decode_graphdef(DOCUMENTS[what])


@pytest.mark.parametrize(
    "key",
    [
        *("__class__", "__dict__", "__init__", "__setattr__", "__getattribute__"),
        *("_pytree__nodes", "_pytree__state", "_pytree__is_pytree"),
    ],
)
def test_no_attribute_may_be_called(key: str) -> None:
    with pytest.raises(StructureError, match="names of attributes"):
        decode_graphdef(node([[key, {"static": {"class": "flax.nnx:Linear"}}]]))


class Watched(nnx.Module):
    """A module that records writes to its property."""

    touched = False

    @property
    def switch(self) -> None:
        """A property with a side effect."""

    @switch.setter
    def switch(self, _: Any) -> None:
        type(self).touched = True

    def __init__(self) -> None:
        type(self).touched = True


def test_no_property_of_a_class_is_set() -> None:
    name = f"{Watched.__module__}:{Watched.__qualname__}"

    with pytest.raises(StructureError, match="a method or property of it"):
        decode_graphdef(node([["switch", {"static": 1}]], name), allow=[Watched])

    assert not Watched.touched


def test_no_constructor_is_called() -> None:
    name = f"{Watched.__module__}:{Watched.__qualname__}"

    nnx.merge(decode_graphdef(node([], name), allow=[Watched]), nnx.State({}))

    assert not Watched.touched


def test_an_attribute_may_hide_a_method_of_its_own_module_only() -> None:
    document = node([["__call__"[2:-2], {"static": 3}]])

    assert 0 == decode_graphdef(document).num_leaves


@pytest.mark.slow
def test_a_million_levels_are_rejected_by_all_that_read_documents() -> None:
    deep: Any = None
    for _ in range(1_000_000):
        deep = [deep]

    for read in (decode_graphdef, rows, fingerprint, decode_data):
        with pytest.raises(StructureError, match="levels of nesting"):
            read(deep)


def test_a_list_with_too_many_values_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from storesvc_client.trees.structure import names

    monkeypatch.setattr(names, "MAX_VALUES", 1000)

    with pytest.raises(StructureError, match="at most 1000 values"):
        decode_graphdef(with_static({"tuple": [0] * 1001}))


@pytest.mark.parametrize("allow", [[3], [None], {"a": 3}, {3: nnx.Linear}])
def test_only_classes_and_functions_can_be_allowed(allow: Any) -> None:
    with pytest.raises(InvalidRequestError, match="allow: expected"):
        decode_graphdef(LINEAR, allow=allow)


@pytest.mark.parametrize("template", [3, "x", np.ones(3)])
def test_a_template_is_a_module(template: Any) -> None:
    with pytest.raises(InvalidRequestError, match="template: expected"):
        decode_graphdef(LINEAR, template=template)


def test_the_table_has_nothing_that_reads_writes_or_calls_back() -> None:
    forbidden = ("load", "save", "file", "callback", "compile", "jit", "frompyfunc")

    assert [] == [
        name for name in BUILT_IN if any(part in name.lower() for part in forbidden)
    ]


DOCUMENTS_TO_SPOIL = [stored(CASES[name].make()) for name in ("settings", "tied")]
_names = st.sampled_from(
    [
        *(*FUNCTIONS, "flax.nnx:Linear", "jax.nn:relu", "flax.nnx:Param", "__class__"),
        *("flax.linen:Dense", "jax.nn.initializers:normal", "optax:EmptyState"),
        *("jax.lax:Precision", "flax.nnx:with_metadata", "flax.nnx:List"),
    ]
)
_tags = st.sampled_from(
    [
        *("node", "variable", "ref", "leaf", "container", "static", "index", "data"),
        *("attributes", "items", "metadata", "function", "class", "call", "opaque"),
        *("tuple", "list", "dict", "set", "mapping", "state", "state_axes", "float"),
        *("partial", "args", "keywords", "linen", "fields", "dtype", "as", "enum"),
        *("named_tuple", "member", "spec", "scalar", "frozen_dict", "arguments"),
    ]
)
_json: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), _names),
        st.lists(_json, max_size=4),
        st.dictionaries(_tags, _json, max_size=4),
    )
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Returns every container of a document, with each of its keys."""
    stack = [value]
    while stack:
        inner = stack.pop()
        keys = inner if isinstance(inner, dict) else range(len(inner))
        for key in keys:
            yield inner, key
            if isinstance(inner[key], (dict, list)):
                stack.append(inner[key])


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """Draws a valid document with a few changes."""
    document = json.loads(json.dumps(draw(st.sampled_from(DOCUMENTS_TO_SPOIL))))
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(document))
        inner, key = found[draw(st.integers(0, len(found) - 1))]
        other, other_key = found[draw(st.integers(0, len(found) - 1))]
        match draw(st.integers(0, 3)):
            case 0:
                inner[key] = draw(_json)
            case 1:
                inner[key] = json.loads(json.dumps(other[other_key]))
            case 2:
                del inner[key]
            case _:
                inner[key] = draw(_names)
    return document


def calls_of(frame_names: set[str], read: Any, document: Any) -> None:
    """Reads a document; records the calls of functions in other files."""

    def note(event: str, arguments: Any) -> None:
        if event in {"import", "os.system", "subprocess.Popen", "exec", "open"}:
            frame_names.add(event)

    watching.append(note)
    try:
        read(document)
    except StructureError:
        pass
    finally:
        watching.remove(note)


watching: list[Any] = []
sys.addaudithook(lambda event, args: [note(event, args) for note in watching] and None)

FUZZ = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@given(spoiled())
@FUZZ
def test_a_corrupted_document_is_rejected_or_read(document: Any) -> None:
    seen: set[str] = set()

    calls_of(seen, lambda d: decode_graphdef(d, allow=CASES["tied"].allow), document)
    calls_of(seen, lambda d: differences(d, LINEAR), document)

    assert set() == seen


@given(_json)
@FUZZ
def test_any_json_is_rejected_or_read(value: Any) -> None:
    seen: set[str] = set()

    for read in (decode_graphdef, rows, fingerprint, decode_data):
        calls_of(seen, read, value)
        calls_of(seen, read, {**LINEAR, "root": value})
        calls_of(seen, read, with_static(value))
    calls_of(seen, lambda d: decode_graphdef(d, template=nnx.Dict()), value)

    assert set() == seen


def test_errors_name_place_and_advice() -> None:
    with pytest.raises(StructureError) as e:
        decode_graphdef(with_static({"function": "os:system"}))

    assert (
        "structure dot_general: expected a function that is allowed, got 'os:system'; "
        "if it is yours, pass it in allow=; or give the model's code in model=: "
        "its class, or a factory"
    ) == str(e.value)


def test_encoding_the_same_module_twice_gives_equal_documents() -> None:
    module = CASES["settings"].make()

    first, second = (encode_graphdef(nnx.graphdef(module)) for _ in range(2))

    assert json.dumps(first) == json.dumps(second)
