"""Parameters are merged into states and modules by path, never by position."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from storesvc_client.trees.nnx import graphs
from storesvc_client.trees.traversals import (
    graph_leaves,
    graph_paths,
    merge_by_path,
    merge_model_and_tree,
    merge_state_and_tree,
)


class Model(nnx.Module):
    """Twelve layers, statistics, an RNG stream."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(12)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies all layers in order."""
        for layer in self.layers:
            x = layer(x)
        return self.dropout(self.norm(x))


class Odd(nnx.Module):
    """Everything that a module can hold."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(2, 2, rngs=rngs)
        self.shared = self.inner.kernel
        self.again = self.inner
        self.names = nnx.Dict({"a": nnx.Param(jnp.ones(1))})
        self.array = nnx.data(jnp.ones(3))
        self.tree = nnx.data({"k": jnp.ones(2), "v": [nnx.Param(jnp.ones(2))]})
        self.nothing = nnx.Param(None)
        self.value = nnx.Variable({"a": jnp.ones(2)})
        self.myself = self


def split(model: Any = Model) -> tuple[Any, Any]:
    """Returns a module's structure and state."""
    graphdef, state = nnx.split(model(rngs=nnx.Rngs(0)))
    return graphdef, state


def params(state: Any) -> dict[Any, Any]:
    """Returns the parameters by path, as arrays of sevens."""
    return {
        path: jnp.full_like(leaf.get_value(), 7)
        for path, leaf in graph_leaves(state).items()
        if isinstance(leaf, nnx.Param)
    }


def with_hooks(variable: Any, **hooks: Any) -> Any:
    """Returns the Variable with hooks; some releases warn when it is created."""
    variable.set_metadata(**hooks)
    return variable


def hooked(value: Any) -> Any:
    """A parameter whose hooks double values read and negate values written."""
    return with_hooks(
        nnx.Param(value),
        on_get_value=lambda _, value: value * 2,
        on_set_value=lambda _, value: -value,
        on_create_value=lambda _, value: value + 1,
    )


class Tied(nnx.Module):
    """A Variable in two modules, and a module and a list under two names."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.encoder = nnx.Linear(2, 2, rngs=rngs)
        self.decoder = nnx.Linear(2, 2, rngs=rngs)
        self.decoder.kernel = self.encoder.kernel
        self.again = self.encoder
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs)])
        self.more = nnx.Dict({"x": self.layers})
        self.myself = self


def as_text(layers: Any) -> dict[str, Any]:
    """Returns the layers with text instead of their numbers."""
    return {str(i): layers[i] for i in layers}


class TestMergeByPath:
    @pytest.mark.parametrize("model", [Model, Odd])
    def test_the_pieces_make_the_module_whatever_their_order(self, model: Any) -> None:
        graphdef, state = split(model)
        leaves = dict(reversed(graph_leaves(state).items()))

        merged = merge_by_path(graphdef, leaves)

        assert nnx.split(merged)[0] == graphdef
        got = graph_leaves(nnx.state(merged))
        assert got.keys() == leaves.keys()
        equal = jax.tree.map(lambda a, b: bool((a == b).all()), leaves, got)
        assert jax.tree.all(equal)

    @pytest.mark.parametrize("model", [Model, Odd])
    def test_the_paths_are_those_of_the_state(self, model: Any) -> None:
        graphdef, state = split(model)

        assert graph_leaves(state).keys() == graph_paths(graphdef)

    @pytest.mark.parametrize("model", [Model, Odd])
    def test_both_ways_to_the_paths_agree(self, model: Any) -> None:
        graphdef, _ = split(model)

        listed = graphs.list_paths(graphdef)

        assert listed == graphs.find_paths(graphdef)
        assert graphdef.num_leaves == len(listed)

    def test_a_structure_of_no_known_form_is_asked_the_other_way(self) -> None:
        graphdef, _ = split()
        renamed = type("SomethingElse", (), {})()
        unknown = type(graphdef)(
            nodes=[renamed, *graphdef.nodes],
            attributes=graphdef.attributes,
            num_leaves=graphdef.num_leaves,
        )

        assert [] == graphs.list_paths(unknown)

    def test_layers_under_text_are_rejected(self) -> None:
        graphdef, state = split()
        whole = dict(state)
        whole["layers"] = as_text(whole["layers"])

        with pytest.raises(ValueError, match="of the module, got") as caught:
            merge_by_path(graphdef, whole)

        assert "missing ['layers'][0]['bias']" in str(caught.value)
        assert "unexpected ['layers']['0']['bias']" in str(caught.value)
        assert "and 4 more" in str(caught.value)

    def test_a_leaf_too_few_is_rejected_naming_it(self) -> None:
        graphdef, state = split()
        leaves = graph_leaves(state)
        del leaves["norm", "mean"]

        with pytest.raises(ValueError, match=r"missing \['norm'\]\['mean'\], unexp"):
            merge_by_path(graphdef, leaves)

    def test_two_leaves_for_one_place_are_rejected(self) -> None:
        graphdef, state = split()

        with pytest.raises(ValueError, match="two leaves have the path"):
            merge_by_path(graphdef, state, state)

    def test_running_the_module_changes_no_input(self) -> None:
        graphdef, state = split()

        merge_by_path(graphdef, state)(jnp.ones((1, 2)))

        assert 0 == state["dropout"]["rngs"]["count"].get_value()
        assert [0, 0] == state["norm"]["mean"].get_value().tolist()

    @pytest.mark.slow
    def test_it_works_under_jit_and_grad(self) -> None:
        states: list[Any]
        graphdef, *states = nnx.split(Model(rngs=nnx.Rngs(0)), nnx.Param, ...)
        trained, rest = states

        @jax.jit
        def loss(trained: Any, rest: Any) -> jax.Array:
            return jnp.sum(merge_by_path(graphdef, trained, rest)(jnp.ones((3, 2))))

        grads = jax.grad(loss)(*states)

        assert graph_leaves(grads).keys() == graph_leaves(trained).keys()
        assert 0 == rest["dropout"]["rngs"]["count"].get_value()

    def test_a_structure_first_seen_under_jit_is_known_afterwards(self) -> None:
        graphdef, state = split()

        jax.jit(lambda state: nnx.state(merge_by_path(graphdef, state)))(state)

        assert isinstance(merge_by_path(graphdef, state), Model)

    def test_abstract_values_merge(self) -> None:
        graphdef, state = split()

        merged = merge_by_path(graphdef, jax.eval_shape(lambda: state))

        assert (2, 2) == merged.layers[0].kernel.get_value().shape

    def test_raw_arrays_become_the_variables_of_the_structure(self) -> None:
        graphdef, state = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

        merged = merge_by_path(graphdef, nnx.to_pure_dict(state))

        assert isinstance(merged.kernel, nnx.Param)

    def test_a_structure_is_looked_at_once(self) -> None:
        graphdef, _ = split()

        assert graph_paths(graphdef) is graph_paths(graphdef)


class TestMergeStateAndTree:
    def test_parameters_are_the_trees_and_all_else_stays(self) -> None:
        _, state = split()
        state["norm"]["mean"].set_value(jnp.full(2, 3.0))
        state["dropout"]["rngs"]["count"].set_value(jnp.uint32(5))

        merged: Any = merge_state_and_tree(params(state), state)

        assert {7} == {
            value
            for leaf in graph_leaves(merged).values()
            if isinstance(leaf, nnx.Param)
            for value in leaf.get_value().ravel().tolist()
        }
        assert [3, 3] == merged["norm"]["mean"].get_value().tolist()
        stream = merged["dropout"]["rngs"]
        assert 5 == stream["count"].get_value()
        assert state["dropout"]["rngs"]["key"].get_value() == stream["key"].get_value()

    def test_no_variable_is_shared_and_no_input_changed(self) -> None:
        _, state = split()
        before = {p: leaf.get_value() for p, leaf in graph_leaves(state).items()}
        tree = params(state)

        merged: Any = merge_state_and_tree(tree, state)

        after = {p: leaf.get_value() for p, leaf in graph_leaves(state).items()}
        assert all(before[path] is after[path] for path in before)
        assert params(state).keys() == tree.keys()
        shared = [
            path
            for path, leaf in graph_leaves(merged).items()
            if leaf is graph_leaves(state)[path]
        ]
        assert [] == shared

    def test_a_tree_of_variables_gives_their_values(self) -> None:
        _, state = split()
        tree = nnx.State({"more": nnx.Param(1)})
        variables = {p: nnx.BatchStat(value) for p, value in params(state).items()}

        merged: Any = merge_state_and_tree({**variables, ("more",): tree}, state)

        kernel = merged["layers"][3]["kernel"]
        assert isinstance(kernel, nnx.Param)
        assert [[7, 7], [7, 7]] == kernel.get_value().tolist()

    def test_an_abstract_state_gets_values_and_fresh_streams(self) -> None:
        _, state = split()
        abstract = nnx.state(nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))))

        merged: Any = merge_state_and_tree(params(state), abstract)

        stream = merged["dropout"]["rngs"]
        data = jax.random.key_data(stream["key"].get_value())
        assert [1832780943, 270669613] == data.tolist()
        assert 0 == stream["count"].get_value()
        assert isinstance(merged["norm"]["mean"].get_value(), jax.ShapeDtypeStruct)

    def test_all_misfits_are_listed_in_one_error(self) -> None:
        _, state = split()
        tree = params(state)
        tree["layers", 0, "kernel"] = jnp.ones((2, 3))
        tree["layers", 1, "kernel"] = jnp.ones((2, 2), jnp.bfloat16)
        tree["layers", 2, "kernel"] = [[1.0, 2.0], [3.0, 4.0]]
        tree["layers", 3, "kernel"] = None
        del tree["layers", 4, "kernel"]

        with pytest.raises(ValueError, match="5 of 26 parameters do not") as caught:
            merge_state_and_tree(tree, state)

        expected = "['kernel']: expected (2, 2) float32, got "
        for number, got in enumerate(
            ("(2, 3) float32", "(2, 2) bfloat16", "[0][0]: float", "none", "none")
        ):
            assert f"['layers'][{number}]{expected}{got}" in str(caught.value)

    def test_nothing_is_converted(self) -> None:
        state = nnx.state(nnx.Linear(1, 1, use_bias=False, rngs=nnx.Rngs(0)))

        with pytest.raises(ValueError, match=r"float32, got \(1, 1\) float64"):
            merge_state_and_tree({"kernel": np.ones((1, 1))}, state)

    def test_digits_address_layers_but_integers_no_names(self) -> None:
        _, state = split()
        nested: Any = merge_state_and_tree(params(state), state)
        named: Any = nnx.State({"0": nnx.Param(jnp.ones(1))})

        merged: Any = merge_state_and_tree(
            {"layers": as_text(nested["layers"]), "norm": nested["norm"]}, state
        )

        assert 7 == merged["layers"][11]["kernel"].get_value()[0, 0]
        assert "0" in merge_state_and_tree({"0": jnp.zeros(1)}, named)
        with pytest.raises(ValueError, match=r"\['0'\]: expected \(1,\) .* got none"):
            merge_state_and_tree({0: jnp.zeros(1)}, named)

    def test_a_tree_with_an_integer_and_its_text_is_rejected(self) -> None:
        _, state = split()
        tree = {**params(state), ("layers", "0", "more"): jnp.ones(1)}

        with pytest.raises(ValueError, match=r"two keys become 0 in \['layers'\]"):
            merge_state_and_tree(tree, state)

    def test_a_parameter_without_a_value_takes_none(self) -> None:
        state: Any = nnx.State({"a": nnx.Param(None)})

        merged: Any = merge_state_and_tree({}, state)

        assert merged["a"].get_value() is None
        with pytest.raises(ValueError, match=r"\['a'\]: expected none, got \(1,\)"):
            merge_state_and_tree({"a": jnp.ones(1)}, state)

    def test_values_are_read_and_written_without_hooks(self) -> None:
        tree = {"a": hooked(jnp.full(2, 3.0))}
        state: Any = nnx.State({"a": hooked(jnp.ones(2))})

        merged: Any = merge_state_and_tree(tree, state)

        assert [3, 3] == merged["a"].get_raw_value().tolist()
        assert [6, 6] == merged["a"].get_value().tolist()

    def test_hooks_do_not_affect_matching_or_recreation(self) -> None:
        wide = {"on_get_value": lambda _, value: value.reshape(1, 2)}
        abstract: Any = jax.ShapeDtypeStruct((), jnp.uint32)
        count = nnx.RngCount(abstract, tag="t")
        count.set_metadata(on_get_value=lambda _, value: jnp.ones(3))
        state: Any = nnx.State(
            {"a": with_hooks(nnx.Param(jnp.ones(2)), **wide), "count": count}
        )

        merged: Any = merge_state_and_tree({"a": jnp.zeros(2)}, state)

        assert [0, 0] == merged["a"].get_raw_value().tolist()
        assert 0 == merged["count"].get_raw_value()

    def test_a_variable_of_two_paths_takes_one_value(self) -> None:
        shared = nnx.Param(jnp.ones(2))
        state: Any = nnx.State({"a": shared, "b": shared})
        nan = jnp.full(2, jnp.nan)

        merged: Any = merge_state_and_tree({"a": nan, "b": np.asarray(nan)}, state)

        assert np.isnan(merged["a"].get_value()).all()
        with pytest.raises(ValueError, match=r"leaf \['b'\]: expected the value of"):
            merge_state_and_tree({"a": jnp.zeros(2), "b": jnp.ones(2)}, state)

    def test_other_than_mappings_are_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="got list"):
            merge_state_and_tree([1], split()[1])  # type: ignore[arg-type]  # tested

    def test_metadata_of_the_parameters_stay(self) -> None:
        state: Any = nnx.State({"a": nnx.Param(jnp.ones(1), mine="yes")})

        merged: Any = merge_state_and_tree({"a": jnp.zeros(1)}, state)

        assert "yes" == merged["a"].get_metadata()["mine"]


class TestMergeModelAndTree:
    def test_the_module_is_another_with_the_trees_parameters(self) -> None:
        model = Model(rngs=nnx.Rngs(0))
        kernel = model.layers[0].kernel.get_value()

        merged = merge_model_and_tree(model, params(nnx.state(model)))

        assert isinstance(merged, Model)
        assert model is not merged
        assert 7 == merged.layers[0].kernel.get_value()[0, 0]
        assert model.layers[0].kernel.get_value() is kernel

    def test_running_the_result_leaves_the_model_as_it_was(self) -> None:
        model = Model(rngs=nnx.Rngs(0))

        merge_model_and_tree(model, params(nnx.state(model)))(jnp.ones((1, 2)))

        assert 0 == model.dropout.rngs.count.get_value()

    def test_parameters_that_the_tree_lacks_keep_their_values_when_asked(self) -> None:
        model = Model(rngs=nnx.Rngs(0))
        tree = {"layers": {3: {"kernel": jnp.full((2, 2), 7.0)}}}

        merged = merge_model_and_tree(model, tree, silence=True)
        state: Any = merge_state_and_tree(tree, split()[1], silence=True)

        assert 7 == merged.layers[3].kernel.get_value()[0, 0]
        assert 7 == state["layers"][3]["kernel"].get_value()[0, 0]
        for at, layer in enumerate(model.layers):
            if at != 3:
                same = layer.kernel.get_value() == merged.layers[at].kernel.get_value()
                assert same.all()
        other = {"layers": {3: {"kernel": jnp.ones(3)}}}  # but not another shape
        with pytest.raises(ValueError, match="do not fit"):
            merge_model_and_tree(model, other, silence=True)

    def test_a_missing_parameter_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="26 of 26 parameters do not fit"):
            merge_model_and_tree(Model(rngs=nnx.Rngs(0)), {})

    def test_hooks_change_no_value(self) -> None:
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        model.kernel = hooked(jnp.ones((2, 2)))
        tree = nnx.state(model)

        merged: Any = merge_model_and_tree(model, tree)

        assert [[1, 1], [1, 1]] == merged.kernel.get_raw_value().tolist()
        assert [[1, 1], [1, 1]] == model.kernel.get_raw_value().tolist()

    @pytest.mark.parametrize(
        "second",
        [
            ("decoder", "kernel"),
            ("encoder", "kernel"),
            ("myself", "encoder", "kernel"),
            ("myself", "myself", "decoder", "kernel"),
        ],
        ids=str,
    )
    def test_a_tied_parameter_takes_one_value(self, second: Any) -> None:
        model = Tied(rngs=nnx.Rngs(0))
        tree = params(nnx.state(model))
        equal = np.full((2, 2), 7, np.float32)

        merged: Any = merge_model_and_tree(model, {**tree, second: equal})

        assert merged.decoder.kernel is merged.encoder.kernel
        with pytest.raises(ValueError, match="same parameter, got another") as caught:
            merge_model_and_tree(model, {**tree, second: jnp.zeros((2, 2))})
        assert "['again']['kernel']" in str(caught.value)
        assert "1 of 5 parameters do not fit" in str(caught.value)

    def test_a_tied_list_is_addressed_by_its_digits_too(self) -> None:
        model = Tied(rngs=nnx.Rngs(0))
        tree = {**params(nnx.state(model)), ("more", "x", "0", "bias"): jnp.ones(2)}

        with pytest.raises(ValueError, match=r"\['more'\]\['x'\]\['0'\]\['bias'\]: "):
            merge_model_and_tree(model, tree)

    def test_other_tied_leaves_are_ignored(self) -> None:
        model: Any = Tied(rngs=nnx.Rngs(0))
        model.stat = nnx.BatchStat(jnp.ones(2))
        model.other = model.stat
        tree = {**params(nnx.state(model)), ("other",): 1, ("stat",): 2}

        merge_model_and_tree(model, tree)

    def test_values_that_cannot_be_compared_are_not_taken_for_one(self) -> None:
        model = Tied(rngs=nnx.Rngs(0))
        tree = {**params(nnx.state(model)), ("decoder", "kernel"): jnp.ones((2, 2))}

        def merged(tree: Any) -> Any:
            return nnx.state(merge_model_and_tree(model, tree))

        with pytest.raises(ValueError, match="same parameter, got another"):
            jax.eval_shape(merged, tree)
        abstract = jax.eval_shape(lambda: tree)
        assert isinstance(
            merged(abstract)["again"]["kernel"].get_value(), jax.ShapeDtypeStruct
        )
