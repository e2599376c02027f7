"""Splits NNX models into their parts and leaves, and merges them by path.

``nnx.merge`` assigns leaves by sorted position and checks only their number, so a
renamed or re-keyed state would be merged into the wrong layers silently. Here leaves
are assigned by path: ``layers[0]`` and ``layers["0"]`` are different paths, two leaves
with one path are rejected, and no result shares a Variable with an input. Arrays, which
are immutable, are shared.

>>> refine_graphs({"a": {0: 1}}, {("a", "0"): 2}).raw_mapping
{'a': {0: 1, '0': 2}}

A model has three parts: its structure, its parameters, and its other Variables. An
EasyDeL model provides them with its partition rules and mesh; a plain module only its
parts, and each function handles both. Nothing here imports EasyDeL.

>>> graphdef, graphstate, graphother = split_module(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
>>> sorted(graphstate)
['bias', 'kernel']
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import (
    Any,
    Final,
    Protocol,
    TypeAlias,
    TypeGuard,
    TypeVar,
    runtime_checkable,
)

import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from storesvc_client._chunks.memory import collector_paused
from storesvc_client._pytree.leaves import (
    GraphPath,
    add_leaves,
    mapping_leaves,
    nest_leaves,
    path_text,
)
from storesvc_client._pytree.partition_rules import Rules
from storesvc_client.trees.structure.descriptions import is_cached
from storesvc_client.trees.structure.encoder import NODES, make_skeleton

GraphState: TypeAlias = nnx.State[Any, Any]
"""An NNX state: a nested mapping whose leaves are Variables."""

M = TypeVar("M", bound=nnx.Module)

MAX_LISTED: Final = 20
"""Maximum paths that one message lists."""


def graph_leaves(graph: Mapping[Any, Any]) -> dict[GraphPath, Any]:
    """Returns the leaves of a State or dict, nested or flat with tuple keys, by path.

    Raises:
        TypeError: ``graph`` is not a mapping.
        ValueError: Two leaves have one path, or one is below another.
    """
    if not isinstance(graph, Mapping):
        raise TypeError(f"expected a dict or an nnx.State, got {type(graph).__name__}")
    # A State creates a new wrapper at each access of a nested mapping.
    raw = graph.raw_mapping if isinstance(graph, nnx.State) else graph
    leaves = mapping_leaves(raw)
    if () in leaves:
        raise ValueError("expected every leaf below a key, got a leaf at the root")
    return leaves


@collector_paused()
def refine_graphs(*graphs: Mapping[Any, Any]) -> GraphState:
    """Returns one State with the leaves of all graphs.

    Args:
        *graphs: States or dicts, nested, or flat with tuple keys.

    Raises:
        TypeError: There is no graph, or one is not a mapping.
        ValueError: Two graphs have a leaf with one path, or a leaf of one is below a
            leaf of another.
    """
    if not graphs:
        raise TypeError("refine_graphs expected at least one graph, got none")
    leaves = _all_leaves(graphs)
    return nnx.State(nest_leaves({p: fresh_leaf(leaf) for p, leaf in leaves.items()}))


@collector_paused()
def merge_by_path(graphdef: "nnx.GraphDef[M]", *graphs: Mapping[Any, Any]) -> M:
    """Returns the module of a structure, with new Variables.

    Args:
        graphdef: The structure.
        *graphs: States or dicts, nested, or flat with tuple keys, that together hold
            each leaf once. Values may be arrays, tracers or abstract.

    Raises:
        TypeError: A graph is not a mapping.
        ValueError: The leaves do not have the paths of the structure, or two have one
            path.
    """
    leaves = _all_leaves(graphs)
    return fill_graph(graphdef, {p: fresh_leaf(leaf) for p, leaf in leaves.items()})


@collector_paused()
def fill_graph(graphdef: "nnx.GraphDef[M]", values: Mapping[GraphPath, Any]) -> M:
    """Returns the module of a structure; its Variables are as that describes them."""
    order, paths = _leaf_paths(Identity(graphdef))
    if values.keys() != paths:
        got = frozenset(values)
        raise ValueError(
            f"expected the {len(paths)} leaves of the module, got {len(got)}: missing "
            f"{_join_paths(paths - got)}, unexpected {_join_paths(got - paths)}"
        )
    filled: M
    # A list is used unchanged; nnx.merge would sort a State.
    filled = nnx.merge(graphdef, [values[path] for path in order])
    return filled


def module_class(graphdef: "nnx.GraphDef[Any]") -> type[Any] | None:
    """Returns the class of a structure's module, or None.

    None for a dict or list, and for flax's own modules, which cannot be rebuilt by
    their class without arguments.
    """
    cls = getattr(graphdef.nodes[0], "type", None)
    is_module = isinstance(cls, type) and issubclass(cls, nnx.Pytree)
    return cls if is_module and not cls.__module__.startswith("flax.") else None


def graph_paths(graphdef: "nnx.GraphDef[M]") -> frozenset[GraphPath]:
    """Returns the paths at which a module of this structure has leaves."""
    return _leaf_paths(Identity(graphdef))[1]


def fresh_leaf(leaf: Any) -> Any:
    """Returns the leaf; a Variable is copied, with the same value."""
    return leaf.copy() if isinstance(leaf, nnx.Variable) else leaf


def with_values(graph: Mapping[Any, Any], values: Mapping[Any, Any]) -> GraphState:
    """Returns the Variables of a graph with the values of another graph.

    Args:
        graph: A State or dict of Variables.
        values: A State or dict of Variables or arrays with the same paths; dtypes may
            differ.
    """
    own, given = graph_leaves(graph), graph_leaves(values)
    problems, alike = [], {}
    for path, variable in own.items():
        value = given[path]
        bare = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        is_other = isinstance(value, nnx.Variable) and type(value) is not type(variable)
        if is_other or np.shape(bare) != np.shape(variable.get_raw_value()):
            expected, got = _kind(variable), _kind(value)
            problems.append(f"leaf {path_text(path)}: expected {expected}, got {got}")
        alike[path] = variable.replace(bare)
    if problems:
        raise ValueError("; ".join(problems[:MAX_LISTED]))
    return refine_graphs(alike)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, nnx.Variable):
        return f"{type(leaf).__name__} {np.shape(leaf.get_raw_value())}"
    return f"an array {np.shape(leaf)}"


def _all_leaves(graphs: Iterable[Mapping[Any, Any]]) -> dict[GraphPath, Any]:
    leaves: dict[GraphPath, Any] = {}
    for graph in graphs:
        add_leaves(leaves, graph_leaves(graph).items())
    return leaves


class Identity:
    """Hashable key that compares a GraphDef by identity.

    GraphDefs compare and hash by their full content, which is slow, and impossible for
    some. The key keeps the object alive, so its id stays unique.
    """

    __slots__ = ("graphdef",)

    def __init__(self, graphdef: "nnx.GraphDef[Any]") -> None:
        self.graphdef = graphdef

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.graphdef is other.graphdef

    def __hash__(self) -> int:
        return id(self.graphdef)


@lru_cache(maxsize=8)
def _leaf_paths(key: Identity) -> tuple[tuple[GraphPath, ...], frozenset[GraphPath]]:
    """Returns the leaf paths in the structure's order, and as a set."""
    order = tuple(list_paths(key.graphdef) or find_paths(key.graphdef))
    return order, frozenset(order)


def list_paths(graphdef: "nnx.GraphDef[Any]") -> list[GraphPath]:
    """Returns the paths read from the structure's lists; empty if their form is
    unknown.

    Nodes and attributes are listed depth first, including leaves. The list's classes
    are private to flax; therefore they are matched by name, the count is checked at the
    end, and ``find_paths`` is the fallback, which takes ten times as long.
    """
    nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)
    paths: list[GraphPath] = []

    def read_node(path: GraphPath) -> bool:
        node: Any = next(nodes)
        match type(node).__name__:
            case "NodeDef":
                return all(read_attribute(path) for _ in range(node.num_attributes))
            case "VariableDef" if node.array_refdef is None:
                paths.append(path)
                return True
            case known:
                return known == "NodeRef"

    def read_attribute(path: GraphPath) -> bool:
        key, attribute = next(attributes)
        match type(attribute).__name__:
            case "NodeAttr":
                return read_node((*path, key))
            case "ArrayAttr" | "LeafAttr":
                paths.append((*path, key))
                return True
            case known:
                return known in ("NodeRef", "Static")

    complete = bool(graphdef.nodes) and read_node(())
    return paths if complete and len(paths) == graphdef.num_leaves else []


def find_paths(graphdef: "nnx.GraphDef[Any]") -> list[GraphPath]:
    """Returns the paths of a module that is built with numbers as leaves.

    The numbers are in Variables, because flax does not treat a bare number as a leaf.
    """
    numbers = [nnx.Variable(number) for number in range(graphdef.num_leaves)]
    leaves = graph_leaves(nnx.state(nnx.merge(graphdef, numbers)))
    return sorted(leaves, key=lambda path: leaves[path].get_value())


def _join_paths(paths: frozenset[GraphPath]) -> str:
    texts = sorted(map(path_text, paths))
    more = [f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return ", ".join(texts[:MAX_LISTED] + more) or "none"


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


def split_module(model: "HasGraph | nnx.Pytree | dict[str, Any] | list[Any]") -> Parts:
    """Returns a model's structure, its parameters, and its other Variables.

    An object that has these parts returns its own: an EasyDeL model, whose parameters
    are only the adapters if it has any, or an ``EasyDeLState``. Any other module is
    split by ``nnx.Param``. The parts share the module's Variables: a call that advances
    a count, or an update of a part, changes both. A module that defines its own parts
    must use ``nnx.split``; this function would call them recursively.
    """
    if _has_parts(model):
        return model.graphdef, model.graphstate, model.graphother
    if _is_graph(model):
        graphdef, *states = nnx.split(model, nnx.Param, ...)
        return graphdef, states[0], states[1]
    of_class = f"the class {model.__name__}" if isinstance(model, type) else None
    got = of_class or type(model).__name__
    raise TypeError(
        "expected an nnx.Module, or an object with graphdef, graphstate and "
        f"graphother, got {got}; create a module first"
    )


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
def _without_caches(key: Identity) -> tuple["nnx.GraphDef[Any]", frozenset[GraphPath]]:
    """Returns a structure without its caches, and their paths."""
    graphdef = key.graphdef
    names = {name for name, _ in graphdef.attributes}
    classes = {getattr(node, "type", object) for node in graphdef.nodes}
    if all(names.isdisjoint(_cached_names(cls)) for cls in classes):
        return graphdef, frozenset()
    module, _ = make_skeleton(graphdef)
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
    """Returns the names of the fields that the class of a state adds."""
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
    """Returns whether it is a module, or a dict or list with some."""
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
    """
    # The config's public method returns None for modules that provide their own specs,
    # and its patterns end before the "/value" of a Variable. This method is in
    # EasyDeL's protocol and has neither problem.
    method = _bound_method(model, "_get_partition_rules")
    if method is not None:
        rules = method(None)
    else:
        method = _bound_method(_model_config(model), "get_partition_rules")
        rules = None if method is None else method()
    if rules is None:
        return None
    pairs: list[tuple[str, PartitionSpec]] = []
    for rule in rules:
        match rule:
            case (str() as pattern, PartitionSpec() as spec):
                pairs.append((pattern, spec))
            case _:
                raise TypeError(
                    f"rules of {type(model).__name__}: expected pairs of a regular "
                    f"expression and a PartitionSpec, got {rule!r}; pass rules= to the "
                    "restore instead"
                )
    return tuple(pairs)


def read_setting(model: Any, name: str) -> Any:
    """Returns an attribute of a model or of its class; None if neither has it.

    ``nnx.Rngs`` return a random stream for any other attribute access.
    """
    return getattr(model, name) if has_setting(model, name) else None


def has_setting(model: Any, name: str) -> bool:
    """Returns whether a model or its class has an attribute, even if it is None."""
    return inspect.getattr_static(model, name, _ABSENT) is not _ABSENT


_ABSENT: Final = object()


def _bound_method(owner: Any, name: str) -> Any:
    """Returns a bound method defined by the class of an object, or None.

    An attribute of the object itself is never returned: its value may come from
    storage, and the method is called.
    """
    known = inspect.getattr_static(type(owner), name, None) is not None
    is_own = name in getattr(owner, "__dict__", {})
    return getattr(owner, name) if known and not is_own else None


def _model_config(model: Any) -> Any:
    """Returns the config of a model, or None if it has none or raises."""
    try:
        return read_setting(model, "config")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def mesh_of(model: Any) -> Mesh | None:
    """Returns the mesh of a model, or None if it has none.

    EasyDeL creates it, from all devices, at the first access.
    """
    for owner in (_model_config(model), model):
        # The model's own property raises if its config has no mesh.
        mesh = getattr(owner, "mesh", None)
        if mesh is not None or hasattr(owner, "mesh"):
            return mesh if isinstance(mesh, Mesh) else None
    return None
