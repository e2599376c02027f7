"""Values that a document only describes are distinguished by content and code."""

import enum
import functools
import operator
import os
import re
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from storesvc_client.trees.structure import (
    common_differences,
    decode_graphdef,
    differences,
    fingerprint,
    rows,
)
from tests.modules import Holder, rngs
from tests.trees.test_structure_golden import store_setting, stored


class Slots:
    """An object without a ``__dict__``."""

    __slots__ = ("unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        """A method."""
        return self.value


class Table(dict[str, Any]):
    """A subclass of dict."""


class Text(str):
    """A subclass of str."""

    __slots__ = ()


class Number(float):
    """A subclass of int."""


class Pair(tuple[Any, ...]):
    """A subclass of tuple."""

    __slots__ = ()


class Items(list[Any]):
    """A subclass of list."""


class Mode(enum.Flag):
    """Settings that can be combined."""

    A = 1
    B = 2


def closure(value: Any) -> Callable[[Any], Any]:
    """Returns a function that differs from others only in the variables it captures."""
    return lambda x: x * value


def scale(x: Any) -> Any:
    """A function whose name a wrapper copies."""
    return 2 * x


@functools.wraps(scale)
def scale_more(x: Any) -> Any:
    """A wrapper."""
    return 10 * x


def deep(value: Any, depth: int) -> Any:
    """Returns plain data nested deeper than documents allow."""
    for _ in range(depth):
        value = {"k": value}
    return value


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "lambdas": (lambda x: nnx.relu(x) + x, lambda x: nnx.gelu(x) + x),
    "lambdas by a constant": (lambda x: x * 2.0, lambda x: x * 3.0),
    "lambdas by an operator": (lambda x: x * 2.0, lambda x: x + 2.0),
    "lambdas by a sign": (lambda x: -x, lambda x: x),
    "lambdas by an order": (
        lambda x: nnx.relu(nnx.gelu(x)),
        lambda x: nnx.gelu(nnx.relu(x)),
    ),
    "lambdas by a text": (lambda: "a", lambda: "b"),
    "lambdas in lambdas": (lambda: lambda x: x * 2.0, lambda: lambda x: x * 3.0),
    "jit of lambdas": (
        jax.jit(lambda x: nnx.relu(x) + x),
        jax.jit(lambda x: nnx.gelu(x) + x),
    ),
    "a function and what bears its name": (scale, scale_more),
    "complex numbers": (1j, 2j),
    "long numbers": (1 << 70, 1 << 71),
    "very long numbers": (1 << 90_000, (1 << 90_000) + 1),
    "ranges": (range(3), range(4)),
    "slices": (slice(0, 1), slice(1, 2)),
    "decimals": (Decimal(1), Decimal(2)),
    "fractions": (Fraction(1, 2), Fraction(1, 3)),
    "patterns": (re.compile("a"), re.compile("b")),
    "flags of patterns": (re.compile("a"), re.compile("a", re.IGNORECASE)),
    "paths": (Path("a"), Path("b")),
    "byte arrays": (bytearray(b"a"), bytearray(b"b")),
    "long bytes": (b"a" * 100 + b"1", b"a" * 100 + b"2"),
    "deques": (deque([1]), deque([2])),
    "lengths of deques": (deque([1], 2), deque([1], 3)),
    "mapping proxies": (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
    "default dicts": (defaultdict(int, a=1), defaultdict(int, a=2)),
    "defaults of dicts": (defaultdict(int, a=1), defaultdict(list, a=1)),
    "counters": (Counter("a"), Counter("b")),
    "dicts of a class": (Table(a=1), Table(a=2)),
    "strings of a class": (Text("a"), Text("b")),
    "numbers of a class": (Number(1), Number(2)),
    "tuples of a class": (closure(Pair((1,))), closure(Pair((2,)))),
    "lists of a class": (Items((1,)), Items((2,))),
    "slots": (Slots(1), Slots(2)),
    "getters of items": (operator.itemgetter(0), operator.itemgetter(1)),
    "getters of attributes": (operator.attrgetter("a"), operator.attrgetter("b")),
    "callers": (operator.methodcaller("a"), operator.methodcaller("b")),
    "methods of strings": ("a".startswith, "b".startswith),
    "methods of objects": (Slots(1).method, Slots(2).method),
    "modules": (jnp, jax.nn),
    "flags": (Mode.A, Mode.A | Mode.B),
    "arrays of objects": (
        closure(np.array([1, "a"], object)),
        closure(np.array([1, "b"], object)),
    ),
    "arrays of a partial": (
        partial(jnp.take, np.array([1, 2])),
        partial(jnp.take, np.array([3, 4])),
    ),
    "arrays of a closure": (closure(np.ones(2)), closure(np.zeros(2))),
    "complex scalars": (np.complex64(1j), np.complex64(2j)),
    "many keys": ({(i,): i for i in range(200)}, {(i,): -i for i in range(200)}),
    "data nested deeply": (deep(1, 20), deep(2, 20)),
    "data of many parts": (
        closure([(i,) for i in range(12_000)]),
        closure([(i,) for i in range(11_999)] + [(0,)]),
    ),
    "lengths": ([1] * 300 + [None], [1] * 300),
    "orders": (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)),
    "orders of filters": (
        nnx.StateAxes([(nnx.Param, 0), (nnx.Variable, 1)]),
        nnx.StateAxes([(nnx.Variable, 1), (nnx.Param, 0)]),
    ),
    "many items": ({(i,) for i in range(200)}, {(i,) for i in range(201)}),
    "keys that look alike": (closure({1: 2, "1": 3}), closure({1: 2, "1": 4})),
}


# comparing many parts takes seconds
EACH = [
    pytest.param(what, marks=pytest.mark.slow if "many parts" in what else ())
    for what in DIFFERENT
]


@pytest.mark.parametrize("what", EACH)
def test_a_difference_is_found_between(what: str) -> None:
    first, second = map(store_setting, DIFFERENT[what])

    assert [] != differences(first, second)
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.parametrize("what", EACH)
def test_nothing_differs_from_itself(what: str) -> None:
    first, second = DIFFERENT[what]

    assert [] == differences(store_setting(first), store_setting(first))
    assert [] == differences(store_setting(second), store_setting(second))


def built(power: int = 3) -> Any:
    """Defines functions and objects that only a description distinguishes."""

    def act(x: Any) -> Any:
        """The docstring is ignored, and a set has an order of its own."""
        return x**power if x.ndim in {1, 2, 3} else nnx.relu(x)

    return Holder(
        {
            "act": act,
            "mask": nnx.static({"a", "b", "c"}),
            "parts": nnx.static(SimpleNamespace(a=Table(b=1), c=Path("d"), e=Slots(1))),
            "wrapped": functools.wraps(act)(lambda x: -x),
            "linear": nnx.Linear(2, 2, rngs=rngs(power)),
            "drawn": closure(jax.random.normal(jax.random.key(power), (2,))),
        }
    )


def test_cached_values_are_no_difference() -> None:
    document = stored(built())

    assert [] == differences(document, stored(built()))
    assert [] == differences(document, stored(nnx.eval_shape(built)))
    assert [] != differences(document, stored(built(4)))


PROGRAM = """
from tests.trees.test_structure_contents import built, fingerprint, stored
print(fingerprint(stored(built())))
"""


@pytest.mark.slow
def test_another_process_describes_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONHASHSEED": "11"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert fingerprint(stored(built())) == done.stdout.strip()


def test_truncated_descriptions_are_marked() -> None:
    value: Any = 1
    for _ in range(9):
        value = SimpleNamespace(k=value)

    assert "types.SimpleNamespace (cut short)" in "".join(
        rows(store_setting(value)).values()
    )


def layered(act: Any, name: str = "mesh") -> Any:
    """A module that keeps its layers under a name that is ignored for settings."""
    layers = nnx.List([Holder({"act": act})])
    return stored(Holder({name: layers, "zz": nnx.data([layers[0]])}))


@pytest.mark.parametrize("name", ["mesh", "stored_mesh", "expert_mesh"])
def test_a_module_is_compared_whatever_it_is_called(name: str) -> None:
    found = differences(layered(nnx.relu, name), layered(nnx.gelu, name))

    assert [f"{name}/0/act: expected jax.nn.relu as saved, got jax.nn.gelu"] == [
        *map(str, found)
    ]


class Caching(nnx.Module):
    """A class with a cached table."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs())

    @cached_property
    def table(self) -> tuple[int, ...]:
        """The cached table."""
        return (1, 2, 3)


def test_cached_properties_are_not_stored() -> None:
    used, unused = Caching(), Caching()
    assert (1, 2, 3) == used.table

    assert stored(unused) == stored(used)
    assert nnx.graphdef(unused) == decode_graphdef(stored(used), allow=[Caching])


def of_release(**settings: Any) -> Any:
    """Returns the document of a flax release that has some attributes."""
    module = {"act": nnx.relu, "norm": nnx.LayerNorm(2, rngs=rngs()), **settings}
    return stored(Holder(module))


def test_settings_of_one_release_only_are_no_common_difference() -> None:
    older, newer = of_release(old_name=1), of_release(new_name=1, more={"a": 1})

    assert [] != differences(older, newer)
    assert [] == common_differences(older, newer)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"act": nnx.gelu}, "act: expected jax.nn.relu as saved, got jax.nn.gelu"),
        (
            {"norm": nnx.LayerNorm(2, epsilon=1e-3, rngs=rngs())},
            "norm/epsilon: expected 1e-06 as saved, got 0.001",
        ),
        (
            {"norm": nnx.BatchNorm(2, rngs=rngs())},
            "norm: expected flax.nnx.LayerNorm as saved, got flax.nnx.BatchNorm",
        ),
        ({"rate": 0.5}, "rate: expected 0.1 as saved, got 0.5"),
    ],
)
def test_settings_of_both_releases_are_compared(settings: Any, words: str) -> None:
    saved = of_release(rate=0.1, old_name=1)
    target = of_release(**{"rate": 0.1, "new_name": 2, **settings})

    assert [words] == [*map(str, common_differences(saved, target))]


def test_settings_of_both_releases_may_be_ignored() -> None:
    found = common_differences(
        of_release(rate=0.1), of_release(rate=0.5), ignore=["rate"]
    )

    assert [] == found
