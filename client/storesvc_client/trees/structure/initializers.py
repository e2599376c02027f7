"""Encodes initializers, closures that jax creates, as the call that creates them.

A closure has no importable name, but all closures of one factory share one code object,
which identifies the factory. Its arguments are the captured variables.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, Final

import jax.nn.initializers as init
from flax import nnx

from storesvc_client.trees.structure.metadata import native_name, portable_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """A function of jax that creates initializers."""

    name: str
    make: Callable[..., Any]
    parameters: frozenset[str]


def _factory(make: Callable[..., Any]) -> Factory:
    return Factory(
        name=f"jax.nn.initializers:{make.__name__}",
        make=make,
        parameters=frozenset(inspect.signature(make).parameters),
    )


_SAMPLES: Final[tuple[tuple[Callable[..., Any], Any], ...]] = (
    (init.constant, init.constant(0)),
    (init.delta_orthogonal, init.delta_orthogonal()),
    (init.normal, init.normal()),
    (init.orthogonal, init.orthogonal()),
    (init.truncated_normal, init.truncated_normal()),
    (init.uniform, init.uniform()),
    # Also creates lecun, he, kaiming, glorot and xavier initializers.
    (init.variance_scaling, init.variance_scaling(1.0, "fan_in", "normal")),
)

FACTORIES: Final[Mapping[str, Factory]] = MappingProxyType(
    {made.name: made for made in (_factory(make) for make, _ in _SAMPLES)}
)
"""The only functions that decoding calls, by name."""

_BY_CODE: Final[Mapping[CodeType, Factory]] = MappingProxyType(
    {sample.__code__: _factory(make) for make, sample in _SAMPLES}
)

WITH_METADATA: Final = "flax.nnx:with_metadata"
"""Factory of ``nnx.with_partitioning``; its arguments are metadata."""

_with_metadata: Any = nnx.with_metadata(init.zeros, tag=0)
_WITH_METADATA_CODE: Final = _with_metadata.__code__
_INITIALIZER: Final = "initializer"


def call_of(function: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns the factory and arguments of an initializer, or None if it has no
    factory."""
    if not isinstance(function, FunctionType):
        return None
    cells = _cells(function)
    if function.__code__ is _WITH_METADATA_CODE:
        return _metadata_call(cells)
    factory = _BY_CODE.get(function.__code__)
    if factory is None:
        return None
    arguments = {k: v for k, v in cells.items() if k in factory.parameters}
    dtype = inspect.signature(function).parameters["dtype"].default
    if dtype is not None and "dtype" in factory.parameters:
        arguments["dtype"] = dtype
    return factory.name, arguments


def _cells(function: FunctionType) -> dict[str, Any]:
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, contents, strict=True))


def _metadata_call(cells: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    initializer, metadata = cells.pop(_INITIALIZER), cells.pop("metadata")
    if any(cells.values()):  # hooks are functions of the user
        return None
    portable = {portable_name(key): value for key, value in metadata.items()}
    return WITH_METADATA, {_INITIALIZER: initializer, **portable}


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Returns the initializer that a factory creates.

    Raises:
        KeyError: There is no factory with that name.
        TypeError: The factory does not accept these arguments.
    """
    if name == WITH_METADATA:
        initializer = arguments.pop(_INITIALIZER, None)
        hooks = any(k.startswith("on_") or k.endswith("_hooks") for k in arguments)
        if not callable(initializer) or hooks:
            raise TypeError("expected an initializer and its metadata")
        native = {native_name(key): value for key, value in arguments.items()}
        return nnx.with_metadata(initializer, **native)
    factory = FACTORIES[name]
    if unknown := arguments.keys() - factory.parameters:
        raise TypeError(f"unexpected arguments {sorted(unknown)}")
    return factory.make(**arguments)
