"""Blueprints: the model that a restore builds, before any of its arrays exists.

A blueprint is made by the caller's code, which runs under ``nnx.eval_shape``: a
factory, a class, or a module or state that is already there.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from storesvc.format.dtypes import DTYPES
from storesvc_client._values import LeafInfo, PathPart
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.trees.casting import cast_floating
from storesvc_client.trees.graphs import (
    GraphPath,
    GraphState,
    fill_graph,
    graph_leaves,
    graph_paths,
    merge_by_path,
    refine_graphs,
)
from storesvc_client.trees.making import nnx_init
from storesvc_client.trees.nesting import nest
from storesvc_client.trees.partitioning import Rules
from storesvc_client.trees.parts import (
    is_module,
    mesh_of,
    partition_rules_of,
    split_module,
)
from storesvc_client.trees.recipes import Recipe
from storesvc_client.trees.structure import Opaque

__all__ = ["PARTS", "Blueprint", "ModelLike", "draw_blueprint", "stored_blueprint"]

PARTS: Final = ("graphstate", "graphother")
"""The parts of a state that hold Variables."""

ModelLike: TypeAlias = Any
"""A module class; a factory, a callable that takes nothing and returns a module; a
module; or a state, anything with graphdef, graphstate and graphother. Modules and
states may be abstract."""

Below: TypeAlias = tuple[tuple[PathPart, ...], str, Any]
"""A leaf below a path of a module: the rest of its path, its letters, its value."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model in three parts, whose arrays are abstract or are to be replaced."""

    graphdef: "nnx.GraphDef[Any]"
    graphstate: GraphState
    graphother: GraphState
    make: Callable[[], Any] | None
    """Makes the module with all its values; None where only an instance was given."""

    @property
    def own_mesh(self) -> Mesh | None:
        """The mesh that the model names itself."""
        return mesh_of(self._module())

    @property
    def own_rules(self) -> Rules | None:
        """The partition rules that the model knows itself."""
        return partition_rules_of(self._module())

    def cast(self, dtype: Any) -> "Blueprint":
        """Returns it with its floating-point parameters in a dtype."""
        return replace(self, graphstate=cast_floating(self.graphstate, dtype))

    def _module(self) -> Any:
        return merge_by_path(self.graphdef, self.graphstate, self.graphother)


def draw_blueprint(model: ModelLike, recipe: Recipe | None) -> Blueprint:
    """Returns the blueprint of a model.

    Args:
        model: The caller's; see ``ModelLike``. A class that has a ``config_class``
            gets the config and the dtypes of the recipe; another class is called
            with ``rngs`` if it takes that, and nothing else.
        recipe: Of the checkpoint, if it has one.

    Raises:
        InvalidRequestError: ``model`` is none of these, or a class that needs a
            config where the recipe has none.
    """
    make: Callable[[], Any] | None = None
    module = model
    if isinstance(model, type):
        make = _maker(model, recipe)
    elif not is_module(model) and callable(model):
        make = model
    if make is not None:
        module = nnx.eval_shape(make)
    try:
        graphdef, graphstate, graphother = split_module(module)
    except TypeError as e:
        raise InvalidRequestError(
            "expected model= a module class, a factory, a module or a state, got "
            f"{type(model).__name__}: {e}"
        ) from e
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=make
    )


def stored_blueprint(
    graphdef: "nnx.GraphDef[Any]", leaves: Mapping[str, LeafInfo]
) -> Blueprint:
    """Returns the blueprint of a structure, with the leaves of a checkpoint in it.

    Args:
        graphdef: The structure.
        leaves: The leaves by key; those outside of the two parts are left out.

    Raises:
        MismatchError: The leaves are not those of the structure.
    """
    paths = graph_paths(graphdef)
    below: dict[GraphPath, list[Below]] = defaultdict(list)
    part_of: dict[GraphPath, str] = {}
    for leaf in leaves.values():
        if leaf.path[:1] not in {(part,) for part in PARTS}:
            continue
        path = leaf.path[1:]
        ends = [n for n in range(len(path) + 1) if path[:n] in paths]
        end = ends[0] if ends else len(path)  # merging refuses what is no path
        part_of[path[:end]] = str(leaf.path[0])
        kinds = leaf.path_kinds[1 + end :]
        below[path[:end]].append((path[end:], kinds, _stand_in(leaf)))
    try:
        module = fill_graph(graphdef, {p: _filled(b) for p, b in below.items()})
    except ValueError as e:
        raise MismatchError(f"the structure does not fit its leaves: {e}") from e
    parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
    for path, variable in graph_leaves(nnx.state(module)).items():
        parts[part_of[path]][path] = variable
    graphstate, graphother = (refine_graphs(parts[part]) for part in PARTS)
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=None
    )


def _filled(below: list[Below]) -> Any:
    """What stands at a path of a module: an array, or what the leaves below the
    "value" of a Variable make up."""
    return nest((path[1:], kinds[1:], leaf) for path, kinds, leaf in below)


def _stand_in(leaf: LeafInfo) -> Any:
    """An abstract value that a saved leaf can take the place of."""
    if leaf.kind == "python_scalar":
        return {"bool": False, "int64": 0, "float64": 0.0}.get(leaf.dtype, 0j)
    if leaf.prng_impl is not None:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.prng_impl))
        return jax.ShapeDtypeStruct(leaf.shape[:-1], key.dtype)
    dtype = DTYPES[leaf.dtype]
    if leaf.kind == "array":
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    return np.broadcast_to(np.zeros((), dtype), leaf.shape)  # of no size in memory


def _maker(model: type, recipe: Recipe | None) -> Callable[[], Any]:
    config_class: Any = getattr(model, "config_class", None)
    # of its class, flax's metaclass shows only *args and **kwargs
    accepted = inspect.signature(model.__init__).parameters  # type: ignore[misc]
    if not hasattr(config_class, "from_dict") or "config" not in accepted:
        takes_rngs = "rngs" in accepted
        return lambda: nnx_init(model, _add_rngs=takes_rngs, _lazy=False)
    if recipe is None or recipe.config is None:
        raise InvalidRequestError(
            f"expected a checkpoint with the config of a {model.__name__}, got none; "
            "give a factory, model=lambda: ..."
        )
    config = recipe.decoded_config()
    if not isinstance(config, dict):
        raise InvalidRequestError(
            f"expected the config of a {model.__name__}, got a "
            f"{type(config).__name__}; give a factory, model=lambda: ..."
        )
    plain = {k: v for k, v in config.items() if not isinstance(v, Opaque)}
    arguments = {
        "config": config_class.from_dict(plain),
        **{k: v for k, v in recipe.decoded_arguments().items() if k in accepted},
    }
    return lambda: model(**arguments, rngs=nnx.Rngs(0))
