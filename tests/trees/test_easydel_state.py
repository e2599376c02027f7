"""``EasyDeLState``: a value that consists of model, optimizer and step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.blueprints import shardings_by_key
from storesvc_client.trees.traversals import graph_leaves, refine_graphs
from tests.support.leaf_bits import key_data

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
    """Returns the graphdef, the parameters and the other Variables of a model."""
    return nnx.split(model(), nnx.Param, ...)


def state() -> EasyDeLState:
    return EasyDeLState.create(model=model(), tx=TX, init_opt_state=True)


def dropout_count(of: EasyDeLState) -> int:
    others: Any = of.graphother
    return int(others["dropout"]["rngs"]["count"][...])


def assert_equal_leaves(expected: Any, actual: Any) -> None:
    assert len(jax.tree.leaves(expected)) == len(jax.tree.leaves(actual))
    for leaves in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        e, a = (np.asarray(key_data(leaf)) for leaf in leaves)
        np.testing.assert_array_equal(e, a, strict=True)


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
    def test_some_parts_without_the_others_are_rejected(
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

    def test_parts_of_another_module_are_rejected_naming_the_leaves(self) -> None:
        graphdef, params, others = parts()
        lacking = {path: v for path, v in graph_leaves(params).items() if 3 not in path}

        with pytest.raises(ValueError, match=r"missing \['layers'\]\[3\]\['bias'\]"):
            EasyDeLState.create(
                graphdef=graphdef, graphstate=refine_graphs(lacking), graphother=others
            )

    def test_layers_keyed_by_text_are_rejected_before_nnx_permutes_them(self) -> None:
        graphdef, params, others = parts()
        layers = {str(n): layer for n, layer in params["layers"].items()}

        with pytest.raises(ValueError, match=r"unexpected .*\['layers'\]\['10'\]"):
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
    def test_merging_a_tree_with_other_paths_is_rejected(self, merge: str) -> None:
        made = state()
        renamed = nnx.State({"levels": made.graphstate["layers"]})

        with pytest.raises(ValueError, match=r"missing .*layers.* unexpected .*levels"):
            getattr(made, merge)(renamed)

    def test_bare_values_replace_the_values_of_variables(self) -> None:
        made = state()
        bare = nnx.to_pure_dict(jax.tree.map(lambda x: 2 * x, made.graphstate))

        merged = made.merge_to_state(bare)

        assert_equal_leaves(
            jax.tree.map(lambda x: 2 * x, made.graphstate), merged.graphstate
        )
        assert graph_leaves(made.graphstate).keys() == (
            graph_leaves(merged.graphstate).keys()
        )

    def test_values_of_another_shape_or_type_are_rejected(self) -> None:
        made = state()
        small = jax.tree.map(lambda x: x[:1], made.graphstate)
        counted = {
            path: nnx.BatchStat(variable.get_value())
            for path, variable in graph_leaves(made.graphstate).items()
        }

        with pytest.raises(
            ValueError, match=r"'kernel'\]: expected Param \(2, 2\), got"
        ):
            made.merge_to_state(small)
        with pytest.raises(ValueError, match=r"expected Param \(2,\), got BatchStat"):
            made.merge_to_state(counted)

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


RULES = [("layers/.*kernel", P("x", "y")), ("", P())]


@pytest.fixture
def mesh() -> Mesh:
    # Four devices per axis: kernels are (2, 2), and every axis divides 2.
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def spec_of(leaf: Any) -> P:
    spec: P = leaf.get_value().sharding.spec
    return spec


class TestSharding:
    def test_a_state_is_spread_over_a_mesh_by_rules(self, mesh: Mesh) -> None:
        made = state()

        spread: Any = made.shard_state(RULES, mesh)

        assert_equal_leaves(made.replace(step=jnp.int32(0)), spread)
        assert P("x", "y") == spec_of(spread.graphstate["layers"][11]["kernel"])
        assert P("x", "y") == spec_of(spread.opt_state[0].mu["layers"][3]["kernel"])
        assert P() == spec_of(spread.graphstate["layers"][0]["bias"])
        assert mesh == spread.mesh
        assert mesh == spread.step.sharding.mesh

    def test_the_model_and_the_optimizer_are_spread_apart(self, mesh: Mesh) -> None:
        made = state()

        model_only: Any = made.shard_model(RULES, mesh)
        optimizer_only: Any = made.shard_optimizer_state(None, RULES, mesh=mesh)

        kernel = ("layers", 0, "kernel")
        assert P("x", "y") == spec_of(graph_leaves(model_only.graphstate)[kernel])
        assert made.opt_state is model_only.opt_state
        assert made.graphstate is optimizer_only.graphstate
        assert P("x", "y") == spec_of(
            graph_leaves(optimizer_only.opt_state[0].mu)[kernel]
        )

    def test_an_optimizer_state_of_another_may_be_taken(self, mesh: Mesh) -> None:
        made = state().shard_model(RULES, mesh)

        taken = made.replace(opt_state=None).shard_optimizer_state(
            made.opt_state, RULES
        )

        assert_equal_leaves(made.opt_state, taken.opt_state)

    def test_sharding_needs_an_optimizer_state(self, mesh: Mesh) -> None:
        with pytest.raises(ValueError, match="expected an opt_state to shard"):
            state().replace(opt_state=None).shard_optimizer_state(None, RULES)

    def test_missing_rules_and_meshes_are_reported(self, mesh: Mesh) -> None:
        with pytest.raises(InvalidRequestError, match="expected partition_rules="):
            state().shard_state(mesh=mesh)
        with pytest.raises(InvalidRequestError, match="expected mesh="):
            state().shard_state(RULES)

    def test_leaves_are_placed_like_those_of_another_state(self, mesh: Mesh) -> None:
        made, other = state(), state().shard_state(RULES, mesh)

        back = made.shard_with_shape(other.shardings)
        abstract = made.shard_with_shape(jax.tree.map(described, other))

        assert shardings(other, but="step") == shardings(back, but="step")
        assert_equal_leaves(made, back)
        assert_equal_leaves(made, abstract)

    def test_it_constrains_under_jit(self, mesh: Mesh) -> None:
        other = state().shard_state(RULES, mesh)
        where = other.shardings

        @jax.jit
        def advance(current: EasyDeLState) -> EasyDeLState:
            grads = jax.tree.map(jnp.ones_like, current.graphstate)
            return current.apply_gradients(grads=grads).shard_with_shape(where)

        assert shardings(other) == shardings(advance(other))

    def test_a_sharding_for_no_leaf_is_rejected(self, mesh: Mesh) -> None:
        with pytest.raises(MismatchError, match=r"leaf 'opt_state/0/count': expected"):
            state().replace(opt_state=None).shard_with_shape(state().shardings)

    def test_gathered_leaves_are_whole_on_the_host(self, mesh: Mesh) -> None:
        spread = state().shard_state(RULES, mesh)

        gathered: Any = spread.gather_state()

        assert_equal_leaves(spread, gathered)
        kernel = gathered.graphstate["layers"][0]["kernel"].get_value()
        assert isinstance(kernel, np.ndarray)
        assert isinstance(gathered.opt_state[0].count, np.ndarray)
        key = gathered.graphother["dropout"]["rngs"]["key"].get_value()
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        assert spread.opt_state is spread.gather_model().opt_state
        assert spread.graphstate is spread.gather_optimizer_state().graphstate

    def test_gathering_no_optimizer_state_is_rejected(self) -> None:
        with pytest.raises(AssertionError, match="expected an opt_state to gather"):
            state().replace(opt_state=None).gather_optimizer_state()

    def test_an_optimizer_is_begun_where_its_parameters_lie(self, mesh: Mesh) -> None:
        spread = state().replace(tx=None, opt_state=None).shard_model(RULES, mesh)

        begun: Any = spread.init_tx(TX)
        by_rules: Any = spread.init_tx(TX, RULES)

        assert_equal_leaves(state().opt_state, begun.opt_state)
        assert_equal_leaves(state().opt_state, by_rules.opt_state)
        assert TX is begun.tx
        moment = by_rules.opt_state[0].nu["layers"][11]["kernel"]
        assert (mesh, P("x", "y")) == (
            moment.get_value().sharding.mesh,
            spec_of(moment),
        )


def described(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def shardings(of: EasyDeLState, but: str = "") -> dict[str, Any]:
    found = shardings_by_key(of)
    found.pop(but, None)
    return {key: str(sharding) for key, sharding in found.items()}
