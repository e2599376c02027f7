"""Placement of restored leaves: rules on a mesh, and what a mesh cannot do."""

import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc.format.trees import SavedSharding
from storesvc_client._pytree.leaves import named_leaves
from storesvc_client._pytree.partition_rules import shardings_by_rules
from storesvc_client._pytree.restore_target import saved_placement
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.blueprints import (
    follow_parameters,
    required_shardings,
    reshard,
    shardings_by_key,
)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def test_rules_place_the_leaves_whose_keys_they_are_found_in(
    run: store.Run, mesh: Mesh
) -> None:
    tree = {"k": {"kernel": jnp.ones((8, 4))}, "bias": jnp.ones(4), "n": jnp.ones(())}
    run.save(0, tree).result()

    back = run.restore(0, mesh=mesh, rules=[("kernel$", P("a", "b")), ("", P())])

    assert P("a", "b") == back["k"]["kernel"].sharding.spec
    assert P() == back["bias"].sharding.spec
    assert P() == back["n"].sharding.spec
    assert mesh == back["bias"].sharding.mesh


def test_axes_that_do_not_divide_a_leaf_are_an_error_unless_it_is_replicated(
    run: store.Run, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    odd = jnp.arange(28.0).reshape(7, 4)
    saved = {
        "even": jnp.ones((8, 4)),
        "odd": odd,
        "row": jnp.ones(8),
        "n": jnp.ones(()),
    }
    run.save(0, saved).result()
    rules = [("", P("a", "b"))]

    with pytest.raises(store.MismatchError) as caught:
        run.restore(0, mesh=mesh, rules=rules)
    with pytest.raises(store.MismatchError, match="'odd': dimension 0 of 7 is not div"):
        run.restore(0, mesh=mesh, rules=rules, like=saved, missing="keep")
    with caplog.at_level(logging.WARNING, "storesvc_client"):
        back = run.restore(0, mesh=mesh, rules=rules, indivisible="replicate")

    assert (
        f"{run.name}@0 does not fit the target: leaf 'odd': dimension 0 of 7 is not "
        f"divisible by axis 'a' of 4; leaf 'row': {P('a', 'b')} splits "
        "dimension 1 of the shape (8,); to leave such dimensions whole, pass "
        "indivisible='replicate'"
    ) == str(caught.value)

    assert P("a", "b") == back["even"].sharding.spec
    assert P(None, "b") == back["odd"].sharding.spec
    assert P("a") == back["row"].sharding.spec
    np.testing.assert_array_equal(np.asarray(odd), np.asarray(back["odd"]))
    (message,) = caplog.messages
    assert "dropped for 2 leaves: leaf 'odd': dimension 0 of 7 is not" in message


def test_recorded_shardings_apply_on_a_mesh_of_another_shape(
    run: store.Run, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    saved = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("b", "a")))
    run.save(0, {"x": saved, "y": jnp.ones(3)}).result()
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("b", "c"))

    with pytest.raises(store.MismatchError, match="leaf 'x': it was split by axis 'a'"):
        run.restore(0, mesh=other, rules="recorded")
    back = run.restore(0, mesh=other, rules="recorded", indivisible="replicate")

    assert (other, P("b")) == (back["x"].sharding.mesh, back["x"].sharding.spec)
    assert P() == back["y"].sharding.spec
    assert "'x': it was split by axis 'a', and the mesh has only 'b' and 'c'" in (
        caplog.text
    )


def test_a_saved_mesh_whose_size_overflows_an_integer_is_another_mesh() -> None:
    sizes = (jax.device_count(), 2**61 + 1)  # 2^64 + 8 devices
    saved = SavedSharding(axis_names=("a", "b"), axis_sizes=sizes, spec=())

    assert saved_placement(saved, "float32") is None


def test_a_leaf_that_no_rule_matches_is_named(run: store.Run, mesh: Mesh) -> None:
    run.save(0, {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}).result()

    with pytest.raises(store.MismatchError, match="leaf 'kernel': no rule matches"):
        run.restore(0, mesh=mesh, rules=[("bias", P())])


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ([("(", P())], r"rule '\(' is not a regular"),
        ([("", P("z"))], r"rule '': expected axes of the mesh.*got 'z'"),
        ([("", "a")], "rule '': expected a PartitionSpec, got 'a'"),
        ("recoded", "expected rules= a list or 'recorded', got 'recoded'"),
    ],
    ids=str,
)
def test_invalid_rules_are_rejected(
    run: store.Run, mesh: Mesh, rules: list[tuple[str, P]], match: str
) -> None:
    run.save(0, {"x": jnp.ones(3)}).result()

    with pytest.raises(store.InvalidRequestError, match=match):
        run.restore(0, mesh=mesh, rules=rules)


def test_several_axes_of_one_dimension_divide_it_together(
    run: store.Run, mesh: Mesh
) -> None:
    run.save(0, {"x": jnp.ones((4, 8)), "empty": jnp.ones((0, 3))}).result()

    back = run.restore(0, mesh=mesh, rules=[("x", P(None, ("a", "b"))), ("", P("a"))])

    assert P(None, ("a", "b")) == back["x"].sharding.spec
    match = "leaf 'x': dimension 0 of 4 is not divisible by axes 'a' and 'b' of 8"
    with pytest.raises(store.MismatchError, match=match):
        run.restore(0, mesh=mesh, rules=[("", P(("a", "b")))])


def test_a_mesh_without_rules_is_rejected(run: store.Run, mesh: Mesh) -> None:
    run.save(0, {"x": jnp.ones(3)}).result()
    with pytest.raises(store.InvalidRequestError, match="indivisible= with mesh= and"):
        run.restore(0, indivisible="replicate")
    wrong: Any = "drop"
    with pytest.raises(store.InvalidRequestError, match=r"indivisible=: expected"):
        run.restore(0, mesh=mesh, rules=[("", P())], indivisible=wrong)

    with pytest.raises(store.InvalidRequestError, match="both mesh= and rules="):
        run.restore(0, mesh=mesh)


def test_rules_make_the_shardings_of_a_tree(mesh: Mesh) -> None:
    tree = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32), "step": 0}

    shardings = shardings_by_rules(tree, mesh, [("", P("a"))])

    assert {
        "kernel": NamedSharding(mesh, P("a")),
        "step": NamedSharding(mesh, P()),
    } == shardings
    with pytest.raises(store.MismatchError, match="leaf 'kernel': no rule"):
        shardings_by_rules(tree, mesh, [])


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"kernel": P()}, r"rules: expected a list of \(regex, Part.*, got dict"),
        ("recorded", "rules: expected a list .*, got 'recorded'; 'recorded' is"),
        ("kernel", r"rules: expected a list .*, got 'kernel'$"),
        (None, "rules: expected a list .*, got None"),
        (["kernel", P()], r"rule 0: expected \(regex, PartitionSpec\), got 'kernel'"),
        ([("", P()), ("a", P(), 1)], r"rule 1: expected .*, got \('a', .*, 1\)"),
        ([["kernel", P()]], r"rule 0: expected .*, got \['kernel', "),
        ([P("a", "b")], "rule 0: expected .*, got P"),
        ([(b"kernel", P())], "rule 0: expected .*, got .b'kernel'"),
        ([("k", None)], "rule 'k': expected a PartitionSpec, got None"),
        ([("k", P("a", "a"))], "rule 'k': expected each axis at most once, got P"),
    ],
    ids=str,
)
def test_values_that_are_not_rules_are_rejected(
    mesh: Mesh, rules: Any, match: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=match):
        shardings_by_rules({"kernel": jnp.ones((8, 4))}, mesh, rules)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (
            jax.devices()[0],
            r"mesh: expected a jax.sharding.Mesh, such as .*, got \w*Device",
        ),
        (np.array(jax.devices()), "mesh: expected .*, got ndarray"),
        (AbstractMesh((2,), ("a",)), "mesh: expected .*, got AbstractMesh"),
        (None, "mesh: expected .*, got None"),
        (Mesh(np.empty((), object), ()), "mesh: expected .*, got an empty one"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_not_a_mesh_are_rejected(
    run: store.Run, other: Any, match: str
) -> None:
    run.save(0, {"x": jnp.ones(3)}).result()

    with pytest.raises(store.InvalidRequestError, match=match):
        shardings_by_rules({"x": jnp.ones(3)}, other, [("", P())])
    if other is not None:
        with pytest.raises(store.InvalidRequestError, match=match):
            run.restore(0, mesh=other, rules=[("", P())])
        with pytest.raises(store.InvalidRequestError, match=match):
            run.restore(0, mesh=other, rules="recorded")


def test_leaves_that_rules_do_not_fit_are_named_once(mesh: Mesh) -> None:
    tree = {"bias": jnp.ones(8), "kernel": jnp.ones((8, 4)), "row": jnp.ones(3)}
    rules = [("bias|row", P("a"))]

    with pytest.raises(store.MismatchError) as caught:
        shardings_by_rules(tree, mesh, rules)

    assert (
        "the rules do not fit: leaf 'kernel': no rule matches; end the rules with ('', "
        "PartitionSpec()); leaf 'row': dimension 0 of 3 is not divisible by axis 'a' "
        "of 4; to leave such dimensions whole, pass indivisible='replicate'"
    ) == str(caught.value)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        (None, "expected shardings, or arrays that have them, got none in a NoneType"),
        ({"a": np.ones(2), "b": 1}, "expected shardings, or .*, got none in a dict"),
        ({"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, "got none in a dict"),
        ({"x": P("a")}, r"leaf 'x': expected a Sharding, or an array .*, got P.*'a'"),
        ({"x": jnp.ones(2), "y": {"z": P()}}, "leaf 'y/z': expected a Sharding"),
        ({"x": "a"}, "leaf 'x': expected a Sharding, or an array .*, got 'a'"),
    ],
    ids=str,
)
def test_a_tree_that_holds_no_sharding_is_rejected(tree: Any, match: str) -> None:
    with pytest.raises(store.InvalidRequestError, match=match):
        required_shardings(tree)


def test_the_shardings_of_a_tree_are_those_of_its_leaves(mesh: Mesh) -> None:
    spread = NamedSharding(mesh, P("a"))
    array = jax.device_put(jnp.ones(8), spread)
    abstract = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=spread)

    found = required_shardings({"x": array, "y": [abstract, spread, 1, np.ones(2)]})

    assert {"x": spread, "y/0": spread, "y/1": spread} == found


class Model(nnx.Module):
    """Layers whose moments should have the same sharding."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.fc1 = nnx.Linear(4, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.mu = nnx.Param(jnp.ones((8, 2)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.fc1(x)
        for layer in self.layers:
            x = layer(x)
        return x @ self.mu[...]


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
RULES = [("layers.*kernel", P("a", "b")), ("kernel|mu", P("b")), ("", P())]


def placed_state(mesh: Mesh) -> Any:
    """A state on a mesh whose optimizer state is placed like its parameters."""
    state: Any = EasyDeLState.create(model=Model(rngs=nnx.Rngs(0)))
    state = state.shard_state(RULES, mesh)
    abstract = jax.eval_shape(TX.init, state.graphstate)
    where = follow_parameters(abstract, state.graphstate)
    started = state.replace(tx=TX, opt_state=TX.init(state.graphstate))
    return reshard(started, where)


def test_an_optimizer_state_follows_the_parameters(mesh: Mesh) -> None:
    state: Any = EasyDeLState.create(model=Model(rngs=nnx.Rngs(0)))
    state = state.shard_state(RULES, mesh)
    abstract = jax.eval_shape(TX.init, state.graphstate)

    found = follow_parameters(abstract, state.graphstate)

    named = {x.key for x in named_leaves({"opt_state": abstract})[0]}
    assert named == found.keys()
    whole = NamedSharding(mesh, P())
    for key, sharding in shardings_by_key(state.graphstate).items():
        assert sharding == found.pop(f"opt_state/1/0/mu/{key}")
        assert sharding == found.pop(f"opt_state/1/0/nu/{key}")
    assert {"opt_state/1/0/count": whole} == found


@pytest.mark.slow
def test_a_placed_optimizer_state_updates_under_jit(mesh: Mesh) -> None:
    state = placed_state(mesh)
    before = shardings_by_key(state.opt_state)

    @jax.jit
    def advance(current: Any) -> Any:
        grads = jax.grad(lambda g: jnp.sum(current.merge(g)(jnp.ones((2, 4)))))(
            current.graphstate
        )
        return current.apply_gradients(grads=grads)

    after = advance(advance(state))

    assert 2 == after.step
    assert 2 == after.opt_state[1][0].count
    for key, sharding in shardings_by_key(after.opt_state).items():
        assert before[key].device_set == sharding.device_set
    kernel = after.opt_state[1][0].mu["layers"][1]["kernel"].get_value()
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P("a", "b")), 2)


def test_only_leaves_of_the_shape_follow_a_parameter(mesh: Mesh) -> None:
    spread, other = NamedSharding(mesh, P("a")), NamedSharding(mesh, P("b"))
    made = {
        "kernel": jax.device_put(jnp.ones((8, 4)), spread),
        "mu": {"kernel": jax.device_put(jnp.ones((4, 2)), other)},
    }
    factored = {
        "mu": {"kernel": jnp.ones((8, 4)), "mu": {"kernel": jnp.ones((4, 2))}},
        "row": {"kernel": jnp.ones(8), "xkernel": jnp.ones((8, 4))},
    }

    found = follow_parameters(factored, made)

    whole = NamedSharding(mesh, P())
    assert {
        "opt_state/mu/kernel": spread,
        "opt_state/mu/mu/kernel": other,
        "opt_state/row/kernel": whole,
        "opt_state/row/xkernel": whole,
    } == found


def test_without_a_mesh_only_moments_are_placed(mesh: Mesh) -> None:
    single = SingleDeviceSharding(jax.devices()[1])
    made = {"kernel": jax.device_put(jnp.ones(4), single), "host": np.ones(2)}
    moments = {"mu": made, "count": jnp.zeros(())}

    assert {"opt_state/mu/kernel": single} == follow_parameters(moments, made)
    assert {
        "opt_state/mu/kernel": single,
        "opt_state/mu/host": NamedSharding(mesh, P()),
        "opt_state/count": NamedSharding(mesh, P()),
    } == follow_parameters(moments, made, mesh)
    with pytest.raises(store.InvalidRequestError, match="mesh: expected a jax"):
        follow_parameters(moments, made, jax.devices()[0])


@pytest.mark.slow
def test_many_leaves_follow_in_seconds(mesh: Mesh) -> None:
    spread = NamedSharding(mesh, P("a"))
    leaf = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=spread)
    layers = {"layers": [{"a": {"kernel": leaf, "bias": leaf}} for _ in range(10_000)]}
    began = time.perf_counter()

    found = follow_parameters((layers, layers), layers)

    assert 30 > time.perf_counter() - began
    assert 40_000 == len(found)
    assert {spread} == set(found.values())
