"""Splits NNX graphs into leaves by path, and merges them by path.

``nnx.merge`` assigns leaves by sorted position and checks only their number, so a
renamed or re-keyed state would be merged into the wrong layers silently. Here leaves
are assigned by path: ``layers[0]`` and ``layers["0"]`` are different paths, two leaves
with one path are rejected, and no result shares a Variable with an input. Arrays, which
are immutable, are shared.

>>> refine_graphs({"a": {0: 1}}, {("a", "0"): 2}).raw_mapping
{'a': {0: 1, '0': 2}}
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from flax import nnx

from storesvc_client._chunks.host_memory import collector_paused
from storesvc_client._pytree.paths import (
    GraphPath,
    add_leaves,
    mapping_leaves,
    nest_leaves,
    path_text,
)

__all__ = [
    "GraphState",
    "Identity",
    "class_of",
    "fill_graph",
    "fresh_leaf",
    "graph_leaves",
    "graph_paths",
    "merge_by_path",
    "refine_graphs",
    "with_values",
]

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
    leaves = _leaves_of_all(graphs)
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
    leaves = _leaves_of_all(graphs)
    return fill_graph(graphdef, {p: fresh_leaf(leaf) for p, leaf in leaves.items()})


@collector_paused()
def fill_graph(graphdef: "nnx.GraphDef[M]", values: Mapping[GraphPath, Any]) -> M:
    """Returns the module of a structure with Variables as the structure describes them.

    Args:
        graphdef: The structure.
        values: Value of the Variable or array at each path.

    Raises:
        ValueError: The values do not have the paths of the structure.
    """
    order, paths = _leaf_paths(Identity(graphdef))
    if values.keys() != paths:
        raise ValueError(_other_paths(paths, values.keys()))
    filled: M
    # A list is used unchanged; nnx.merge would sort a State.
    filled = nnx.merge(graphdef, [values[path] for path in order])
    return filled


def class_of(graphdef: "nnx.GraphDef[Any]") -> type[Any] | None:
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

    Raises:
        ValueError: A Variable has another type or shape.
    """
    own, given = graph_leaves(graph), graph_leaves(values)
    problems, alike = [], {}
    for path, variable in own.items():
        value = given[path]
        bare = value.get_raw_value() if isinstance(value, nnx.Variable) else value
        expected, got = _kind(variable), _kind(value)
        other_type = isinstance(value, nnx.Variable) and type(value) is not type(
            variable
        )
        if other_type or np.shape(bare) != np.shape(variable.get_raw_value()):
            problems.append(f"leaf {path_text(path)}: expected {expected}, got {got}")
        alike[path] = variable.replace(bare)
    if problems:
        raise ValueError("; ".join(problems[:MAX_LISTED]))
    return refine_graphs(alike)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, nnx.Variable):
        return f"{type(leaf).__name__} {np.shape(leaf.get_raw_value())}"
    return f"an array {np.shape(leaf)}"


def _leaves_of_all(graphs: Iterable[Mapping[Any, Any]]) -> dict[GraphPath, Any]:
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
def _leaf_paths(
    key: Identity,
) -> tuple[tuple[GraphPath, ...], frozenset[GraphPath]]:
    """Returns the leaf paths in the structure's order, and as a set."""
    order = tuple(_listed_paths(key.graphdef) or _found_paths(key.graphdef))
    return order, frozenset(order)


def _listed_paths(graphdef: "nnx.GraphDef[Any]") -> list[GraphPath]:
    """Returns the paths read from the structure's lists; empty if their form is
    unknown.

    Nodes and attributes are listed depth first, including leaves. The list's classes
    are private to flax; therefore they are matched by name, the count is checked at the
    end, and ``_found_paths`` is the fallback, which takes ten times as long.
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


def _found_paths(graphdef: "nnx.GraphDef[Any]") -> list[GraphPath]:
    """Returns the paths of a module that is built with numbers as leaves.

    The numbers are in Variables, because flax does not treat a bare number as a leaf.
    """
    numbers = [nnx.Variable(number) for number in range(graphdef.num_leaves)]
    leaves = graph_leaves(nnx.state(nnx.merge(graphdef, numbers)))
    return sorted(leaves, key=lambda path: leaves[path].get_value())


def _other_paths(expected: frozenset[GraphPath], got: Iterable[GraphPath]) -> str:
    found = frozenset(got)
    return (
        f"expected the {len(expected)} leaves of the module, got {len(found)}: "
        f"missing {_listed(expected - found)}, unexpected {_listed(found - expected)}"
    )


def _listed(paths: frozenset[GraphPath]) -> str:
    texts = sorted(map(path_text, paths))
    more = [f"and {len(texts) - MAX_LISTED} more"] if len(texts) > MAX_LISTED else []
    return ", ".join(texts[:MAX_LISTED] + more) or "none"
