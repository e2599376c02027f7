"""Structures are compared by their settings, and a difference names its path."""

import json
import os
import subprocess
import sys
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import Mesh

from storesvc_client.trees import structure
from storesvc_client.trees.structure import fingerprint, rows
from tests.modules import CASES, Closure, Holder, Partitioned, rngs
from tests.support.stable_ids import stable_id
from tests.trees.test_structure_golden import store_setting, stored


def differences(*documents: Any, ignore: Any = ()) -> list[str]:
    return [*map(str, structure.differences(*documents, ignore=ignore))]


def norm(**more: Any) -> Any:
    """Returns the document of a LayerNorm with some settings."""
    return stored(nnx.Dict(norm=nnx.LayerNorm(4, rngs=rngs(), **more)))


def test_a_row_is_a_setting_by_path() -> None:
    found = rows(stored(nnx.Dict(a=nnx.List([nnx.Linear(2, 3, rngs=rngs())]))))

    assert {
        "": "flax.nnx.Dict",
        "a": "flax.nnx.List",
        "a/0": "flax.nnx.Linear",
        "a/0/bias": "flax.nnx.Param",
        "a/0/dot_general": "jax.lax.dot_general",
        "a/0/dtype": "None",
        "a/0/in_features": "2",
        "a/0/kernel": "flax.nnx.Param",
        "a/0/out_features": "3",
        "a/0/param_dtype": "float32",
        "a/0/precision": "None",
        "a/0/preferred_element_type": "None",
        "a/0/promote_dtype": "flax.nnx.promote_dtype",
        "a/0/use_bias": "True",
        "a/_length": "1",
    } == found


def test_a_setting_that_differs_is_named_with_both_values() -> None:
    assert ["norm/epsilon: expected 1e-06 as saved, got 0.001"] == differences(
        norm(epsilon=1e-6), norm(epsilon=1e-3)
    )


def test_a_setting_may_be_ignored() -> None:
    found = differences(norm(epsilon=1e-6), norm(epsilon=1e-3), ignore=["epsilon"])

    assert [] == found


def test_a_missing_layer_is_one_difference() -> None:
    def layers(count: int) -> Any:
        many = [nnx.Linear(1, 1, rngs=rngs()) for _ in range(count)]
        return stored(nnx.List(many))

    assert [
        "2: expected flax.nnx.Linear as saved, got nothing",
        "_length: expected 3 as saved, got 2",
    ] == differences(layers(3), layers(2))
    assert [
        "_length: expected 2 as saved, got 3",
        "2: expected nothing as saved, got flax.nnx.Linear",
    ] == differences(layers(2), layers(3))


def test_another_class_is_one_difference() -> None:
    saved = stored(nnx.Dict(a=nnx.Linear(2, 2, rngs=rngs())))
    target = stored(nnx.Dict(a=nnx.BatchNorm(2, rngs=rngs())))

    assert [
        "a: expected flax.nnx.Linear as saved, got flax.nnx.BatchNorm"
    ] == differences(saved, target)
    assert [
        "the module itself: expected flax.nnx.Dict as saved, got flax.nnx.List"
    ] == differences(saved, stored(nnx.List([])))


def test_a_variable_that_is_no_longer_shared_is_a_difference() -> None:
    tied = CASES["tied"].make()
    apart = CASES["tied"].make()
    apart.again = nnx.Linear(4, 4, rngs=rngs())

    found = differences(stored(tied), stored(apart))

    assert "encoder: expected the same as again as saved, got flax.nnx.Linear" in found


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        ((1, 2), [1, 2]),
        ({"a": (1, (2,))}, {"a": [1, [2]]}),
        (jnp.float32, jnp.dtype("float32")),
    ],
    ids=stable_id,
)
def test_a_round_trip_through_json_is_no_difference(saved: Any, target: Any) -> None:
    documents = [*map(store_setting, (saved, target))]

    assert [] == differences(*documents)
    assert fingerprint(documents[0]) == fingerprint(documents[1])


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("1", 1),
        (None, "None"),
        (jnp.float32, jnp.bfloat16),
        (nnx.relu, nnx.gelu),
        (partial(nnx.gelu, approximate=True), partial(nnx.gelu, approximate=False)),
        (nnx.initializers.normal(0.1), nnx.initializers.normal(0.2)),
        ("x" * 10_000 + "a", "x" * 10_000 + "b"),
        ((1, 2), (1, 2, 3)),
    ],
    ids=stable_id,
)
def test_another_setting_is_a_difference(saved: Any, target: Any) -> None:
    documents = [*map(store_setting, (saved, target))]

    assert 1 == len(differences(*documents))
    assert fingerprint(documents[0]) != fingerprint(documents[1])


def test_none_equals_an_absent_setting() -> None:
    documents = [stored(Holder({"x": 1, "y": None})), stored(Holder({"x": 1}))]

    assert [] == differences(*documents)
    assert [] == differences(*reversed(documents))
    assert fingerprint(documents[0]) == fingerprint(documents[1])


def test_captured_variables_are_a_difference() -> None:
    cubed, squared = (stored(Closure(rngs=rngs(), power=power)) for power in (3, 2))

    assert ["act/power: expected 3 as saved, got 2"] == differences(cubed, squared)


class Backend:
    """An object of a module with a cached property."""

    def __init__(self, name: str) -> None:
        self.name = name

    @cached_property
    def known(self) -> list[str]:
        """The cached names."""
        return [self.name, "others"]


def test_cached_properties_are_no_difference() -> None:
    used, unused = Backend("flash"), Backend("flash")
    assert ["flash", "others"] == used.known

    documents = [*map(store_setting, (used, unused, Backend("vanilla")))]

    assert [] == differences(documents[0], documents[1])
    assert 1 == len(differences(documents[0], documents[2]))


@pytest.mark.slow
def test_a_mesh_is_no_difference() -> None:
    def on(mesh: Mesh) -> Any:
        with jax.set_mesh(mesh):
            module = Partitioned(rngs=rngs())
        return stored(Holder({"module": module, "mesh": mesh}))

    names = ("fsdp", "tp")
    auto = (jax.sharding.AxisType.Auto,) * 2

    assert [] == differences(
        on(jax.make_mesh((1, 1), names, axis_types=auto)),
        on(jax.make_mesh((2, 2), names, axis_types=auto)),
    )


def test_numbers_and_names_are_different_keys() -> None:
    linear = nnx.Linear(1, 1, rngs=rngs())

    found = differences(stored({0: linear}), stored({"0": linear}))

    assert [
        "0: expected flax.nnx.Linear as saved, got nothing",
        "'0': expected nothing as saved, got flax.nnx.Linear",
    ] == found


PROGRAM = """
import json, sys
from tests.modules import CASES
from tests.trees.test_structure_golden import stored
from storesvc_client.trees.structure import fingerprint
print(json.dumps({n: fingerprint(stored(CASES[n].make())) for n in sys.argv[1:]}))
"""


@pytest.mark.slow
def test_another_process_has_the_same_fingerprints() -> None:
    names = ["closure", "settings", "tied"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    own = {name: fingerprint(stored(CASES[name].make())) for name in names}
    assert own == json.loads(done.stdout)


def difference(path: str, saved: str = "1", given: str = "2") -> structure.Difference:
    return structure.Difference(path, saved, given)


@pytest.mark.parametrize(
    ("paths", "merged"),
    [
        (["layers/0/eps", "layers/1/eps", "layers/2/eps"], ["layers/{0..2}/eps"]),
        (["layers/0/eps", "layers/2/eps"], ["layers/{0,2}/eps"]),
        (["a/0/b/0/x", "a/0/b/1/x", "a/1/b/0/x", "a/1/b/1/x"], ["a/{0..1}/b/{0..1}/x"]),
        (["a/0/b/0/x", "a/1/b/1/x"], ["a/0/b/0/x", "a/1/b/1/x"]),
        (["sizes[0].x", "sizes[1].x"], ["sizes[{0..1}].x"]),
        (["norm1/eps", "norm2/eps"], ["norm1/eps", "norm2/eps"]),
        (["layers/7/eps"], ["layers/7/eps"]),
    ],
)
def test_a_difference_of_many_layers_is_one(
    paths: list[str], merged: list[str]
) -> None:
    found = structure.merge_layers(map(difference, paths))

    assert merged == [each.path for each in found]


def test_a_setting_of_a_shared_config_is_one_difference() -> None:
    found = structure.merge_configs(
        [
            difference("layers/0/attention/base_config/eps"),
            difference("config/eps"),
            difference("config/eps", given="3"),
            difference("layers/0/eps"),
            difference("layers/1/eps"),
        ]
    )

    assert {
        ("config/eps", "2"),
        ("config/eps", "3"),
        ("layers/0/eps", "2"),
        ("layers/1/eps", "2"),
    } == {(each.path, each.given) for each in found}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("platform", True),
        ("text_config.attn_mechanism", True),
        ("layers/0/attention_performer/impl", True),
        ("layers/0/impl", False),
        ("layers/0/attention_performer/impl/softmax_scale", False),
        ("layers/0/my_platform", False),
        ("output_router_logits", False),
    ],
)
def test_only_how_a_model_is_computed_is_execution(path: str, expected: bool) -> None:
    assert expected is structure.is_execution(difference(path))
