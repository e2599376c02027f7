"""Naming, merging and recreating values of NNX state trees.

Expected values of EasyDeL's behaviour were recorded with easydel 0.3.0; where easydel
loses data, the test says what this library does instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from storesvc_client.trees import traversals
from storesvc_client.trees.traversals import (
    MetaValueRecreator,
    graph_leaves,
    recreate_meta_values,
    refine_graphs,
    tree_path_to_string,
)
from tests.support.golden_traversals import RECORDED, Case, cases, outcome

PATH = (DictKey("a"), DictKey(3), SequenceKey(1), GetAttrKey("x"), FlattenedIndexKey(7))

FIRST_KEY_OF_42 = [1832780943, 270669613]
SECOND_KEY_OF_42 = [3187376881, 129218101]
FIRST_KEY_OF_7 = [3625411723, 1954958720]


class Model(nnx.Module):
    """Parameters and an RNG stream."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def rng_state(seed: int | jax.Array = 0) -> Any:
    """Returns the counts and keys of a model."""
    return nnx.state(Model(rngs=nnx.Rngs(seed)), nnx.RngState)


def count(value: int = 9) -> nnx.RngCount:
    """Returns a count that was used."""
    return nnx.RngCount(jnp.asarray(value, jnp.uint32), tag="t")


def key(seed: int = 1, impl: str | None = None) -> nnx.RngKey:
    """Returns a typed key."""
    return nnx.RngKey(jax.random.key(seed, impl=impl), tag="t")


def words(variable: Any) -> list[int]:
    """Returns the key data of a typed key."""
    assert jnp.issubdtype(variable[...].dtype, jax.dtypes.prng_key)
    data: list[int] = jax.random.key_data(variable[...]).tolist()
    return data


class TestTreePathToString:
    def test_without_a_separator_the_parts_are_a_tuple_of_text(self) -> None:
        assert ("a", "3", "1", "x", "7") == tree_path_to_string(PATH)

    def test_a_separator_joins_the_parts(self) -> None:
        assert "a/3/1/x/7" == tree_path_to_string(PATH, sep="/")
        assert "a.0" == tree_path_to_string((DictKey("a"), SequenceKey(0)), ".")

    def test_the_empty_path_is_empty(self) -> None:
        assert () == tree_path_to_string(())
        assert "" == tree_path_to_string((), "/")

    def test_a_part_of_an_unknown_kind_is_its_text(self) -> None:
        assert "raw/('t', 1)" == tree_path_to_string(("raw", ("t", 1)), "/")

    def test_the_path_of_a_variable_ends_in_value(self) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(rng_state())

        assert ["dropout/rngs/count/value", "dropout/rngs/key/value"] == [
            tree_path_to_string(path, "/") for path, _ in leaves
        ]


class TestRefineGraphs:
    def test_graphs_merge_into_one_state(self) -> None:
        merged = refine_graphs({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})

        assert nnx.State({"a": {"x": 1, "y": 2}, "b": 3}) == merged
        assert isinstance(merged, nnx.State)

    def test_flat_dicts_and_states_merge_too(self) -> None:
        merged = refine_graphs({("a", "x"): 1}, nnx.State({"a": {"y": 2}}))

        assert nnx.State({"a": {"x": 1, "y": 2}}) == merged

    def test_integer_and_string_keys_stay_apart(self) -> None:
        merged = refine_graphs({"a": {0: 1}}, {("a", "0"): 2})

        assert {"a": {0: 1, "0": 2}} == merged.raw_mapping

    def test_one_graph_gives_an_equal_state_that_is_another_object(self) -> None:
        state = nnx.State({"a": 1})

        merged = refine_graphs(state)

        assert state == merged
        assert state is not merged
        assert nnx.State({}) == refine_graphs({})

    def test_the_pieces_of_a_module_merge_into_that_module(self) -> None:
        model = Model(rngs=nnx.Rngs(0))
        graphdef, *states = nnx.split(model, nnx.Param, ...)

        merged = nnx.merge(graphdef, refine_graphs(*reversed(states)))

        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: (a == b).all(), nnx.state(model), nnx.state(merged)
            )
        )

    def test_running_a_merged_module_changes_no_input(self) -> None:
        graphdef, state = nnx.split(Model(rngs=nnx.Rngs(0)))
        merged = nnx.merge(graphdef, refine_graphs(state))

        merged.dropout(jnp.ones(3))

        assert 1 == merged.dropout.rngs.count[...]
        assert 0 == state["dropout"]["rngs"]["count"][...]

    def test_a_merged_state_can_change_without_its_inputs(self) -> None:
        inner = {"x": 1}
        state: Any = nnx.State({"a": inner})
        merged = refine_graphs(state, {"b": 1})

        merged["a"]["x"] = 2

        assert {"x": 1} == inner
        assert nnx.State({"a": {"x": 1}}) == state

    def test_two_leaves_at_one_path_are_rejected_naming_it(self) -> None:
        with pytest.raises(ValueError, match=r"two leaves have the path \['a'\]\[0\]"):
            refine_graphs({"a": {0: 1}}, {("a", 0): 1})

    @pytest.mark.parametrize("above_first", [True, False])
    def test_a_leaf_below_a_leaf_is_rejected_naming_both(
        self, above_first: bool
    ) -> None:
        graphs = [{"a": 1}, {"a": {"x": 2}}]
        with pytest.raises(ValueError, match=r"got \['a'\]\['x'\] below \['a'\]"):
            refine_graphs(*(graphs if above_first else reversed(graphs)))

    def test_a_leaf_at_the_root_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="a leaf at the root"):
            refine_graphs({(): 1})

    def test_no_graph_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="at least one graph, got none"):
            refine_graphs()

    def test_other_than_mappings_are_a_type_error(self) -> None:
        with pytest.raises(TypeError, match=r"dict or an nnx\.State, got list"):
            refine_graphs([1])  # type: ignore[arg-type]  # what is tested


class TestRecreateMetaValues:
    def test_a_state_gives_a_nested_dict_of_fresh_values(self) -> None:
        fresh = recreate_meta_values(rng_state())

        stream = fresh["dropout"]["rngs"]
        assert 0 == stream["count"][...]
        assert jnp.uint32 == stream["count"][...].dtype
        assert words(stream["key"]) == FIRST_KEY_OF_42

    def test_dicts_give_dicts_of_the_same_shape(self) -> None:
        nested = recreate_meta_values({"a": {"k": key()}})
        flat = recreate_meta_values({("a", "k"): key()})

        assert words(nested["a"]["k"]) == FIRST_KEY_OF_42
        assert words(flat["a", "k"]) == FIRST_KEY_OF_42

    def test_each_count_and_each_key_is_another(self) -> None:
        fresh = recreate_meta_values(
            {"c": count(), "d": count(), "k": key(), "l": key()}
        )

        assert [0, 1] == [int(fresh[name][...]) for name in "cd"]
        assert [FIRST_KEY_OF_42, SECOND_KEY_OF_42] == [
            words(fresh[name]) for name in "kl"
        ]

    def test_the_seed_decides_the_keys(self) -> None:
        recreated = {
            seed: words(recreate_meta_values({"k": key()}, seed)["k"])
            for seed in (None, 42, 7, 0)
        }

        assert recreated[None] == recreated[42] == FIRST_KEY_OF_42
        assert recreated[7] == FIRST_KEY_OF_7
        # easydel takes 0 for "no seed".
        assert recreated[0] != FIRST_KEY_OF_42

    def test_the_values_given_stay_as_they_were(self) -> None:
        values = {("a", "c"): count(9), ("a", "k"): key(3)}
        before = dict(values)

        recreate_meta_values(values)

        assert before == values
        assert 9 == values["a", "c"][...]
        assert words(values["a", "k"]) == [0, 3]

    @pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
    def test_a_typed_key_keeps_its_implementation(self, impl: str) -> None:
        fresh = recreate_meta_values({"k": key(impl=impl)})

        assert impl == jax.random.key_impl(fresh["k"][...])

    @pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
    def test_an_abstract_key_becomes_a_key_of_its_implementation(
        self, impl: str
    ) -> None:
        model = nnx.eval_shape(
            lambda: Model(rngs=nnx.Rngs(jax.random.key(0, impl=impl)))
        )

        fresh = recreate_meta_values(nnx.state(model, nnx.RngState))

        stream: Any = fresh["dropout"]["rngs"]
        assert impl == jax.random.key_impl(stream["key"][...])
        assert 0 == stream["count"][...]

    def test_raw_key_data_stays_raw(self) -> None:
        fresh = recreate_meta_values({"k": nnx.RngKey(jax.random.PRNGKey(5), tag="t")})

        assert jnp.uint32 == fresh["k"][...].dtype
        assert FIRST_KEY_OF_42 == fresh["k"][...].tolist()

    def test_arrays_of_keys_and_counts_keep_their_shapes(self) -> None:
        keys = nnx.RngKey(jax.random.split(jax.random.key(0), (3, 2)), tag="t")
        counts = nnx.RngCount(jnp.ones((3, 2), jnp.uint32), tag="t")

        fresh = recreate_meta_values({"k": keys, "c": counts})

        assert (3, 2) == fresh["k"][...].shape == fresh["c"][...].shape
        data = jax.random.key_data(fresh["k"][...]).reshape(6, 2).tolist()
        assert 6 == len(set(map(tuple, data)))

    def test_hooks_do_not_affect_recreated_values(self) -> None:
        old = nnx.RngKey(jax.random.split(jax.random.key(1, impl="rbg"), 3), tag="t")
        old.set_metadata(
            on_get_value=lambda _, value: jnp.ones(7),
            on_set_value=lambda _, value: None,
        )

        made = recreate_meta_values({"a": old})["a"].get_raw_value()

        assert (3,) == made.shape
        assert "rbg" == str(jax.random.key_impl(made))

    def test_the_metadata_of_a_variable_stays(self) -> None:
        fresh = recreate_meta_values({"k": key(), "c": count()})

        assert ["t", "t"] == [fresh["k"].tag, fresh["c"].tag]

    @pytest.mark.parametrize("leaf", [nnx.Param(1), nnx.BatchStat(1), jnp.ones(1)])
    def test_anything_else_is_a_type_error_naming_its_path(self, leaf: object) -> None:
        with pytest.raises(TypeError, match=r"leaf \['a'\]\['b'\]: expected RngCount"):
            recreate_meta_values({"a": {"b": leaf}})

    def test_nothing_gives_nothing(self) -> None:
        assert {} == recreate_meta_values({})
        assert {} == recreate_meta_values(nnx.State({}))

    def test_other_than_mappings_are_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="got list"):
            recreate_meta_values([count()])  # type: ignore[arg-type]  # what is tested


class TestMetaValueRecreator:
    def test_it_yields_counts_and_keys_in_order(self) -> None:
        recreator = MetaValueRecreator()

        counts = [recreator.get_count(), recreator.get_count()]
        keys = [recreator.get_rng(), recreator.get_rng()]

        assert [0, 1] == [int(c) for c in counts]
        assert [FIRST_KEY_OF_42, SECOND_KEY_OF_42] == [
            key.tolist()  # raw, as EasyDeL's
            for key in keys
        ]


def test_the_leaves_of_a_graph_stand_under_their_whole_paths() -> None:
    leaves = graph_leaves({"a": {0: 1, "0": nnx.State({"b": 2})}, "e": {}})

    assert {("a", 0): 1, ("a", "0", "b"): 2} == leaves


def test_graph_leaves_accepts_mappings_only() -> None:
    with pytest.raises(TypeError, match=r"dict or an nnx\.State, got int"):
        graph_leaves(1)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_results_equal_easydels_except_for_listed_reasons(case: Case) -> None:
    answer = outcome(case.run, traversals)

    assert (case.deviation is None) == (RECORDED[case.name] == answer), answer


def test_each_case_is_recorded_once() -> None:
    assert sorted(RECORDED) == sorted(case.name for case in cases())


def test_all_public_names_exist_and_the_old_spellings_are_the_new_functions() -> None:
    assert all(hasattr(traversals, name) for name in traversals.__all__)
    assert traversals.init_garphstate is traversals.init_graphstate
    assert traversals.diffrentiate_state is traversals.differentiate_state
