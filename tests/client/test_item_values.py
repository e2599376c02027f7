"""Values are encoded so that they come back equal and of the same type, or rejected."""

import json
import sys
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc_client._items import values as items
from storesvc_client._items.values import (
    MAX_JSON_DEPTH,
    Encoded,
    decode,
    decode_value,
    encode_item,
    encode_python,
)
from storesvc_proto.v1 import tree_pb2 as pb
from tests.support.same_values import is_same

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


@given(JSON_VALUES)
def test_a_value_of_json_comes_back_as_it_was(value: Any) -> None:
    encoded = encode_item(value)

    assert is_same(value, decode(encoded.kind, encoded.data))
    assert (type(value) is str) == (encoded.kind == pb.LEAF_KIND_TEXT)


@given(JSON_VALUES, st.randoms())
def test_equal_values_have_equal_bytes(value: Any, random: Any) -> None:
    def shuffled(node: Any) -> Any:
        if type(node) is list:
            return [shuffled(each) for each in node]
        if type(node) is not dict:
            return node
        keys = list(node)
        random.shuffle(keys)
        return {key: shuffled(node[key]) for key in keys}

    assert encode_item(value) == encode_item(shuffled(value))


@given(st.integers() | st.integers(-(2**200), 2**200))
def test_an_integer_of_a_tree_comes_back_from_as_few_bytes_as_hold_it(
    value: int,
) -> None:
    encoded = encode_python(value)

    assert (encoded is None) == (-(2**63) <= value < 2**63)
    if encoded is not None:
        assert value == decode(encoded.kind, encoded.data)
        with pytest.raises(OverflowError):
            value.to_bytes(len(encoded.data) - 1, "little", signed=True)


@given(TEXTS)
def test_a_text_is_its_utf8(text: str) -> None:
    assert Encoded(pb.LEAF_KIND_TEXT, text.encode()) == encode_item(text)
    assert text == decode(pb.LEAF_KIND_TEXT, text.encode())


def test_json_is_canonical() -> None:
    value: Any = {"é": [1.0, -0.0, 10**30], "b": {}, "a": None, "c": 'x"\n\x7f'}

    text = '{"a":null,"b":{},"c":"x\\"\\n\x7f","é":[1.0,-0.0,' + "1" + "0" * 30 + "]}"
    assert text.encode() == encode_item(value).data


class Level(IntEnum):
    LOW = 1


BAD: dict[str, tuple[Any, str]] = {
    "a tuple": ((1, 2), "got tuple; use a list"),
    "bytes inside": ({"a": b""}, r"at \['a'\]: .* got bytes; make it an item of its"),
    "a value of a process inside": (
        [store.PerProcess(1)],
        "got PerProcess; make it the whole value of an item",
    ),
    "a tuple inside": ({"a": [(1,)]}, r"at \['a'\]\[0\]: .* got tuple; use a list"),
    "a set": ({1}, "got set; use a sorted list"),
    "an integer as key": ({"a": {1: 2}}, r"at \['a'\]: expected texts as keys, got 1"),
    "nan": ([float("nan")], r"at \[0\]: expected a finite number, got nan"),
    "infinity": (float("-inf"), "expected a finite number, got -inf"),
    "a number of NumPy": ({"lr": np.float64(0.1)}, r"got numpy.float64; use its item"),
    "an array": (np.zeros(3), "got numpy.ndarray; keep it in the tree"),
    "a bytearray": (bytearray(b"x"), "got bytearray; use bytes"),
    "an enumeration": (Level.LOW, "got .*Level; convert it"),
    "a dict of another class": (OrderedDict(a=1), "OrderedDict; convert it"),
    "a surrogate": ("a\ud800", "expected Unicode, got a text with the lone surrogate"),
    "a surrogate as key": ({"\ud800": 1}, "with the lone surrogate"),
    "an object": (object(), "expected a text, bytes, or a value of JSON, got object"),
    "a value within another": (store.PerProcess(1), "got .*PerProcess"),
    "too many digits": (10 ** sys.get_int_max_str_digits(), "store it as text"),
}


@pytest.mark.parametrize(("value", "match"), BAD.values(), ids=BAD)
def test_a_value_that_would_come_back_as_another_is_rejected(
    value: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        encode_item(value)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_values_may_be_nested_to_a_limit() -> None:
    deepest = nested(MAX_JSON_DEPTH)

    assert deepest == decode(pb.LEAF_KIND_JSON, encode_item(deepest).data)
    with pytest.raises(ValueError, match="at most 200 lists and dicts within each"):
        encode_item(nested(MAX_JSON_DEPTH + 1))


def test_a_value_that_contains_itself_is_rejected() -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(ValueError, match="at most 200 lists and dicts"):
        encode_item(value)


@pytest.mark.parametrize("value", ["xyz", b"abc", [1], 2**63])
def test_a_value_that_is_too_large_is_rejected(
    monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr(items, "MAX_ENCODED_BYTES", 2)

    with pytest.raises(ValueError, match="expected at most 2 bytes, got"):
        encode_item(value)


BAD_BYTES = {
    "text that is no UTF-8": (pb.LEAF_KIND_TEXT, b"\xff"),
    "JSON that ends early": (pb.LEAF_KIND_JSON, b'{"a":'),
    "JSON that is no UTF-8": (pb.LEAF_KIND_JSON, b'"\xff"'),
    "no JSON": (pb.LEAF_KIND_JSON, b""),
    "NaN": (pb.LEAF_KIND_JSON, b"[NaN]"),
    "JSON that is nested without end": (pb.LEAF_KIND_JSON, b"[" * 100_000),
}


@pytest.mark.parametrize(("kind", "data"), BAD_BYTES.values(), ids=BAD_BYTES)
def test_bytes_of_a_writer_that_broke_the_contract_are_data_loss(
    kind: Any, data: bytes
) -> None:
    with pytest.raises(store.DataLossError, match="item 'a': expected the encoding"):
        decode_value("%item/a", kind, data)


def test_the_decoder_agrees_with_the_json_of_python() -> None:
    value = {"a": [1, 2.5, None, True, "é"]}

    assert value == json.loads(encode_item(value).data)
