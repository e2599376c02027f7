"""The checkpoint decides dtypes of an optimizer's state, and kinds of PRNG keys."""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.trees.easydel import EasyDeLState
from tests.support.leaf_bits import key_data


@pytest.fixture
def run() -> Iterator[store.Run]:
    with store.connect("memory://") as client:
        yield client.run("tests/saved")


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(
            nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=rngs) for _ in range(3)
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make() -> Model:
    return Model(rngs=nnx.Rngs(0))


def leaves_of(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


def same(one: Any, other: Any) -> bool:
    first, second = leaves_of(one), leaves_of(other)
    return [*first] == [*second] and all(
        first[key].dtype == second[key].dtype
        and bool((first[key] == second[key]).all())
        for key in first
    )


def trained(dtype: Any) -> EasyDeLState:
    """Returns a state of bfloat16 parameters after a step with gradients of a dtype."""
    state = EasyDeLState.create(model=make(), tx=optax.adamw(1e-3), init_opt_state=True)
    grads = jax.tree.map(lambda x: x.astype(dtype) * 0.5 + 1, state.graphstate)
    return state.apply_gradients(grads=grads)


def dtypes_of(tree: Any) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("model", ["class", "factory", "state"])
def test_an_optimizer_that_moved_to_another_dtype_is_restored_in_it(
    run: store.Run, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    state = trained(jnp.float32)
    assert {"int32", "float32", "bfloat16"} >= dtypes_of(state.opt_state)
    assert "float32" in dtypes_of(state.opt_state)
    save = save_state(run, state)
    save.result()
    given: Any = {"class": Model, "factory": make, "state": state}[model]

    with caplog.at_level(logging.INFO):
        back = restore_state(run, model=given, tx=optax.adamw(1e-3))

    assert same(state.opt_state, back.opt_state)
    assert same(state.graphstate, back.graphstate)
    assert "leaves are restored with their saved dtypes" in caplog.text
    assert (
        "layers/{0..2}/kernel/value: expected float32 as saved, got bf" in caplog.text
    )
    assert save.rehearsal is not None
    assert save.rehearsal.result(60).ok


@pytest.mark.slow
def test_where_nothing_moved_nothing_is_logged(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    state = trained(jnp.bfloat16)
    save_state(run, state).result()

    with caplog.at_level(logging.INFO):
        restore_state(run, model=Model, tx=optax.adamw(1e-3))

    assert "their saved dtypes" not in caplog.text


def test_a_cast_decides_where_it_is_asked_for(run: store.Run) -> None:
    save_state(run, trained(jnp.float32)).result()

    back = restore_state(
        run, model=Model, tx=optax.adamw(1e-3), cast="float16", on_mismatch="log"
    )

    assert {"int32", "float16"} == dtypes_of(back.opt_state)


def test_parameters_of_another_dtype_are_rejected(run: store.Run) -> None:
    state = trained(jnp.float32)
    other = jax.tree.map(lambda x: x.astype(jnp.float32), state.graphstate)
    save_state(run, state.replace(graphstate=other)).result()

    with pytest.raises(store.MismatchError, match="graphstate/layers/0/bias/value"):
        restore_state(run, model=Model, tx=optax.adamw(1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_raw_keys_are_restored_raw_and_typed_ones_typed(
    run: store.Run, mesh: tuple[int, ...] | None
) -> None:
    typed = trained(jnp.bfloat16)
    raw = typed.replace(graphother=jax.tree.map(key_data, typed.graphother))
    save_state(run, typed.replace(step=1), rehearse="strict").result()
    save_state(run, raw.replace(step=2), rehearse="strict").result()
    options: dict[str, Any] = {}
    if mesh is not None:
        devices = np.array(jax.devices()).reshape(mesh)
        options = {"mesh": Mesh(devices, ("a", "b")), "rules": [("kernel", P("a"))]}
        options["rules"].append(("", P()))

    for step, state in ((1, typed), (2, raw)):
        for model in (Model, make, typed, raw):
            back = restore_state(
                run, step, model=model, tx=optax.adamw(1e-3), **options
            )
            assert same(state.graphother, back.graphother)


def test_keys_of_another_shape_are_rejected(run: store.Run) -> None:
    state = trained(jnp.bfloat16)
    bad = jnp.zeros(3, jnp.uint32)
    wrong = jax.tree.map(lambda x: x if key_data(x) is x else bad, state.graphother)
    save_state(run, state.replace(graphother=wrong), rehearse="off").result()

    with pytest.raises(store.MismatchError, match="in the target PRNG keys"):
        restore_state(run, model=Model, tx=optax.adamw(1e-3))


def test_a_rule_longer_than_a_leaf_makes_a_spec_that_jax_takes(run: store.Run) -> None:
    mesh = jax.make_mesh((2, 4), ("ep", "tp"))
    tree = {"row": jnp.ones((4, 32)), "kernel": jnp.ones((4, 32, 8)), "x": jnp.ones(4)}
    run.save(1, tree).result()

    for spec in (P("ep", "tp", None), P("ep", None, None, None)):
        indivisible: Any = "replicate" if "tp" in spec else "error"
        back: Any = run.restore(
            1, like=tree, mesh=mesh, rules=[("", spec)], indivisible=indivisible
        )

        for key, leaf in back.items():
            assert len(leaf.sharding.spec) <= leaf.ndim, key
            out = jax.jit(lambda x: x + 1, out_shardings=leaf.sharding)(leaf)
            assert out.sharding == leaf.sharding
        step = run.latest().step + 1
        run.save(step, back).result()
        recorded = run.restore(step, mesh=mesh, rules="recorded")
        assert all(
            leaf.sharding.is_equivalent_to(recorded[key].sharding, leaf.ndim)
            for key, leaf in back.items()
        )


def test_an_array_whose_spec_is_longer_than_its_rank_is_saved(run: store.Run) -> None:
    mesh = jax.make_mesh((2, 4), ("ep", "tp"))
    long = NamedSharding(mesh, P("ep", None))
    leaf = jax.jit(lambda: jnp.ones((4, 8)), out_shardings=long)()

    run.save(1, {"a": leaf}).result()

    assert P("ep") == run.restore(1, mesh=mesh, rules="recorded")["a"].sharding.spec


def test_a_step_of_a_weak_type_is_a_plain_one_after_a_restore(run: store.Run) -> None:
    traced = []

    @jax.jit
    def advance(step: jax.Array) -> jax.Array:
        traced.append(step.aval)
        return step + 1

    state = trained(jnp.float32).replace(step=jnp.asarray(7))
    advance(state.step)
    save_state(run, state).result()
    back = restore_state(run, model=make, tx=optax.adamw(1e-3))
    advance(back.step)
    advance(jnp.asarray(int(back.step)))  # as in docs/easydel.md

    assert [True, False] == [aval.weak_type for aval in traced]
    assert (7, jnp.int32) == (int(back.step), back.step.dtype)
