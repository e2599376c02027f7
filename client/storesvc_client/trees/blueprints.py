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

Parts: TypeAlias = tuple["nnx.GraphDef[Any]", GraphState, GraphState]

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


def draw_blueprint(
    model: ModelLike, recipe: Recipe | None, mesh: Mesh | None
) -> Blueprint:
    """Returns the blueprint of a model.

    Args:
        model: The caller's; see ``ModelLike``. A class that has a ``config_class``
            gets the config and the dtypes of the recipe; another class is called
            with ``rngs`` if it takes that, and nothing else.
        recipe: Of the checkpoint, if it has one.
        mesh: What the config of such a class is told, if it asks for a mesh.

    Raises:
        InvalidRequestError: ``model`` is none of these, or a class that needs a
            config where the recipe has none.
    """
    make: Callable[[], Any] | None = None
    if isinstance(model, type):
        make = _maker(model, recipe, mesh)
    elif not is_module(model) and callable(model):
        make = model
    try:
        parts = split_module(model) if make is None else _abstract_parts(make)
    except TypeError as e:
        raise InvalidRequestError(
            "expected model= a module class, a factory, a module or a state, got "
            f"{type(model).__name__}: {e}"
        ) from e
    graphdef, graphstate, graphother = parts
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=make
    )


def _abstract_parts(make: Callable[[], Any]) -> Parts:
    """The parts of what a factory makes, computing none of their arrays.

    ``nnx.eval_shape`` would return a module, whose bare arrays, abstract then, some
    releases of flax no longer take for leaves.
    """
    graphdefs = []

    def states() -> tuple[GraphState, GraphState]:
        graphdef, *states = split_module(make())
        graphdefs.append(graphdef)
        return states[0], states[1]

    graphstate, graphother = jax.eval_shape(states)
    return graphdefs[0], graphstate, graphother


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


def _maker(model: type, recipe: Recipe | None, mesh: Mesh | None) -> Callable[[], Any]:
    # of its class, flax's metaclass shows only *args and **kwargs
    accepted = inspect.signature(model.__init__).parameters  # type: ignore[misc]
    config_class = _config_class(model)
    if not hasattr(config_class, "from_dict") or "config" not in accepted:
        _refuse_needs(model, accepted)
        takes_rngs = "rngs" in accepted
        return lambda: nnx_init(model, _add_rngs=takes_rngs, _lazy=False)
    fields = None if recipe is None else recipe.decoded_config()
    if recipe is None or not isinstance(fields, dict):
        raise InvalidRequestError(
            f"expected a checkpoint with the config of a {model.__name__}, got none; "
            "give a factory, model=lambda: ..."
        )
    config = config_class.from_dict(
        {name: value for name, value in fields.items() if not isinstance(value, Opaque)}
    )
    if mesh is not None and hasattr(config, "set_model_mesh"):
        config.set_model_mesh(mesh)  # EasyDeL's models compute on that of their config
    arguments = recipe.decoded_arguments()
    taken = {name: arguments[name] for name in arguments if name in accepted}
    return lambda: model(config=config, **taken, rngs=nnx.Rngs(0))


def _refuse_needs(model: type, accepted: Mapping[str, inspect.Parameter]) -> None:
    """Refuses a class that cannot be called with rngs alone."""
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        name
        for name, parameter in list(accepted.items())[1:]  # the first is self
        if parameter.default is parameter.empty
        and parameter.kind not in open_ended
        and name != "rngs"
    ]
    if needed:
        raise InvalidRequestError(
            f"expected a class that needs no arguments but rngs, got {model.__name__}, "
            f"which needs {', '.join(needed)}; give a factory, model=lambda: ..."
        )


def _config_class(model: type) -> Any:
    """The class of a model's config: EasyDeL documents the first name, and sets the
    second."""
    named = getattr(model, "config_class", None)
    return named or getattr(model, "_config_class", None)
