"""Creates NNX modules from their classes: lazily or not, whole or in parts.

Lazy is the default: the constructor runs under ``nnx.eval_shape``, every value is a
ShapeDtypeStruct, and nothing is computed or allocated.

>>> nnx_init(nnx.Linear, in_features=2, out_features=3).kernel.get_value()
ShapeDtypeStruct(shape=(2, 3), dtype=float32)
"""

from collections.abc import Callable
from typing import Any, TypeVar

from flax import nnx

from storesvc_client.trees.nnx.graphs import GraphState

__all__ = ["create_graphdef", "init_graphstate", "nnx_init"]

M = TypeVar("M", bound=nnx.Module)

# The underscores distinguish these names from arguments of the constructor, which are
# passed in the same call. Names, order and defaults are EasyDeL's.
# ruff: noqa: FBT001, FBT002


def nnx_init(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    _lazy: bool = True,
    **kwargs: Any,
) -> M:
    """Returns a module, with abstract values unless ``_lazy`` is false.

    Args:
        module: The class, or another callable that creates the module.
        _add_rngs: Pass ``nnx.Rngs`` to the constructor.
        _rng_key: Name of the argument for the rngs.
        _seed: Seed of the rngs.
        _lazy: Create abstract values.
        **kwargs: Other arguments of the constructor.

    Raises:
        TypeError: The constructor does not accept these arguments.
    """

    def make() -> M:
        rngs = {_rng_key: nnx.Rngs(_seed)} if _add_rngs else {}
        return module(**kwargs, **rngs)

    if not _lazy:
        return make()
    made: M = nnx.eval_shape(make)
    return made


def create_graphdef(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    **kwargs: Any,
) -> "nnx.GraphDef[M]":
    """Returns the structure of a module without computing any value.

    Args:
        module: See ``nnx_init``.
        _add_rngs: See ``nnx_init``.
        _rng_key: See ``nnx_init``.
        _seed: See ``nnx_init``; the structure does not depend on it.
        **kwargs: Other arguments of the constructor.

    Raises:
        TypeError: The constructor does not accept these arguments.
    """
    made = nnx_init(module, _add_rngs, _rng_key, _seed, **kwargs)
    graphdef: nnx.GraphDef[M] = nnx.split(made)[0]
    return graphdef


def init_graphstate(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    _lazy: bool = True,
    **kwargs: Any,
) -> GraphState:
    """Returns the Variables of a module, abstract unless ``_lazy`` is false.

    Args:
        module: See ``nnx_init``.
        _add_rngs: See ``nnx_init``.
        _rng_key: See ``nnx_init``.
        _seed: See ``nnx_init``.
        _lazy: See ``nnx_init``.
        **kwargs: Other arguments of the constructor.

    Raises:
        TypeError: The constructor does not accept these arguments.
    """
    made = nnx_init(module, _add_rngs, _rng_key, _seed, _lazy, **kwargs)
    state: GraphState = nnx.split(made)[1]
    return state
