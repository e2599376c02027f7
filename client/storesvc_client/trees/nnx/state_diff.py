"""Compares flat states: keys that one lacks, and values of another type.

>>> validate_state({"a": 1.5}, {"a": 1, "b": 2})["missing_keys"]
{'b'}
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from flax import nnx

from storesvc_client._pytree.paths import path_text
from storesvc_client.trees.nnx.graphs import fresh_leaf
from storesvc_client.trees.nnx.rng_values import (
    MetaValueRecreator,
    recreated_leaf,
    stored_value,
)

__all__ = [
    "StateValidationResult",
    "differentiate_state",
    "redefine_state",
    "validate_state",
]


@dataclass(frozen=True, slots=True)
class StateValidationResult(Mapping[str, Any]):
    """Problems of a state; also a mapping of its fields."""

    is_valid: bool
    """True if there are no problems."""

    missing_keys: set[Any]
    """Keys that the state lacks."""

    invalid_types: dict[Any, type]
    """Types found instead of the expected ones, by key."""

    @classmethod
    def from_tuple(cls, values: Iterable[Any]) -> Self:
        """Returns a result from its three fields, in order.

        Raises:
            TypeError: There are not exactly three values.
        """
        return cls(*values)

    def to_tuple(self) -> tuple[bool, set[Any], dict[Any, type]]:
        """Returns the three fields in order."""
        return self.is_valid, self.missing_keys, self.invalid_types

    def replace(self, **kwargs: Any) -> Self:
        """Returns a copy with other values in some fields.

        Raises:
            TypeError: There is no such field.
        """
        return replace(self, **kwargs)

    def __getitem__(self, name: str) -> Any:
        """Returns the field with a name.

        Raises:
            KeyError: There is no such field.
        """
        if name not in tuple(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        """Returns the names of the fields."""
        return iter([field.name for field in fields(self)])

    def __len__(self) -> int:
        """Returns the number of fields."""
        return len(fields(self))


def validate_state(
    state: Mapping[Any, Any], init_state: Mapping[Any, Any]
) -> StateValidationResult:
    """Returns the keys that a state lacks of ``init_state``, and values of another
    type.

    Keys that are not in ``init_state`` are allowed.

    Args:
        state: Values by key or path.
        init_state: The expected values, by the same keys.
    """
    missing = {key for key in init_state if key not in state}
    invalid = {
        key: type(value)
        for key, value in state.items()
        if key in init_state and not isinstance(value, type(init_state[key]))
    }
    return StateValidationResult(
        is_valid=not missing and not invalid,
        missing_keys=missing,
        invalid_types=invalid,
    )


def differentiate_state(
    state: Mapping[Any, Any],
    init_state: Mapping[Any, Any],
    validate: bool = True,  # noqa: FBT001, FBT002 - the order is easydel's
) -> dict[Any, Any]:
    """Returns the Variables of ``init_state`` that ``state`` lacks.

    Args:
        state: Values by key or path.
        init_state: Variables by the same keys.
        validate: Reject a state that lacks keys or has values of another type.

    Raises:
        TypeError: A missing value is not a Variable.
        ValueError: The state is not valid, and ``validate`` is true.
    """
    if validate:
        result = validate_state(state, init_state)
        if not result.is_valid:
            missing = sorted(map(_place, result.missing_keys))
            types = {
                _place(key): f"expected {type(init_state[key]).__name__}, "
                f"got {found.__name__}"
                for key, found in result.invalid_types.items()
            }
            raise ValueError(
                f"state is not valid: missing {missing}, of other types {types}"
            )
    lacking = {key: value for key, value in init_state.items() if key not in state}
    for key, value in lacking.items():
        if not isinstance(value, nnx.Variable):
            raise TypeError(
                f"leaf {_place(key)}: expected a Variable, got {type(value).__name__}"
            )
    return {key: fresh_leaf(value) for key, value in lacking.items()}


def redefine_state(
    state: Mapping[Any, Any], missings: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Returns the state with new values for the keys that it lacks.

    Counts and keys come from ``MetaValueRecreator()``, in the order of ``missings``,
    each with the shape and kind of the Variable it replaces.

    Args:
        state: Values by key or path.
        missings: A result of ``differentiate_state``: ``nnx.RngCount``, ``nnx.RngKey``,
            and ``nnx.Param`` without a value.

    Raises:
        AttributeError: A Variable has another type.
        ValueError: A parameter has a value, which cannot be recreated, or the state
            already has one of the keys.
    """
    recreator = MetaValueRecreator()
    result = dict(state)
    for key, value in missings.items():
        if key in state:
            raise ValueError(f"leaf {_place(key)}: expected none in the state, got one")
        match value:
            case nnx.Param():
                if stored_value(value) is not None:
                    raise ValueError(
                        f"leaf {_place(key)}: expected a Param without a value, got "
                        "one with a value, which cannot be recreated"
                    )
                result[key] = fresh_leaf(value)
            case nnx.RngCount() | nnx.RngKey():
                result[key] = recreated_leaf(value, recreator, (key,))
            case _:
                raise AttributeError(
                    f"leaf {_place(key)}: expected RngCount, RngKey or an empty "
                    f"Param, got {type(value).__name__}"
                )
    return result


def _place(key: Any) -> str:
    return path_text(key if isinstance(key, tuple) else (key,))
