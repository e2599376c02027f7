"""Configurations are stored as plain data and restored unchanged."""

import enum
import json
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from storesvc_client.trees.structure import (
    Opaque,
    StructureError,
    decode_data,
    encode_data,
)
from tests.support.stable_ids import stable_id


class Mode(enum.StrEnum):
    """A setting of a configuration."""

    FAST = "fast"


@dataclass
class Rope:
    """A part of a configuration that is not plain data."""

    theta: float
    mesh: Any = None


def back(value: Any) -> Any:
    """Returns a value after encoding, a round trip through JSON, and decoding."""
    return decode_data(json.loads(json.dumps(encode_data(value), sort_keys=True)))


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(_scalars, inner, max_size=3),
        st.sets(_scalars, max_size=3),
        st.frozensets(_scalars, max_size=3),
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """Returns a value with the types of its parts, because 1 == True == 1.0."""
    if isinstance(value, dict):
        return dict, [(typed(k), typed(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(typed, value)))
    if isinstance(value, (list, tuple)):
        return type(value), [typed(item) for item in value]
    return type(value), repr(value)


@given(_values)
@settings(deadline=None)
def test_plain_data_is_restored_with_its_types(value: Any) -> None:
    assert typed(value) == typed(back(value))


@pytest.mark.parametrize(
    "value",
    [
        *(jnp.float32, jnp.bfloat16, jnp.bool_, np.float32, np.int8),
        *(np.dtype("float16"), jnp.dtype("bfloat16")),
        *(PartitionSpec("fsdp", None, ("tp", "sp")), PartitionSpec()),
        *(math.inf, -math.inf, -0.0, ..., np.float32(1e-5), np.int64(7)),
    ],
    ids=repr,
)
def test_a_setting_is_restored(value: Any) -> None:
    decoded = back(value)

    assert typed(value) == typed(decoded)


def test_nan_is_restored() -> None:
    assert math.isnan(back(math.nan))


def test_a_member_of_an_enumeration_is_restored_as_its_value() -> None:
    assert {"mode": "fast"} == back({"mode": Mode.FAST})


def test_values_that_are_not_plain_are_restored_as_descriptions() -> None:
    decoded = back({"rope": Rope(theta=1e4), "act": jax.nn.gelu})

    assert {
        "rope": Opaque({"class": f"{__name__}:Rope", "fields": [["theta", 1e4]]}),
        "act": Opaque(decoded["act"].description),
    } == decoded


def test_a_description_has_no_address_and_no_mesh() -> None:
    first, second = (
        encode_data([Rope(1.0, mesh=object()), lambda x: x, jnp.ones(2), object()])
        for _ in range(2)
    )

    assert first == second
    assert "0x" not in json.dumps(first)


def test_data_that_contains_itself_is_described() -> None:
    value: dict[str, Any] = {}
    value["self"] = value

    assert {"self": Opaque({"class": "builtins:dict"})} == back(value)


def test_an_integer_too_long_for_a_setting_is_described() -> None:
    fields = [["(value)", "0x10000000000000000000000000"]]

    assert Opaque({"class": "builtins:int", "fields": fields}) == back(1 << 100)


@pytest.mark.parametrize(
    "document",
    [
        {"function": "jax.nn:relu"},
        {"class": "builtins:int"},
        {"opaque": 3},
        {"dict": [[{"dict": []}, 1]]},
        {"tuple": 3},
        [],
        {},
        object(),
    ],
    ids=stable_id,
)
def test_a_document_without_plain_data_is_rejected(document: Any) -> None:
    with pytest.raises(StructureError):
        decode_data(document)
