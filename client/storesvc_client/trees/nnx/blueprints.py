"""Blueprints: abstract models that a restore fills with arrays.

A blueprint comes from the caller's code, run under ``nnx.eval_shape``: a factory, a
class, or an existing module or state.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import Mesh

from storesvc.format.dtypes import DTYPES
from storesvc_client._pytree.partition_rules import Rules
from storesvc_client._pytree.paths import GraphPath
from storesvc_client._pytree.plain_containers import nest
from storesvc_client._values.arguments import checked_cast
from storesvc_client._values.values import LeafInfo, PathPart
from storesvc_client.errors import (
    InvalidRequestError,
    MismatchError,
    StoreError,
)
from storesvc_client.trees.nnx.casting import cast_floating
from storesvc_client.trees.nnx.config_classes import (
    built_config,
    factory_of,
    needed_arguments,
    takes_config,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    fill_graph,
    graph_leaves,
    graph_paths,
    merge_by_path,
    refine_graphs,
)
from storesvc_client.trees.nnx.model_parts import (
    Parts,
    drop_caches,
    is_module,
    mesh_of,
    partition_rules_of,
    split_module,
)
from storesvc_client.trees.nnx.recipes import Recipe

__all__ = [
    "PARTS",
    "Blueprint",
    "ModelLike",
    "draw_blueprint",
    "stand_in",
    "stored_blueprint",
]

PARTS: Final = ("graphstate", "graphother")
"""Parts of a state that hold Variables."""

ModelLike: TypeAlias = Any
"""A module class; a factory, which takes no arguments and returns a module; a module;
or a state, which is any object with graphdef, graphstate and graphother. Modules and
states may be abstract."""

Below: TypeAlias = tuple[tuple[PathPart, ...], str, Any]
"""A leaf below a path of a module: the rest of its path, its path kinds, its value."""


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A model in three parts, with arrays that are abstract or will be replaced."""

    graphdef: "nnx.GraphDef[Any]"
    graphstate: GraphState
    graphother: GraphState
    make: Callable[[], Any] | None
    """Creates the module with all its values; None if only an instance was given."""

    def own_placement(self) -> tuple[Mesh | None, Rules | None]:
        """Returns the mesh and the partition rules that the model provides.

        Only for a model of the caller's: this runs the model's code.
        """
        module = merge_by_path(self.graphdef, self.graphstate, self.graphother)
        return mesh_of(module), partition_rules_of(module)

    def recipe(self, opt_state: Any, added: Mapping[str, Any]) -> Recipe:
        """Returns the recipe that a checkpoint of it, with an optimizer's state and
        added fields, would have."""
        parts = self.graphdef, self.graphstate, self.graphother
        return Recipe.of(*parts, opt_state, added)

    def cast(self, dtype: Any) -> "Blueprint":
        """Returns the blueprint with its floating-point parameters cast to a dtype."""
        return replace(self, graphstate=cast_floating(self.graphstate, dtype))


def draw_blueprint(
    model: ModelLike, recipe: Recipe | None, mesh: Mesh | None, dtype: Any = None
) -> Blueprint:
    """Returns the blueprint of a model.

    Args:
        model: The caller's model; see ``ModelLike``. A class with a config class is
            called with the config and dtypes of the recipe, any other class with
            ``rngs`` only, if it accepts that.
        recipe: Recipe of the checkpoint, if it has one.
        mesh: The mesh to set in the config, if the config accepts one.
        dtype: The ``param_dtype`` for a class with a config; None: the saved one.

    Raises:
        InvalidRequestError: ``model`` has another type, is a class that needs a config
            that the recipe lacks, or a factory that needs concrete values.
        MismatchError: A class rejects the saved config.
    """
    make: Callable[[], Any] | None = None
    if isinstance(model, type):
        make = _maker(model, recipe, mesh, dtype)
    elif not is_module(model) and callable(model):
        make = model
    if make is None:
        graphdef, graphstate, graphother = _parts(model)
    else:
        with _explained(model):
            graphdef, graphstate, graphother = _abstract_parts(make, mesh)
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=make
    )


_NEEDS_VALUES: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


@contextmanager
def _explained(model: Any) -> Generator[None]:
    """Translates exceptions of a class or factory to errors that name the cause."""
    name = getattr(model, "__name__", type(model).__name__)
    try:
        yield
    except StoreError:
        raise
    except TraceContextError as e:
        raise InvalidRequestError(
            f"model={name}: expected a factory that creates everything it changes, got "
            f"one that changes objects created outside of it ({_first_line(e)}); "
            "create the rngs and the layers inside the factory"
        ) from e
    except _NEEDS_VALUES as e:
        raise InvalidRequestError(
            f"model={name}: expected code that runs abstractly, under nnx.eval_shape, "
            f"got code that needs concrete values ({_first_line(e)}); compute these "
            "values before the restore, or give a module instance"
        ) from e
    except Exception as e:
        if not isinstance(model, type):
            raise  # an error in the caller's factory
        raise MismatchError(
            f"model={name}: expected a class that accepts the saved config and dtypes, "
            f"got {type(e).__name__}: {_first_line(e)}; give a factory, "
            f"model={factory_of(model)}"
        ) from e


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parts(module: Any) -> Parts:
    try:
        return drop_caches(split_module(module))
    except TypeError as e:
        raise InvalidRequestError(
            f"expected model= a module class, a factory, a module or a state: {e}"
        ) from e


def _abstract_parts(make: Callable[[], Any], mesh: Mesh | None) -> Parts:
    """Returns the parts of a factory's module without computing any array.

    ``nnx.eval_shape`` would return a module with abstract bare arrays, which some flax
    releases do not treat as leaves.
    """
    graphdefs = []

    def states() -> tuple[GraphState, GraphState]:
        module = make()
        _mark_arrays(module)
        graphdef, *states = _parts(module)
        graphdefs.append(graphdef)
        return states[0], states[1]

    # Variables that name mesh axes need a mesh in the context when they are created.
    with jax.set_mesh(mesh) if mesh is not None else nullcontext():
        graphstate, graphother = jax.eval_shape(states)
    return graphdefs[0], graphstate, graphother


def _mark_arrays(module: Any) -> None:
    """Marks bare arrays as data; flax does so for arrays, but not for tracers."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))


def stored_blueprint(
    graphdef: "nnx.GraphDef[Any]", leaves: Mapping[str, LeafInfo]
) -> Blueprint:
    """Returns the blueprint of a stored structure with a checkpoint's leaves.

    Args:
        graphdef: The structure.
        leaves: The leaves by key; leaves outside the two parts are ignored.

    Raises:
        MismatchError: The leaves do not match the structure.
    """
    paths = graph_paths(graphdef)
    below: dict[GraphPath, list[Below]] = defaultdict(list)
    part_of: dict[GraphPath, str] = {}
    for leaf in leaves.values():
        if leaf.path[:1] not in {(part,) for part in PARTS}:
            continue
        path = leaf.path[1:]
        ends = [n for n in range(len(path) + 1) if path[:n] in paths]
        end = ends[0] if ends else len(path)  # fill_graph rejects unknown paths
        part_of[path[:end]] = str(leaf.path[0])
        kinds = leaf.path_kinds[1 + end :]
        below[path[:end]].append((path[end:], kinds, stand_in(leaf)))
    values = {path: _filled(leaves) for path, leaves in below.items()}
    try:
        module = fill_graph(graphdef, values)
    except ValueError as e:
        raise MismatchError(f"the structure does not fit its leaves: {e}") from e
    parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
    # Some flax releases do not treat a bare abstract array in a module as a leaf.
    for path, leaf in {**values, **graph_leaves(nnx.state(module))}.items():
        parts[part_of[path]][path] = leaf
    graphstate, graphother = (refine_graphs(parts[part]) for part in PARTS)
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=None
    )


def _filled(below: list[Below]) -> Any:
    """Returns the value at a path of a module: an array, or a Variable's nested
    value."""
    return nest((path[1:], kinds[1:], leaf) for path, kinds, leaf in below)


def stand_in(leaf: LeafInfo) -> Any:
    """Returns an abstract value that a restore replaces with the saved leaf."""
    if leaf.kind == "python_scalar":
        return {"bool": False, "int64": 0, "float64": 0.0}.get(leaf.dtype, 0j)
    if leaf.prng_impl is not None:
        key = jax.eval_shape(lambda: jax.random.key(0, impl=leaf.prng_impl))
        return jax.ShapeDtypeStruct(leaf.shape[:-1], key.dtype)
    dtype = DTYPES[leaf.dtype]
    if leaf.kind == "array":
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    zero = np.zeros((), dtype)
    if leaf.kind == "host_scalar":
        return zero[()]
    return np.broadcast_to(zero, leaf.shape)  # a view that takes no memory


def _maker(
    model: type, recipe: Recipe | None, mesh: Mesh | None, dtype: Any
) -> Callable[[], Any]:
    # Inspects __init__, because flax's metaclass shows only *args and **kwargs.
    accepted = inspect.signature(model.__init__).parameters  # type: ignore[misc]
    streams = ["default"] if recipe is None else recipe.rng_streams

    def rngs() -> dict[str, nnx.Rngs]:
        # The seeds do not matter: a restore replaces keys and counts.
        if "rngs" not in accepted:
            return {}
        return {"rngs": nnx.Rngs(dict.fromkeys(streams, 0))}

    if not takes_config(model, recipe):
        _reject_needed_arguments(model)
        return lambda: model(**rngs())
    config = built_config(model, recipe)
    if mesh is not None and hasattr(config, "set_model_mesh"):
        config.set_model_mesh(mesh)  # EasyDeL models compute on their config's mesh
    arguments = {} if recipe is None else recipe.decoded_arguments()
    if dtype is not None:
        arguments["param_dtype"] = DTYPES[str(checked_cast("cast=", dtype))]
    taken = {name: arguments[name] for name in arguments if name in accepted}
    return lambda: model(config=config, **taken, **rngs())


def _reject_needed_arguments(model: type) -> None:
    """Rejects a class that cannot be called with rngs alone."""
    needed = [name for name in needed_arguments(model) if name != "rngs"]
    if needed:
        raise InvalidRequestError(
            f"expected a class that needs no arguments but rngs, got {model.__name__}, "
            f"which needs {', '.join(needed)}; give a factory, "
            f"model={factory_of(model)}"
        )
