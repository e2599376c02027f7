"""States of iterators and generators come back equal, and of the same types."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._items.iterators import MAX_STATE_DEPTH, from_json, to_json
from storesvc_client._items.values import decode, encode_item
from tests.support.same_values import is_same

NUMBERS = [
    *(np.bool_(True), np.int64(-3), np.uint8(255), np.float64(0.1)),
    *(np.float16(2), np.float32(np.inf), np.complex64(1 - 2j)),
]
ARRAYS = [
    np.arange(624, dtype=np.uint32),
    np.zeros((0, 3), np.float32),
    np.array(7, ">i4"),
    np.array([[True], [False]]),
    np.arange(12).reshape(3, 4).T,
    np.array([np.nan, -0.0]),
]
KEYS = st.text("ab%é[", max_size=3) | st.integers()
STATES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from(NUMBERS + ARRAYS),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(STATES)
def test_a_state_comes_back_equal_and_of_the_same_types(state: Any) -> None:
    encoded = encode_item(to_json(state) if not isinstance(state, bytes) else state)
    value = decode(encoded.kind, encoded.data)

    assert is_same(state, from_json(value))


@given(STATES)
def test_what_json_has_is_kept_as_it_is(state: Any) -> None:
    def is_plain(value: Any) -> bool:
        if type(value) is list:
            return all(map(is_plain, value))
        if type(value) is dict:
            return all(
                type(k) is str and not k.startswith("%") and is_plain(v)
                for k, v in value.items()
            )
        return type(value) in (type(None), bool, int, float, str)

    assert is_plain(state) == is_same(state, to_json(state))


def test_a_restored_array_can_be_written() -> None:
    array = from_json(to_json(np.arange(3)))

    array[0] = 7
    assert [7, 1, 2] == array.tolist()


class Tensor:
    """A class with the name of one of torch."""


BAD: dict[str, tuple[Any, str]] = {
    "a tensor": (
        {"rng": [Tensor()]},
        r"^at \['rng'\]\[0\]: expected a value of JSON, .* got \S*state_values.Tensor$",
    ),
    "nan": ({"gauss": float("nan")}, r"at \['gauss'\]: expected a finite number, got"),
    "a set": (({1},), r"at \[0\]: expected a value of JSON, .* got set"),
    "a dict of another class": (OrderedDict(a=1), "collections.OrderedDict"),
    "a tuple as key": ({"a": {(1,): 2}}, r"at \['a'\]: expected texts or integers as"),
    "a bool as key": ({True: 2}, "expected texts or integers as keys, got True"),
    "an array of objects": (np.array([{}]), "expected an array of numbers, got object"),
    "an array of texts": ([np.array("a")], r"at \[0\]: .* of numbers, got <U1"),
    "a time": (np.datetime64(0, "s"), "expected an array of numbers, got datetime64"),
    "a masked array": (np.ma.masked_array([1]), "got numpy.ma.*MaskedArray"),
}


@pytest.mark.parametrize(("state", "match"), BAD.values(), ids=BAD)
def test_a_state_that_would_come_back_as_another_is_rejected(
    state: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        to_json(state)


def nested(depth: int) -> Any:
    state: Any = b"x"
    for _ in range(depth):
        state = {1: state}
    return state


def test_states_may_be_nested_to_a_limit_that_json_keeps() -> None:
    deepest = nested(MAX_STATE_DEPTH)

    encoded = encode_item(to_json(deepest))
    assert deepest == from_json(decode(encoded.kind, encoded.data))
    with pytest.raises(ValueError, match="at most 50 lists and dicts within each"):
        to_json(nested(MAX_STATE_DEPTH + 1))


NO_STATES: dict[str, Any] = {
    "an unknown tag": {"%new": 1},
    "a tuple that is none": {"%tuple": 1},
    "bytes that are none": {"%bytes": "!"},
    "an array of other bytes": {"%array": ["<f8", [3], "AAAA"]},
    "an array of no dtype": {"%array": ["python", [3], "AAAA"]},
    "an array with too little": {"%array": ["<f8"]},
    "pairs that are none": {"a": [{"%dict": [1]}]},
}


@pytest.mark.parametrize("value", NO_STATES.values(), ids=NO_STATES)
def test_values_that_no_state_has_are_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r"expected what '%[a-z]+' holds in a state"):
        from_json(value)
