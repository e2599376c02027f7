"""States are compared and completed, and modules created from their classes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from storesvc_client.trees.traversals import (
    StateValidationResult,
    create_graphdef,
    differentiate_state,
    init_graphstate,
    nnx_init,
    redefine_state,
    validate_state,
)

FIRST_KEY_OF_42 = [1832780943, 270669613]


def rng() -> dict[Any, Any]:
    """Returns a count and a key that were used."""
    return {
        ("d", "count"): nnx.RngCount(jnp.uint32(9), tag="t"),
        ("d", "key"): nnx.RngKey(jax.random.key(3), tag="t"),
    }


class TestStateValidationResult:
    RESULT = StateValidationResult(
        is_valid=False, missing_keys={"a"}, invalid_types={"b": int}
    )

    def test_it_is_a_mapping_of_its_fields(self) -> None:
        fields = {"is_valid": False, "missing_keys": {"a"}, "invalid_types": {"b": int}}

        assert isinstance(self.RESULT, Mapping)
        assert fields == dict(self.RESULT)
        assert list(fields) == list(self.RESULT.keys())
        assert list(fields.values()) == list(self.RESULT.values())
        assert list(fields.items()) == list(self.RESULT.items())
        assert 3 == len(self.RESULT)

    def test_a_field_that_does_not_exist_is_a_key_error(self) -> None:
        with pytest.raises(KeyError, match="replace"):
            self.RESULT["replace"]

    def test_it_becomes_a_tuple_and_back(self) -> None:
        values = self.RESULT.to_tuple()

        assert (False, {"a"}, {"b": int}) == values
        assert self.RESULT == StateValidationResult.from_tuple(values)
        with pytest.raises(TypeError):
            StateValidationResult.from_tuple(values[:2])

    def test_replace_makes_another(self) -> None:
        other = self.RESULT.replace(missing_keys=set())

        assert set() == other.missing_keys
        assert {"a"} == self.RESULT.missing_keys
        with pytest.raises(TypeError):
            self.RESULT.replace(more=1)

    def test_it_is_frozen(self) -> None:
        with pytest.raises(AttributeError):
            self.RESULT.is_valid = True  # type: ignore[misc]  # what is tested


class TestDifferentiateState:
    def test_missing_keys_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"missing \[\"\['d'\]\['key'\]\"\], of"):
            differentiate_state({("d", "count"): rng()["d", "count"]}, rng())

    def test_types_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"\['a'\].*expected int, got float"):
            differentiate_state({"a": 1.5}, {"a": 1})

    def test_the_result_shares_no_variable(self) -> None:
        whole = rng()

        lacking = differentiate_state({}, whole, validate=False)

        assert whole.keys() == lacking.keys()
        assert not any(lacking[key] is whole[key] for key in whole)


class TestRedefineState:
    def test_counts_and_keys_are_fresh_and_of_their_kind(self) -> None:
        state = {("w",): nnx.Param(jnp.ones(1))}

        whole = redefine_state(state, rng())

        assert {("w",), ("d", "count"), ("d", "key")} == whole.keys()
        assert 0 == whole["d", "count"].get_value()
        key = whole["d", "key"]
        assert FIRST_KEY_OF_42 == jax.random.key_data(key.get_value()).tolist()
        assert "t" == key.tag

    def test_the_inputs_stay_as_they_were(self) -> None:
        state: dict[Any, Any] = {("w",): nnx.Param(jnp.ones(1))}
        missing = rng()

        redefine_state(state, missing)

        assert {("w",)} == state.keys()
        assert 9 == missing["d", "count"].get_value()

    def test_redefining_completes_the_state(self) -> None:
        whole = {**rng(), ("w",): nnx.Param(jnp.ones(1))}
        state = {("w",): whole["w",]}

        redefined = redefine_state(
            state, differentiate_state(state, whole, validate=False)
        )

        assert validate_state(redefined, whole).is_valid

    @pytest.mark.parametrize("kind", [nnx.BatchStat, nnx.Variable, nnx.Cache])
    def test_other_variables_are_an_attribute_error(self, kind: Any) -> None:
        with pytest.raises(AttributeError, match=rf"\['a'\].*got {kind.__name__}"):
            redefine_state({}, {("a",): kind(jnp.ones(1))})

    def test_a_parameter_with_a_value_is_rejected(self) -> None:
        with pytest.raises(ValueError, match="cannot be recreated"):
            redefine_state({}, {"a": nnx.Param(jnp.ones(1))})

    def test_hooks_make_no_value_of_none(self) -> None:
        empty = nnx.Param(None)
        empty.set_metadata(on_get_value=lambda _, value: jnp.ones(1))

        whole = redefine_state({}, {("a",): empty})

        assert whole["a",].get_raw_value() is None

    def test_existing_values_are_not_overwritten(self) -> None:
        with pytest.raises(ValueError, match="expected none in the state, got one"):
            redefine_state(rng(), rng())


class Named(nnx.Module):
    """A module whose constructor has another name for its RNG argument."""

    def __init__(self, n: int, *, streams: nnx.Rngs) -> None:
        self.linear = nnx.Linear(n, 1, rngs=streams)


class TestMaking:
    def test_lazy_values_are_abstract_and_others_are_not(self) -> None:
        lazy: Any = init_graphstate(Named, _rng_key="streams", n=3)
        eager: Any = init_graphstate(Named, _rng_key="streams", _lazy=False, n=3)

        abstract = lazy["linear"]["kernel"].get_value()
        assert isinstance(abstract, jax.ShapeDtypeStruct)
        assert (3, 1) == abstract.shape == eager["linear"]["kernel"].get_value().shape

    def test_the_seed_decides_the_values(self) -> None:
        kernels = [
            nnx_init(
                Named, _rng_key="streams", _seed=seed, _lazy=False, n=3
            ).linear.kernel.get_value()
            for seed in (1, 1, 2)
        ]

        assert (kernels[0] == kernels[1]).all()
        assert (kernels[0] != kernels[2]).any()

    def test_the_options_go_by_position_too(self) -> None:
        model = nnx_init(Named, True, "streams", 0, True, n=2)

        graphdef = create_graphdef(Named, True, "streams", 0, n=2)

        assert nnx.graphdef(model) == graphdef

    def test_the_pieces_make_the_module(self) -> None:
        graphdef = create_graphdef(Named, _rng_key="streams", n=2)
        state = init_graphstate(Named, _rng_key="streams", _lazy=False, n=2)

        assert (1, 1) == nnx.merge(graphdef, state).linear(jnp.ones((1, 2))).shape

    def test_an_argument_that_is_not_taken_is_a_type_error(self) -> None:
        with pytest.raises(TypeError, match="rngs"):
            nnx_init(Named, n=2)
