"""Leaves by name: flat and nested dicts, JAX trees, their copies and shardings."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import empty_node
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from storesvc_client.trees.traversals import (
    deepcopy_model,
    flatten_dict,
    flatten_tree,
    int_key_to_string,
    is_flatten,
    named_tree_map,
    specs_to_name_sharding,
    string_key_to_int,
    tree_apply,
    unflatten_dict,
)

P = PartitionSpec

KEYS = st.integers(0, 3) | st.sampled_from(["a", "b", "0", "", ".."])
TREES = st.recursive(
    st.integers(), lambda below: st.dictionaries(KEYS, below), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


class TestFlattenDict:
    @given(TREES)
    def test_every_flat_dict_unflattens(self, tree: Any) -> None:
        assert tree == unflatten_dict(flatten_dict(tree, keep_empty_nodes=True))

    def test_integers_stay_integers_without_a_separator(self) -> None:
        assert {("a", 0): 1, ("a", "0"): 2} == flatten_dict({"a": {0: 1, "0": 2}})

    def test_a_flat_dict_stays_as_it_is(self) -> None:
        flat = {("a", 0): 1, ("b",): 2}

        assert flat == flatten_dict(flat)
        assert flat is not flatten_dict(flat)

    def test_mappings_of_all_kinds_are_gone_into(self) -> None:
        assert {("a", "b"): 1} == flatten_dict({"a": nnx.State({"b": 1})})

    def test_empty_nodes_are_kept_as_text_too(self) -> None:
        flat = flatten_dict({"a": {"b": {}}}, sep="/", keep_empty_nodes=True)

        assert {"a/b": empty_node} == flat
        assert {"a": {"b": {}}} == unflatten_dict(flat, sep="/")

    def test_integers_become_text_with_a_separator(self) -> None:
        state: Any = nnx.State({"a": {0: 1}})

        assert {"a/0": 1} == flatten_dict(state, sep="/")
        assert {"a/0": 1} == flatten_dict({("a", 0): 1}, sep="/")

    @pytest.mark.parametrize(
        ("tree", "message"),
        [
            ({"a": {0: 1, "0": 2}}, r"two leaves have the name 'a/0': .*\['0'\]"),
            ({"a/b": 1}, r"leaf \['a/b'\]: expected keys without the separator '/'"),
            ({"a": {"b": 1}, "a/b": 1}, r"\['a/b'\]: expected keys without"),
        ],
    )
    def test_ambiguous_joined_names_are_rejected(self, tree: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            flatten_dict(tree, sep="/")

    def test_a_long_separator_that_keys_hold_in_part_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="without the separator '//'"):
            flatten_dict({"a/": {"b": 1}}, sep="//")

    def test_a_leaf_below_a_leaf_is_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"got \['a'\]\['b'\] below \['a'\]"):
            flatten_dict({("a",): 1, ("a", "b"): 2})

    @pytest.mark.parametrize("tree", [[1], None, 3, "text"])
    def test_other_than_mappings_are_a_type_error(self, tree: Any) -> None:
        with pytest.raises(TypeError, match=f"got {type(tree).__name__}"):
            flatten_dict(tree)

    def test_with_fumap_it_is_a_leaf(self) -> None:
        no_mapping: Any = [1]

        assert {(): [1]} == flatten_dict(no_mapping, fumap=True)


class TestUnflattenDict:
    @pytest.mark.parametrize(
        ("flat", "message"),
        [
            ({("a",): 1, ("a", "b"): 2}, r"\['a'\]\['b'\] below \['a'\]"),
            ({("a", "b", "c"): 1, ("a",): {}}, "expected no leaf above another"),
            ({(): 1}, "got a leaf at the root"),
        ],
    )
    def test_paths_that_do_not_nest_are_rejected(self, flat: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            unflatten_dict(flat)

    def test_keys_of_the_other_kind_are_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="key 'ab': expected a tuple, got str"):
            unflatten_dict({"ab": 1})
        with pytest.raises(TypeError, match="expected text, got tuple"):
            unflatten_dict({("a",): 1}, sep="/")

    def test_other_than_mappings_are_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="got list"):
            unflatten_dict([1])  # type: ignore[arg-type]  # what is tested

    def test_an_empty_node_that_went_through_a_tree_map_is_empty_still(self) -> None:
        flat = flatten_dict({"a": {}}, sep="/", keep_empty_nodes=True)

        mapped = jax.tree.map(lambda leaf: leaf, flat)

        assert {"a": {}} == unflatten_dict(mapped, sep="/")


class TestKeys:
    @pytest.mark.parametrize("text", ["007", "²", "-1", "1.0", "", "٣", "9" * 5000])
    def test_text_that_str_gives_for_no_layer_stays(self, text: str) -> None:
        assert {"a": {text: 1}} == string_key_to_int({"a": {text: 1}})

    def test_digits_become_integers_and_back(self) -> None:
        tree: dict[Any, Any] = {"a": {"0": 1, "12": {}}, "b": 2}

        numbered = string_key_to_int(tree)

        assert {"a": {0: 1, 12: {}}, "b": 2} == numbered
        assert tree == int_key_to_string(numbered)

    def test_paths_are_converted_part_by_part(self) -> None:
        assert {("a", 0): 1} == string_key_to_int({("a", "0"): 1})
        assert {("a", "0"): 1} == int_key_to_string({("a", 0): 1})

    def test_the_input_stays_as_it_was(self) -> None:
        tree = {("a", 0): 1}

        int_key_to_string(tree)

        assert {("a", 0): 1} == tree

    @pytest.mark.parametrize("convert", [string_key_to_int, int_key_to_string])
    def test_an_integer_next_to_its_text_is_rejected(self, convert: Any) -> None:
        with pytest.raises(ValueError, match=r"two keys become .*0.* in \['a'\]"):
            convert({"a": {0: 1, "0": 2}})

    @pytest.mark.parametrize("convert", [string_key_to_int, int_key_to_string])
    def test_other_than_mappings_are_a_type_error(self, convert: Any) -> None:
        with pytest.raises(TypeError, match="got list"):
            convert([1])

    def test_one_tuple_among_the_keys_makes_a_dict_flat(self) -> None:
        assert is_flatten({"b": 2, ("a",): 1})
        assert not is_flatten({"a": {("a",): 1}})


class TestFlattenTree:
    def test_two_leaves_of_one_name_are_rejected(self) -> None:
        with pytest.raises(ValueError, match="without the separator"):
            flatten_tree({"a": {"b": 2}, "a/b": 1}, sep="/")

    def test_two_leaves_of_one_tuple_are_rejected(self) -> None:
        key = type("Key", (str,), {"__hash__": object.__hash__})

        with pytest.raises(ValueError, match="two leaves have the name"):
            flatten_tree({key("a"): 1, key("a"): 2})

    def test_an_empty_separator_is_taken_while_names_differ(self) -> None:
        assert {"a0": 1, "a1": 2} == flatten_tree({"a": [1, 2]}, sep="")
        with pytest.raises(ValueError, match="have the name 'abc'"):
            flatten_tree({"ab": {"c": 1}, "a": {"bc": 2}}, sep="")


class TestNamedTreeMap:
    def test_variables_keep_their_place(self) -> None:
        state = nnx.state(nnx.Linear(1, 2, rngs=nnx.Rngs(0)))

        names = named_tree_map(lambda name, _: name, state, sep="/")

        assert "kernel/value" == names["kernel"].get_value()

    def test_a_tree_of_another_structure_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="b"):
            named_tree_map(lambda _, x, y: x + y, {"a": 1}, {"b": 1})

    def test_ambiguous_names_are_rejected(self) -> None:
        with pytest.raises(ValueError, match="without the separator"):
            named_tree_map(lambda name, _: name, {"a/b": 1}, sep="/")


class TestTreeApply:
    def test_a_callable_that_is_a_tree_is_called(self) -> None:
        add = jax.tree_util.Partial(lambda x, y: x + y, 1)

        assert {"a": 3} == tree_apply({"a": add}, {"a": 2})


class TestDeepcopyModel:
    def test_a_variable_in_two_places_is_one_in_the_copy(self) -> None:
        model: Any = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        model.tied = model.kernel

        copied = deepcopy_model({"m": model})["m"]

        assert copied.kernel is copied.tied
        assert copied.kernel is not model.kernel

    def test_arrays_in_place_are_not_shared(self) -> None:
        tree: dict[str, Any] = {"a": np.zeros(2), "b": [np.ones(1)]}

        copied = deepcopy_model(tree)
        tree["a"][:] = math.inf

        assert [0, 0] == copied["a"].tolist()

    def test_an_abstract_module_copies(self) -> None:
        model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))

        assert (2, 3) == deepcopy_model(model).kernel.get_value().shape


class TestSpecsToNameSharding:
    def test_a_mesh_set_for_the_context_is_taken(self) -> None:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        with jax.set_mesh(mesh):
            shardings = specs_to_name_sharding({"a": P("x")})

        assert {"a": NamedSharding(mesh, P("x"))} == shardings

    def test_a_missing_mesh_is_rejected_for_any_specs(self) -> None:
        with pytest.raises(ValueError, match="expected mesh="):
            specs_to_name_sharding({"a": P()})

    def test_an_unknown_axis_is_rejected_naming_the_leaf(self) -> None:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        with pytest.raises(ValueError, match=r"leaf \['a'\]: .*zz"):
            specs_to_name_sharding({"a": P("zz")}, mesh)

    def test_other_than_specs_are_a_type_error(self) -> None:
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        with pytest.raises(TypeError, match=r"leaf \['a'\]: expected a PartitionSpec"):
            specs_to_name_sharding({"a": jnp.ones(1)}, mesh)
