"""Blueprints: the model that a restore builds, before any of its arrays exists.

A blueprint is made by the caller's code, which runs under ``nnx.eval_shape``: a
factory, a class, or a module or state that is already there.
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
from storesvc_client._pytree.matching import cast_name
from storesvc_client._pytree.nested_containers import nest
from storesvc_client._pytree.partition_rules import Rules
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
    GraphPath,
    GraphState,
    fill_graph,
    graph_leaves,
    graph_paths,
    merge_by_path,
    refine_graphs,
)
from storesvc_client.trees.nnx.lazy_init import nnx_init
from storesvc_client.trees.nnx.model_parts import (
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

    def own_placement(self) -> tuple[Mesh | None, Rules | None]:
        """Returns the mesh and the partition rules that the model knows itself.

        Only for a caller's own model: it is asked by calling it.
        """
        module = merge_by_path(self.graphdef, self.graphstate, self.graphother)
        return mesh_of(module), partition_rules_of(module)

    def recipe(self, opt_state: Any) -> Recipe:
        """Returns what a checkpoint of it, with an optimizer's state, would tell."""
        return Recipe.of(self.graphdef, self.graphstate, self.graphother, opt_state)

    def cast(self, dtype: Any) -> "Blueprint":
        """Returns it with its floating-point parameters in a dtype."""
        return replace(self, graphstate=cast_floating(self.graphstate, dtype))


def draw_blueprint(
    model: ModelLike, recipe: Recipe | None, mesh: Mesh | None, dtype: Any = None
) -> Blueprint:
    """Returns the blueprint of a model.

    Args:
        model: The caller's; see ``ModelLike``. A class that has a ``config_class``
            gets the config and the dtypes of the recipe; another class is called
            with ``rngs`` if it takes that, and nothing else.
        recipe: Of the checkpoint, if it has one.
        mesh: What the config of such a class is given, if it asks for a mesh.
        dtype: The ``param_dtype`` of such a class; None: as it was saved.

    Raises:
        InvalidRequestError: ``model`` is none of these, a class that needs a config
            where the recipe has none, or a factory that needs values.
        MismatchError: A class refuses the config that was saved.
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
    """Has what a class or a factory raises say what it is about."""
    name = getattr(model, "__name__", type(model).__name__)
    try:
        yield
    except StoreError:
        raise
    except TraceContextError as e:
        raise InvalidRequestError(
            f"model={name}: expected a factory that makes all that it changes, got one "
            f"that changes what was made outside of it ({_first_line(e)}); make the "
            "rngs and the layers within it"
        ) from e
    except _NEEDS_VALUES as e:
        raise InvalidRequestError(
            f"model={name}: expected code that runs abstractly, under nnx.eval_shape, "
            f"got code that needs values ({_first_line(e)}); compute them, such as "
            "those of a config, before the restore, or give a module that is made"
        ) from e
    except Exception as e:
        if not isinstance(model, type):
            raise  # the caller's own
        raise MismatchError(
            f"model={name}: expected a class that takes the config and dtypes that "
            f"were saved, got {type(e).__name__}: {_first_line(e)}; give a factory, "
            f"model={factory_of(model)}"
        ) from e


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _parts(module: Any) -> Parts:
    try:
        return split_module(module)
    except TypeError as e:
        raise InvalidRequestError(
            f"expected model= a module class, a factory, a module or a state: {e}"
        ) from e


def _abstract_parts(make: Callable[[], Any], mesh: Mesh | None) -> Parts:
    """The parts of what a factory makes, computing none of their arrays.

    ``nnx.eval_shape`` would return a module, whose bare arrays, abstract then, some
    releases of flax no longer take for leaves.
    """
    graphdefs = []

    def states() -> tuple[GraphState, GraphState]:
        module = make()
        _mark_arrays(module)
        graphdef, *states = _parts(module)
        graphdefs.append(graphdef)
        return states[0], states[1]

    # Variables that name axes of a mesh want one to be set when they are made.
    with jax.set_mesh(mesh) if mesh is not None else nullcontext():
        graphstate, graphother = jax.eval_shape(states)
    return graphdefs[0], graphstate, graphother


def _mark_arrays(module: Any) -> None:
    """Marks bare arrays as data: flax does so for arrays, and not for the tracers that
    stand for them here."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Pytree):
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.core.Tracer):
                    setattr(node, name, nnx.data(value))


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
        below[path[:end]].append((path[end:], kinds, stand_in(leaf)))
    values = {path: _filled(leaves) for path, leaves in below.items()}
    try:
        module = fill_graph(graphdef, values)
    except ValueError as e:
        raise MismatchError(f"the structure does not fit its leaves: {e}") from e
    parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
    # some releases of flax take an abstract array, bare in a module, for no leaf
    for path, leaf in {**values, **graph_leaves(nnx.state(module))}.items():
        parts[part_of[path]][path] = leaf
    graphstate, graphother = (refine_graphs(parts[part]) for part in PARTS)
    return Blueprint(
        graphdef=graphdef, graphstate=graphstate, graphother=graphother, make=None
    )


def _filled(below: list[Below]) -> Any:
    """What stands at a path of a module: an array, or what the leaves below the
    "value" of a Variable make up."""
    return nest((path[1:], kinds[1:], leaf) for path, kinds, leaf in below)


def stand_in(leaf: LeafInfo) -> Any:
    """Returns an abstract value that a saved leaf can take the place of."""
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
    return np.broadcast_to(zero, leaf.shape)  # of no size in memory


def _maker(
    model: type, recipe: Recipe | None, mesh: Mesh | None, dtype: Any
) -> Callable[[], Any]:
    # of its class, flax's metaclass shows only *args and **kwargs
    accepted = inspect.signature(model.__init__).parameters  # type: ignore[misc]
    if not takes_config(model, recipe):
        _refuse_needs(model)
        takes_rngs = "rngs" in accepted
        return lambda: nnx_init(model, _add_rngs=takes_rngs, _lazy=False)
    config = built_config(model, recipe)
    if mesh is not None and hasattr(config, "set_model_mesh"):
        config.set_model_mesh(mesh)  # EasyDeL's models compute on that of their config
    arguments = {} if recipe is None else recipe.decoded_arguments()
    if dtype is not None:
        arguments["param_dtype"] = DTYPES[str(cast_name(dtype))]
    taken = {name: arguments[name] for name in arguments if name in accepted}
    if "rngs" not in accepted:
        return lambda: model(config=config, **taken)
    return lambda: model(config=config, **taken, rngs=nnx.Rngs(0))


def _refuse_needs(model: type) -> None:
    """Refuses a class that cannot be called with rngs alone."""
    needed = [name for name in needed_arguments(model) if name != "rngs"]
    if needed:
        raise InvalidRequestError(
            f"expected a class that needs no arguments but rngs, got {model.__name__}, "
            f"which needs {', '.join(needed)}; give a factory, "
            f"model={factory_of(model)}"
        )
