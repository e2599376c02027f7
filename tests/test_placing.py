"""Where restored leaves lie: rules on a mesh, and what a mesh cannot do."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.trees.partitioning import shardings_by_rules


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


def test_axes_that_do_not_divide_a_leaf_are_dropped_and_reported(
    run: store.Run, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    odd = jnp.arange(28.0).reshape(7, 4)
    run.save(0, {"even": jnp.ones((8, 4)), "odd": odd, "row": jnp.ones(8)}).result()

    with caplog.at_level(logging.WARNING, "storesvc_client"):
        back = run.restore(0, mesh=mesh, rules=[("", P("a", "b"))])

    assert P("a", "b") == back["even"].sharding.spec
    assert P(None, "b") == back["odd"].sharding.spec
    assert P("a") == back["row"].sharding.spec
    np.testing.assert_array_equal(np.asarray(odd), np.asarray(back["odd"]))
    (message,) = caplog.messages
    assert "dropped for 2 leaves: odd: " in message
    assert "does not fit (7, 4)" in message


def test_leaves_lie_as_recorded_on_a_mesh_of_another_shape(
    run: store.Run, mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    saved = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("b", "a")))
    run.save(0, {"x": saved, "y": jnp.ones(3)}).result()
    other = Mesh(np.array(jax.devices()).reshape(2, 4), ("b", "c"))

    back = run.restore(0, mesh=other, rules="recorded")

    assert (other, P("b")) == (back["x"].sharding.mesh, back["x"].sharding.spec)
    assert P() == back["y"].sharding.spec
    assert "x: the mesh has no axis ['a']" in caplog.text


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
def test_rules_that_are_none_are_refused(
    run: store.Run, mesh: Mesh, rules: list[tuple[str, P]], match: str
) -> None:
    run.save(0, {"x": jnp.ones(3)}).result()

    with pytest.raises(store.InvalidRequestError, match=match):
        run.restore(0, mesh=mesh, rules=rules)


def test_a_mesh_without_rules_is_refused(run: store.Run, mesh: Mesh) -> None:
    run.save(0, {"x": jnp.ones(3)}).result()

    with pytest.raises(store.InvalidRequestError, match="both mesh= and rules="):
        run.restore(0, mesh=mesh)


def test_rules_make_the_shardings_of_a_tree(mesh: Mesh) -> None:
    tree = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32), "step": 0}

    shardings = shardings_by_rules(tree, mesh, [("", P("a"))])

    assert {
        "kernel": NamedSharding(mesh, P("a")),
        "step": NamedSharding(mesh, P()),
    } == shardings
    with pytest.raises(store.InvalidRequestError, match="leaf 'kernel': no rule"):
        shardings_by_rules(tree, mesh, [])
