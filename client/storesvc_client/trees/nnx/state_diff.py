"""Flat states compared: what one lacks of another, and what takes its place.

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
    """What is wrong with a state. A mapping of its fields, too."""

    is_valid: bool
    """Whether nothing is."""

    missing_keys: set[Any]
    """Keys that the state lacks."""

    invalid_types: dict[Any, type]
    """Types found where another one was expected, by key."""

    @classmethod
    def from_tuple(cls, values: Iterable[Any]) -> Self:
        """Returns the result of the three fields, in their order.

        Raises:
            TypeError: There are not three.
        """
        return cls(*values)

    def to_tuple(self) -> tuple[bool, set[Any], dict[Any, type]]:
        """Returns the three fields in their order."""
        return self.is_valid, self.missing_keys, self.invalid_types

    def replace(self, **kwargs: Any) -> Self:
        """Returns the result with other values in some fields.

        Raises:
            TypeError: There is no such field.
        """
        return replace(self, **kwargs)

    def __getitem__(self, name: str) -> Any:
        """Returns the field of a name.

        Raises:
            KeyError: There is none.
        """
        if name not in tuple(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        """Returns the names of the fields."""
        return iter([field.name for field in fields(self)])

    def __len__(self) -> int:
        """Returns how many fields there are."""
        return len(fields(self))


def validate_state(
    state: Mapping[Any, Any], init_state: Mapping[Any, Any]
) -> StateValidationResult:
    """Returns what a state lacks of ``init_state``, and what is of another type.

    Keys that ``init_state`` has not are fine.

    Args:
        state: Values by key or path.
        init_state: The values expected, by the same.
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
        init_state: Variables by the same.
        validate: Whether a state that lacks any, or has one of another type, is an
            error.

    Raises:
        TypeError: What is lacking is no Variable.
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
    """Returns the state together with fresh values for what it lacks.

    Counts and keys are those of ``MetaValueRecreator()``, in the order of
    ``missings``, each of the shape and kind of the one it stands for.

    Args:
        state: Values by key or path.
        missings: What ``differentiate_state`` returned: ``nnx.RngCount``,
            ``nnx.RngKey``, and ``nnx.Param`` without a value.

    Raises:
        AttributeError: A Variable is of another type.
        ValueError: A parameter has a value, which cannot be made up, or the state has
            one of the keys.
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
                        "one that cannot be made up"
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
