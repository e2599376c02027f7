"""NNX modules from their classes: lazy or not, whole or in pieces.

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

# The underscores keep these names apart from arguments of the constructor, which
# come beside them; names, order and defaults are easydel's.
# ruff: noqa: FBT001, FBT002


def nnx_init(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    _lazy: bool = True,
    **kwargs: Any,
) -> M:
    """Returns a module, its values abstract unless ``_lazy`` is false.

    Args:
        module: The class, or another callable that makes the module.
        _add_rngs: Whether the constructor is given ``nnx.Rngs``.
        _rng_key: The argument that they are given as.
        _seed: Their seed.
        _lazy: Whether values are abstract.
        **kwargs: All other arguments of the constructor.

    Raises:
        TypeError: The constructor does not take these arguments.
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
    """Returns the structure of a module, made without computing any value.

    Args:
        module: The class, or another callable that makes the module.
        _add_rngs: Whether the constructor is given ``nnx.Rngs``.
        _rng_key: The argument that they are given as.
        _seed: Their seed; it leaves no trace in the structure.
        **kwargs: All other arguments of the constructor.

    Raises:
        TypeError: The constructor does not take these arguments.
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
        module: The class, or another callable that makes the module.
        _add_rngs: Whether the constructor is given ``nnx.Rngs``.
        _rng_key: The argument that they are given as.
        _seed: Their seed.
        _lazy: Whether values are abstract.
        **kwargs: All other arguments of the constructor.

    Raises:
        TypeError: The constructor does not take these arguments.
    """
    made = nnx_init(module, _add_rngs, _rng_key, _seed, _lazy, **kwargs)
    state: GraphState = nnx.split(made)[1]
    return state
