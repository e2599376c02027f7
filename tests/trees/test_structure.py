"""The structure of NNX modules is encoded as a document, and decoded from it."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings

from storesvc_client.errors import MismatchError, UnsupportedLeafError
from storesvc_client.trees.structure import (
    StructureError,
    decode_graphdef,
    differences,
    encode_graphdef,
    rows,
)
from tests.modules import ALLOW, CASES, Case, modules, rngs
from tests.support.examples import examples, sampled
from tests.trees.test_structure_golden import arrays, called, made, stored, template

WHOLE = [name for name, case in CASES.items() if not case.needs_template]


@cache
def document(name: str) -> Any:
    """Returns the document of a catalogue module after a round trip through JSON."""
    return json.loads(json.dumps(encode_graphdef(made(name)[0])))


@pytest.mark.parametrize("name", sampled(CASES, every=6, checked_every=2))
def test_a_decoded_module_returns_what_the_encoded_one_did(name: str) -> None:
    case = CASES[name]
    graphdef, state = made(name)

    decoded = decode_graphdef(document(name), allow=case.allow, template=template(name))

    assert rows(document(name)) == rows(encode_graphdef(decoded))
    assert called(case, graphdef, state) == called(case, decoded, state)


@pytest.mark.parametrize("name", sampled(WHOLE, every=6))
def test_only_closures_and_instances_are_holes(name: str) -> None:
    assert 0 == json.dumps(document(name)).count('"opaque"')


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].needs_template])
def test_a_hole_without_a_template_is_rejected(name: str) -> None:
    with pytest.raises(StructureError, match="its class, or a factory"):
        decode_graphdef(document(name), allow=CASES[name].allow)


@pytest.mark.parametrize("name", ["nested", "tied", "custom variable", "closure"])
def test_an_abstract_module_has_the_document_of_a_real_one(name: str) -> None:
    abstract = nnx.eval_shape(CASES[name].make)

    assert [] == differences(document(name), stored(abstract))


def test_an_abstract_template_makes_a_structure_that_takes_real_leaves() -> None:
    case = CASES["custom variable"]
    module = case.make()
    abstract = nnx.eval_shape(case.make)

    decoded = decode_graphdef(document("custom variable"), template=abstract)

    graphdef, state = nnx.split(module)
    assert called(case, graphdef, state) == called(case, decoded, state)


def test_shared_variables_stay_shared() -> None:
    graphdef, state = nnx.split(CASES["tied"].make())

    tied = nnx.merge(
        decode_graphdef(document("tied"), allow=CASES["tied"].allow), state
    )

    assert tied.encoder.kernel is tied.decoder.kernel
    assert tied.encoder is tied.again
    assert graphdef.num_leaves == len(jax.tree.leaves(state))


def test_a_child_finds_the_parent_that_it_is_in() -> None:
    _, state = nnx.split(CASES["cycle"].make())

    parent = nnx.merge(
        decode_graphdef(document("cycle"), allow=CASES["cycle"].allow), state
    )

    assert parent.child.parent is parent


def test_static_fields_keep_their_types() -> None:
    case = CASES["settings"]
    graphdef = decode_graphdef(document("settings"), allow=case.allow)

    module = nnx.merge(graphdef, nnx.state(case.make()))

    assert ("a", None, 2.5, True, 7) == module.names
    assert {"eps": 1e-6, "shape": (1, 2)} == module.table
    assert np.isnan(module.missing)
    assert b"\x00\xff" == module.code
    assert jax.numpy.bfloat16 is module.dtype
    assert jax.lax.Precision.HIGH is module.precision
    assert jax.nn.gelu is module.act


@given(modules())
@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_any_module_is_restored(module: Any) -> None:
    graphdef, state = nnx.split(module)

    decoded = decode_graphdef(stored(module), allow=ALLOW)

    assert rows(stored(module)) == rows(encode_graphdef(decoded))
    expected = dict(nnx.to_flat_state(state))
    got = dict(nnx.to_flat_state(nnx.state(nnx.merge(decoded, state))))
    assert list(expected) == list(got)
    assert graphdef.num_leaves == decoded.num_leaves


def test_a_name_that_is_a_number_stays_a_name() -> None:
    module = nnx.Dict({"0": nnx.Linear(1, 1, rngs=rngs()), "a/b": nnx.Param(1)})

    decoded = decode_graphdef(stored(module))

    assert nnx.graphdef(module) == decoded


class Chain(nnx.Module):
    """A linked list of modules, nested as deeply as it is long."""

    def __init__(self, length: int) -> None:
        self.rest = Chain(length - 1) if length else nnx.Param(1)


def test_modules_nested_too_deeply_to_be_read_are_not_written() -> None:
    with pytest.raises(UnsupportedLeafError, match="at most 40 nested modules"):
        encode_graphdef(nnx.graphdef(Chain(60)))


def test_every_written_document_can_be_read() -> None:
    chain = Chain(39)

    decoded = decode_graphdef(stored(chain), allow=[Chain])

    assert nnx.graphdef(chain) == decoded


def local_module() -> type[nnx.Module]:
    class Local(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(1, 1, rngs=rngs())

    return Local


@pytest.mark.parametrize(
    "allow",
    [
        pytest.param(lambda cls: [cls], id="the class"),
        pytest.param(
            lambda cls: {f"{cls.__module__}:{cls.__qualname__}": cls}, id="its name"
        ),
    ],
)
def test_a_class_of_the_callers_is_allowed_by(allow: Callable[[Any], Any]) -> None:
    cls = local_module()

    decoded = decode_graphdef(stored(cls()), allow=allow(cls))

    assert nnx.graphdef(cls()) == decoded


def test_a_class_that_was_not_allowed_is_named_with_its_place() -> None:
    cls = local_module()

    with pytest.raises(StructureError) as e:
        decode_graphdef(stored({"a": [cls()]}))

    assert (
        "structure a/0: expected an nnx.Module class that is allowed, got "
        "'tests.trees.test_structure:local_module.<locals>.Local'; if it is yours, "
        "pass it in allow=; or give the model's code in model=: its class, or a factory"
    ) == str(e.value)


def test_a_template_of_another_structure_is_rejected_with_the_path() -> None:
    saved = nnx.LayerNorm(4, epsilon=1e-6, rngs=rngs())
    template = nnx.LayerNorm(4, epsilon=1e-3, rngs=rngs())

    with pytest.raises(MismatchError) as e:
        decode_graphdef(stored(saved), template=template)

    assert (
        "template: expected the saved structure, got differences: "
        "epsilon: expected 1e-06 as saved, got 0.001; give a model like the saved one"
    ) == str(e.value)


def test_arrays_of_a_case_are_compared_bit_by_bit() -> None:
    case = Case(make=lambda: nnx.Linear(1, 1, rngs=rngs()), call=lambda m: m.kernel)
    module = case.make()

    assert arrays(np.float32(0.0)) != arrays(np.float32(-0.0))
    assert called(case, *nnx.split(module)) == called(case, *nnx.split(module))
