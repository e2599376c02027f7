"""``EasyDeLState``: a value made of model, optimizer and step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.rebuild import (
    abstract_state,
    rebuild_state,
    without_absent_rng,
)
from storesvc_client.trees.traversals import graph_leaves, refine_graphs

TX = optax.adam(0.1)


class Model(nnx.Module):
    """Twelve layers, so that text order and number order of layers differ."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        dropped: jax.Array = self.dropout(x)
        return dropped


def model() -> Model:
    return Model(rngs=nnx.Rngs(0))


def parts() -> Any:
    """The graphdef, the parameters and the rest of a model."""
    return nnx.split(model(), nnx.Param, ...)


def state() -> EasyDeLState:
    return EasyDeLState.create(model=model(), tx=TX, init_opt_state=True)


def dropout_count(of: EasyDeLState) -> int:
    others: Any = of.graphother
    return int(others["dropout"]["rngs"]["count"][...])


def host(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_equal_leaves(expected: Any, actual: Any) -> None:
    assert len(jax.tree.leaves(expected)) == len(jax.tree.leaves(actual))
    for e, a in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_array_equal(host(e), host(a), strict=True)


class TestCreate:
    def test_a_model_is_split_into_parameters_and_the_rest(self) -> None:
        made = state()

        assert made.step == 0
        assert {"layers"} == set(made.graphstate)
        assert {"dropout"} == set(made.graphother)
        assert isinstance(made.opt_state, tuple)

    def test_the_parts_of_a_model_make_the_same_state(self) -> None:
        graphdef, params, others = parts()

        made = EasyDeLState.create(
            step=3, graphdef=graphdef, graphstate=params, graphother=others, tx=TX
        )

        assert made.step == 3
        assert made.opt_state is None
        assert_equal_leaves(state().graphstate, made.graphstate)

    def test_a_model_and_parts_of_one_exclude_each_other(self) -> None:
        with pytest.raises(ValueError, match=r"got model and \['graphstate'\]"):
            EasyDeLState.create(model=model(), graphstate=nnx.state(model()))

    @pytest.mark.parametrize(
        "given", [{}, {"graphstate": nnx.State({})}, {"graphother": nnx.State({})}]
    )
    def test_some_parts_without_the_others_are_refused(
        self, given: dict[str, Any]
    ) -> None:
        with pytest.raises(ValueError, match="expected model or all of"):
            EasyDeLState.create(**given)

    def test_an_optimizer_state_and_making_one_exclude_each_other(self) -> None:
        with pytest.raises(ValueError, match="init_opt_state or opt_state, got both"):
            EasyDeLState.create(model=model(), tx=TX, opt_state=(), init_opt_state=True)

    def test_making_an_optimizer_state_needs_an_optimizer(self) -> None:
        with pytest.raises(ValueError, match="init_opt_state expected tx, got None"):
            EasyDeLState.create(model=model(), init_opt_state=True)

    def test_parts_of_another_module_are_refused_naming_the_leaves(self) -> None:
        graphdef, params, others = parts()
        lacking = {path: v for path, v in graph_leaves(params).items() if 3 not in path}

        with pytest.raises(ValueError, match=r"missing .*'layers', 3, 'bias'"):
            EasyDeLState.create(
                graphdef=graphdef, graphstate=refine_graphs(lacking), graphother=others
            )

    def test_layers_keyed_by_text_are_refused_before_nnx_permutes_them(self) -> None:
        graphdef, params, others = parts()
        layers = {str(n): layer for n, layer in params["layers"].items()}

        with pytest.raises(ValueError, match=r"unexpected .*'layers', '10', 'bias'"):
            EasyDeLState.create(
                graphdef=graphdef,
                graphstate=nnx.State({"layers": layers}),
                graphother=others,
            )


class TestValue:
    def test_running_the_model_changes_nothing_in_the_state(self) -> None:
        made = state()

        made.model(jnp.ones((1, 2)))

        assert dropout_count(made) == 0

    def test_running_the_source_model_changes_nothing_in_the_state(self) -> None:
        source = model()
        made = EasyDeLState.create(model=source)

        source(jnp.ones((1, 2)))

        assert dropout_count(made) == 0

    def test_replace_makes_another_state(self) -> None:
        made = state()

        assert made.replace(step=5).step == 5
        assert made.step == 0

    def test_leaves_are_named_by_field_and_path(self) -> None:
        names = {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_leaves_with_path(state())
        }

        assert {
            "step",
            "graphstate/layers/11/kernel/value",
            "graphother/dropout/rngs/key/value",
            "opt_state/0/count",
            "opt_state/0/mu/layers/0/bias/value",
        } <= names

    def test_merge_puts_other_parameters_into_the_model(self) -> None:
        made = state()
        doubled = jax.tree.map(lambda x: 2 * x, made.graphstate)

        merged = made.merge(doubled)

        assert_equal_leaves(doubled, nnx.state(merged, nnx.Param))
        assert_equal_leaves(doubled, made.merge_to_state(doubled).graphstate)

    @pytest.mark.parametrize("merge", ["merge", "merge_to_state"])
    def test_merging_a_tree_with_other_paths_is_refused(self, merge: str) -> None:
        made = state()
        renamed = nnx.State({"levels": made.graphstate["layers"]})

        with pytest.raises(ValueError, match=r"missing .*layers.* unexpected .*levels"):
            getattr(made, merge)(renamed)

    def test_size_counts_the_bytes_of_parameters_and_optimizer(self) -> None:
        parameters = 12 * (4 + 2) * 4

        assert parameters * 3 + 4 == state().size

    def test_shardings_are_a_state_of_shardings(self) -> None:
        shardings = state().shardings

        assert shardings.step is None
        assert all(
            isinstance(leaf, jax.sharding.Sharding)
            for leaf in jax.tree.leaves(shardings)
        )


class TestApplyGradients:
    def test_it_steps_as_the_optimizer_does(self) -> None:
        made = state()
        grads = jax.tree.map(jnp.ones_like, made.graphstate)
        updates, opt_state = TX.update(grads, made.opt_state, made.graphstate)

        stepped = made.apply_gradients(grads=grads)

        assert stepped.step == 1
        assert_equal_leaves(
            optax.apply_updates(made.graphstate, updates), stepped.graphstate
        )
        assert_equal_leaves(opt_state, stepped.opt_state)
        assert_equal_leaves(made.graphother, stepped.graphother)

    @pytest.mark.parametrize("lacking", ["tx", "opt_state"])
    def test_it_needs_an_optimizer_and_its_state(self, lacking: str) -> None:
        made = state().replace(**{lacking: None})

        with pytest.raises(AssertionError, match=f"got none in {lacking}"):
            made.apply_gradients(grads=made.graphstate)

    def test_it_works_under_jit_with_gradients_of_the_merged_model(self) -> None:
        @jax.jit
        def step(current: EasyDeLState) -> EasyDeLState:
            def loss(parameters: Any) -> Any:
                return current.merge(parameters)(jnp.ones((1, 2))).sum()

            grads = jax.grad(loss)(current.graphstate)
            return current.apply_gradients(grads=grads)

        assert 1 == step(state()).step


class TestRebuild:
    def test_an_abstract_state_has_the_shapes_of_a_new_one(self) -> None:
        abstract, real = abstract_state(model, TX), state().replace(step=jnp.int32(0))

        assert all(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract)
        )
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(real)] == [
            (x.shape, x.dtype) for x in jax.tree.leaves(abstract)
        ]

    def test_a_checkpoint_with_every_leaf_gives_back_its_rng_values(self) -> None:
        rebuilt = rebuilt_from(state(), held=lambda _: True)

        assert_equal_leaves(state(), rebuilt)

    def test_only_rng_values_that_are_absent_are_made_anew(self) -> None:
        saved = state()
        rebuilt = rebuilt_from(saved, held=lambda name: "rngs/key" not in name)

        stream: Any = rebuilt.graphother["dropout"]["rngs"]
        assert_equal_leaves(
            saved.graphother["dropout"]["rngs"]["count"], stream["count"]
        )
        assert [1832780943, 270669613] == jax.random.key_data(
            stream["key"][...]
        ).tolist()
        assert_equal_leaves(saved.graphstate, rebuilt.graphstate)
        assert_equal_leaves(saved.opt_state, rebuilt.opt_state)

    def test_fresh_rng_values_lie_replicated_on_the_mesh(self) -> None:
        mesh = jax.make_mesh((8,), ("x",))

        rebuilt = rebuilt_from(state(), held=lambda _: False, mesh=mesh)

        others: Any = rebuilt.graphother
        key = others["dropout"]["rngs"]["key"][...]
        assert set(mesh.devices.flat) == key.devices()
        assert key.is_fully_replicated


def rebuilt_from(
    saved: EasyDeLState,
    held: Callable[[str], bool],
    mesh: jax.sharding.Mesh | None = None,
) -> EasyDeLState:
    """The state rebuilt of the leaves of another whose names are held."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(saved)
    }
    target = abstract_state(model, TX)
    like, absent = without_absent_rng(target, {name for name in leaves if held(name)})
    restored = jax.tree_util.tree_map_with_path(
        lambda path, _: leaves[jax.tree_util.keystr(path, simple=True, separator="/")],
        like,
    )
    return rebuild_state(target, restored, absent, mesh)
