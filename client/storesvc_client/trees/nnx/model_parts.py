"""Splits a model into its three parts, and reads its partition rules and mesh.

An EasyDeL model provides all of them, a plain module only its parts; each function
handles both. Nothing here imports EasyDeL.

>>> graphdef, graphstate, graphother = split_module(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
>>> sorted(graphstate)
['bias', 'kernel']
"""

import dataclasses
import inspect
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias, TypeGuard, runtime_checkable

import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from storesvc_client._pytree.partition_rules import Rules
from storesvc_client._pytree.paths import GraphPath, nest_leaves
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    Identity,
    graph_leaves,
    graph_paths,
)
from storesvc_client.trees.structure.contents import is_cached
from storesvc_client.trees.structure.skeleton import NODES, skeleton_of

__all__ = [
    "HasGraph",
    "Parts",
    "added_fields",
    "drop_caches",
    "has_setting",
    "is_module",
    "mesh_of",
    "partition_rules_of",
    "replace_fields",
    "setting_of",
    "split_module",
]


Parts: TypeAlias = tuple["nnx.GraphDef[Any]", GraphState, GraphState]
"""Structure of a module, its parameters, and its other Variables."""


@runtime_checkable
class HasGraph(Protocol):
    """A module or state in three parts that ``nnx.merge`` joins.

    The parts of a module share its Variables, so a change of one changes the other. A
    state is a value and has its own Variables.
    """

    @property
    def graphdef(self) -> "nnx.GraphDef[Any]":
        """Structure of the module, without values."""

    @property
    def graphstate(self) -> GraphState:
        """Parameters."""

    @property
    def graphother(self) -> GraphState:
        """All other Variables."""


def is_module(model: Any) -> bool:
    """Returns whether ``split_module`` accepts an object."""
    if isinstance(model, type):  # a class has all parts as properties
        return False
    return _is_graph(model) or _has_parts(model)


def split_module(
    model: "HasGraph | nnx.Pytree | dict[str, Any] | list[Any]",
) -> tuple["nnx.GraphDef[Any]", GraphState, GraphState]:
    """Returns a model's structure, its parameters, and its other Variables.

    An object that has these parts returns its own: an EasyDeL model, whose parameters
    are only the adapters if it has any, or an ``EasyDeLState``. Any other module is
    split by ``nnx.Param``. The parts share the module's Variables: a call that advances
    a count, or an update of a part, changes both. A module that defines its own parts
    must use ``nnx.split``; this function would call them recursively.

    Raises:
        TypeError: It is not a module and has no such parts.
    """
    parts: tuple[Any, Any, Any]
    if _has_parts(model):
        parts = model.graphdef, model.graphstate, model.graphother
    elif _is_graph(model):
        graphdef, *states = nnx.split(model, nnx.Param, ...)
        parts = graphdef, states[0], states[1]
    else:
        raise _no_module(model)
    return parts


def drop_caches(parts: Parts) -> Parts:
    """Returns the parts of a model without the caches that its classes compute again.

    A cache is an array or an ``nnx.Cache`` that a ``functools.cached_property`` set at
    its first use, such as the rotary table that an EasyDeL model keeps of a call
    outside of jit. A value that was assigned, a parameter, or a layer is none.
    """
    graphdef, graphstate, graphother = parts
    bare, caches = _without_caches(Identity(graphdef))
    others = graph_leaves(graphother) if caches else {}
    if not caches or not caches <= others.keys():  # or an optimizer updates it
        return parts
    kept = {path: leaf for path, leaf in others.items() if path not in caches}
    return bare, graphstate, nnx.State(nest_leaves(kept))


@lru_cache(maxsize=8)
def _without_caches(
    key: Identity,
) -> tuple["nnx.GraphDef[Any]", frozenset[GraphPath]]:
    """Returns a structure without its caches, and their paths."""
    graphdef = key.graphdef
    names = {name for name, _ in graphdef.attributes}
    classes = {getattr(node, "type", object) for node in graphdef.nodes}
    if all(names.isdisjoint(_cached_names(cls)) for cls in classes):
        return graphdef, frozenset()
    module, _ = skeleton_of(graphdef)
    nodes = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)]
    for node in nodes:
        own = vars(node)
        # flax lists an attribute that is assigned; a property sets its own past flax
        for name in _cached_names(type(node)) - own.get(NODES, {}).keys():
            if isinstance(own.get(name), nnx.Cache | np.ndarray):
                del own[name]
    bare = nnx.graphdef(module)
    return bare, graph_paths(graphdef) - graph_paths(bare)


def added_fields(state: Any, *, static: bool = False) -> list[str]:
    """Returns the names of the fields that the class of a state adds.

    Args:
        state: A state, or its class.
        static: Return the fields without leaves instead.
    """
    found = dataclasses.fields(state) if dataclasses.is_dataclass(state) else ()
    return [
        field.name
        for field in found
        if field.name not in _FIELDS
        if field.metadata.get("pytree_node", True) is not static
    ]


_FIELDS: Final = ("step", "graphdef", "graphstate", "graphother", "tx", "opt_state")


def replace_fields(state: Any, **fields: Any) -> Any:
    """Returns a copy of a state, of any class, with other values in some fields."""
    for name in ("replace", "_replace"):  # of flax and EasyDeL; of a NamedTuple
        if callable(change := getattr(state, name, None)):
            return change(**fields)
    return dataclasses.replace(state, **fields)


@lru_cache(maxsize=256)
def _cached_names(cls: type[Any]) -> frozenset[str]:
    """Returns the names of a class's cached properties."""
    names = {name for base in cls.__mro__ for name in vars(base)}
    return frozenset(name for name in names if is_cached(cls, name))


def _is_graph(model: Any) -> bool:
    """Returns whether it is a module, such as nnx.Optimizer, or a dict or list with
    some."""
    if isinstance(model, (dict, list, tuple)):
        items = model.values() if isinstance(model, dict) else model
        return any(isinstance(item, nnx.Variable) or _is_graph(item) for item in items)
    return isinstance(model, nnx.Pytree)


def _has_parts(model: Any) -> TypeGuard[HasGraph]:
    """Returns whether an object has the three parts.

    The GraphDef check excludes classes, which have them as properties, and
    ``nnx.Rngs``, which have a stream for every attribute name.
    """
    return isinstance(model, HasGraph) and isinstance(model.graphdef, nnx.GraphDef)


def partition_rules_of(model: Any) -> Rules | None:
    """Returns the partition rules that a model provides, or None.

    These are the rules by which EasyDeL would shard the model. Other models provide
    rules by a ``config.get_partition_rules()``.

    Raises:
        TypeError: The provided rules have a wrong type.
    """
    # The config's public method returns None for modules that provide their own specs,
    # and its patterns end before the "/value" of a Variable. This method is in
    # EasyDeL's protocol and has neither problem.
    method = _method_of(model, "_get_partition_rules")
    if method is not None:
        rules = method(None)
    else:
        method = _method_of(_config_of(model), "get_partition_rules")
        rules = None if method is None else method()
    if rules is None:
        return None
    return tuple(_checked(rule, model) for rule in rules)


def setting_of(model: Any, name: str) -> Any:
    """Returns an attribute of a model or of its class; None if neither has it.

    ``nnx.Rngs`` return a random stream for any other attribute access.
    """
    return getattr(model, name) if has_setting(model, name) else None


def has_setting(model: Any, name: str) -> bool:
    """Returns whether a model or its class has an attribute, even if it is None."""
    return inspect.getattr_static(model, name, _ABSENT) is not _ABSENT


_ABSENT: Final = object()


def _method_of(owner: Any, name: str) -> Any:
    """Returns a bound method defined by the class of an object, or None.

    An attribute of the object itself is never returned: its value may come from
    storage, and the method is called.
    """
    known = inspect.getattr_static(type(owner), name, None) is not None
    return (
        getattr(owner, name)
        if known and name not in getattr(owner, "__dict__", {})
        else None
    )


def _config_of(model: Any) -> Any:
    """Returns the config of a model, or None if it has none or raises."""
    try:
        return setting_of(model, "config")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def mesh_of(model: Any) -> Mesh | None:
    """Returns the mesh of a model, or None if it has none.

    EasyDeL creates it, from all devices, at the first access.
    """
    for owner in (_config_of(model), model):
        # The model's own property raises if its config has no mesh.
        mesh = getattr(owner, "mesh", None)
        if mesh is not None or hasattr(owner, "mesh"):
            return mesh if isinstance(mesh, Mesh) else None
    return None


def _checked(rule: Any, model: Any) -> tuple[str, PartitionSpec]:
    match rule:
        case (str() as pattern, PartitionSpec() as spec):
            return pattern, spec
        case _:
            raise TypeError(
                f"rules of {type(model).__name__}: expected pairs of a regular "
                f"expression and a PartitionSpec, got {rule!r}; pass rules= to the "
                "restore instead"
            )


def _no_module(model: Any) -> TypeError:
    got = model.__name__ if isinstance(model, type) else type(model).__name__
    prefix = "the class " if isinstance(model, type) else ""
    return TypeError(
        "expected an nnx.Module, or an object with graphdef, graphstate and "
        f"graphother, got {prefix}{got}; create a module first"
    )
