"""NNX modules in a store: a restored module computes what the saved one did."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.graphs import split_module
from tests.modules import ALLOW, CASES, Case, modules
from tests.support.examples import examples, sampled
from tests.support.leaf_bits import leaf_bits


def leaves(module: Any) -> Any:
    return leaf_bits(split_module(module)[1:])


def assert_equal_outputs(expected: Any, actual: Any) -> None:
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


@pytest.mark.parametrize(
    "case", sampled(CASES.values(), every=5, checked_every=2), ids=list(CASES)
)
def test_a_module_is_restored_by_its_code(run: store.Run, case: Case) -> None:
    module = case.make()
    save_model(run, 0, module).result()

    # `jax.set_mesh`, which this module calls, does not work in an abstract call.
    model = case.make() if case is CASES["partitioned"] else case.make
    back = restore_model(run, model=model)

    assert type(module) is type(back)
    assert leaves(module) == leaves(back)


@pytest.mark.parametrize(
    "case",
    sampled(
        (case for case in CASES.values() if not case.needs_template),
        every=6,
        checked_every=2,
    ),
    ids=[name for name, case in CASES.items() if not case.needs_template],
)
def test_a_module_is_restored_by_its_stored_structure(
    run: store.Run, case: Case
) -> None:
    module = case.make()
    save_model(run, 0, module).result()

    back = restore_model(run, allow=case.allow)

    assert type(module) is type(back)
    assert leaves(module) == leaves(back)
    assert_equal_outputs(case.call(module), case.call(back))


def test_values_that_no_document_holds_need_code(run: store.Run) -> None:
    case = CASES["closure"]
    save_model(run, 0, case.make()).result()

    with pytest.raises(store.StoreError, match=r"template|model"):
        restore_model(run, allow=case.allow)


def test_a_class_that_is_not_allowed_is_named(run: store.Run) -> None:
    case = CASES["perceptron"]
    save_model(run, 0, case.make()).result()

    with pytest.raises(store.StoreError, match=r"Perceptron.*allow"):
        restore_model(run)


def test_a_module_is_restored_on_a_mesh_in_another_dtype(run: store.Run) -> None:
    case = CASES["perceptron"]
    module = case.make()
    save_model(run, 0, module).result()
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    back = restore_model(
        run,
        allow=case.allow,
        mesh=mesh,
        rules=[("kernel", P("a", "b")), ("", P())],
        cast=jnp.bfloat16,
    )

    kernel = back.first.kernel.get_value()
    assert (jnp.bfloat16, P("a", "b")) == (kernel.dtype, kernel.sharding.spec)
    assert jnp.float32 == back.norm.mean.get_value().dtype


class Named(nnx.Module):
    """A module whose kernel names mesh axes."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.ones, ("a", "b"))
        self.linear = nnx.Linear(8, 8, kernel_init=init, rngs=rngs)


def test_a_module_that_names_axes_is_made_on_the_mesh(run: store.Run) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    with jax.set_mesh(mesh):
        module = Named(rngs=nnx.Rngs(0))
    save_model(run, 0, module).result()

    back = restore_model(run, model=Named, mesh=mesh, rules=[("", P("b"))])

    assert leaves(module) == leaves(back)
    assert P("b") == back.linear.kernel.get_value().sharding.spec


def test_a_module_and_a_state_stand_for_each_other(run: store.Run) -> None:
    module = CASES["perceptron"].make()
    make = CASES["perceptron"].make
    save_model(run, 0, module).result()
    save_state(run, EasyDeLState.create(step=1, model=module)).result()

    from_state = restore_model(run, 1, model=make)
    from_model = restore_state(run, 0, model=make, missing="init")

    assert leaves(module) == leaves(from_state) == leaves(from_model.model)
    assert 0 == from_model.step


def test_a_module_is_saved_and_restored_as_any_other_tree_is(run: store.Run) -> None:
    module = CASES["perceptron"].make()
    events: list[store.Progress] = []
    saved = save_model(run, 0, module, snapshot="none", progress=events.append)
    assert saved.done()

    back = restore_model(run, model=CASES["perceptron"].make, progress=events.append)

    assert leaves(module) == leaves(back)
    assert ["save", "restore"] == [p.what for p in events if p.is_done]


def test_objects_that_are_not_modules_are_rejected(run: store.Run) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected an nnx"):
        save_model(run, 0, "no module")
    run.save(0, {"x": jnp.ones(3)}).result()
    with pytest.raises(store.InvalidRequestError, match="holds no structure"):
        restore_model(run)


_steps = iter(range(10**6))


@given(module=modules())
@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_module_is_restored(run: store.Run, module: Any) -> None:
    step = next(_steps)
    save_model(run, step, module).result()

    back = restore_model(run, step, allow=ALLOW)

    assert leaves(module) == leaves(back)
    assert nnx.graphdef(module) == nnx.graphdef(back)
