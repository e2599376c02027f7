"""NNX graphs in pieces: their leaves by path, merged by path.

``nnx.merge`` assigns leaves by sorted position and checks only their number, so a
renamed or re-keyed state would merge into the wrong layers without a word. Here the
path decides, ``layers[0]`` and ``layers["0"]`` are two paths, two leaves for one path
are refused, and no result shares a Variable with what it came from; arrays, which are
immutable, are shared.

>>> refine_graphs({"a": {0: 1}}, {("a", "0"): 2}).raw_mapping
{'a': {0: 1, '0': 2}}
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from flax import nnx

from storesvc_client._pytree.paths import (
    GraphPath,
    add_leaves,
    mapping_leaves,
    nest_leaves,
    path_text,
)
from storesvc_client._values.gc_pause import collector_paused

__all__ = [
    "GraphPath",
    "GraphState",
    "Identity",
    "fill_graph",
    "fresh_leaf",
    "graph_leaves",
    "graph_paths",
    "merge_by_path",
    "refine_graphs",
    "with_values",
]

GraphState: TypeAlias = nnx.State[Any, Any]
"""An NNX state: a mapping, nested, whose leaves are Variables."""

M = TypeVar("M", bound=nnx.Module)

SHOWN: Final = 20
"""Paths that one message lists."""


def graph_leaves(graph: Mapping[Any, Any]) -> dict[GraphPath, Any]:
    """Returns the leaves of a State or dict, nested or flat with tuple keys, by path.

    Raises:
        TypeError: ``graph`` is not a mapping.
        ValueError: Two leaves have one path, or one lies below another.
    """
    if not isinstance(graph, Mapping):
        raise TypeError(f"expected a dict or an nnx.State, got {type(graph).__name__}")
    # A State wraps each of its mappings anew whenever it is asked for one.
    raw = graph.raw_mapping if isinstance(graph, nnx.State) else graph
    leaves = mapping_leaves(raw)
    if () in leaves:
        raise ValueError("a leaf at the root: expected it below a key")
    return leaves


@collector_paused()
def refine_graphs(*graphs: Mapping[Any, Any]) -> GraphState:
    """Returns one State that holds the leaves of all graphs.

    Args:
        *graphs: States or dicts, nested, or flat with tuple keys.

    Raises:
        TypeError: There is no graph, or one is not a mapping.
        ValueError: Two graphs have a leaf at one path, or one has a leaf below
            another's.
    """
    if not graphs:
        raise TypeError("refine_graphs expected at least one graph, got none")
    leaves = _leaves_of_all(graphs)
    return nnx.State(nest_leaves({p: fresh_leaf(leaf) for p, leaf in leaves.items()}))


@collector_paused()
def merge_by_path(graphdef: "nnx.GraphDef[M]", *graphs: Mapping[Any, Any]) -> M:
    """Returns the module of a structure, with Variables of its own.

    Args:
        graphdef: The structure.
        *graphs: States or dicts, nested, or flat with tuple keys, that together hold
            each leaf once. Values may be arrays, tracers or abstract.

    Raises:
        TypeError: A graph is not a mapping.
        ValueError: The leaves are not at the paths of the structure, or two are at
            one.
    """
    leaves = _leaves_of_all(graphs)
    order, paths = _leaf_paths(Identity(graphdef))
    if leaves.keys() != paths:
        raise ValueError(_other_paths(paths, leaves.keys()))
    merged: M
    # A list goes in as it is; a State, nnx.merge would sort.
    merged = nnx.merge(graphdef, [fresh_leaf(leaves[path]) for path in order])
    return merged


@collector_paused()
def fill_graph(graphdef: "nnx.GraphDef[M]", values: Mapping[GraphPath, Any]) -> M:
    """Returns the module of a structure, each Variable as the structure says it is.

    Args:
        graphdef: The structure.
        values: What the Variable or the array at each path holds.

    Raises:
        ValueError: The values are not at the paths of the structure.
    """
    order, paths = _leaf_paths(Identity(graphdef))
    if values.keys() != paths:
        raise ValueError(_other_paths(paths, values.keys()))
    filled: M = nnx.merge(graphdef, [values[path] for path in order])
    return filled


def class_of(graphdef: "nnx.GraphDef[Any]") -> type[Any] | None:
    """Returns the class of a structure's module; None of a dict or a list, and of the
    modules of flax itself, which are made of arguments."""
    cls = getattr(graphdef.nodes[0], "type", None)
    is_module = isinstance(cls, type) and issubclass(cls, nnx.Pytree)
    return cls if is_module and not cls.__module__.startswith("flax.") else None


def graph_paths(graphdef: "nnx.GraphDef[M]") -> frozenset[GraphPath]:
    """Returns the paths at which a module of this structure has leaves."""
    return _leaf_paths(Identity(graphdef))[1]


def fresh_leaf(leaf: Any) -> Any:
    """Returns the leaf, and for a Variable another one of the same value."""
    return leaf.copy() if isinstance(leaf, nnx.Variable) else leaf


def with_values(graph: Mapping[Any, Any], values: Mapping[Any, Any]) -> GraphState:
    """Returns the Variables of a graph with the values of another of the same paths.

    Args:
        graph: A State or dict of Variables.
        values: One of Variables, or of bare arrays, which may have another dtype.

    Raises:
        ValueError: A Variable there is of another type or shape.
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
        raise ValueError("; ".join(problems[:SHOWN]))
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
    """A key that is equal only to one of the same object.

    GraphDefs compare, and hash, by all that is in them: far too slow to look one up,
    and impossible for some. Holding the object keeps its id from being given again.
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
    """The paths in the structure's own order of leaves, and as a set."""
    order = tuple(_told_paths(key.graphdef) or _found_paths(key.graphdef))
    return order, frozenset(order)


def _told_paths(graphdef: "nnx.GraphDef[Any]") -> list[GraphPath]:
    """The paths as the structure tells them; none if it is not of a known form.

    Its nodes and attributes are listed depth first, leaves among them. Their classes
    are flax's own business, hence the names, the count at the end, and the other way
    to find out, which takes ten times as long.
    """
    nodes, attributes = iter(graphdef.nodes), iter(graphdef.attributes)
    paths: list[GraphPath] = []

    def tell(path: GraphPath) -> bool:
        node: Any = next(nodes)
        match type(node).__name__:
            case "NodeDef":
                return all(tell_next(path) for _ in range(node.num_attributes))
            case "VariableDef" if node.array_refdef is None:
                paths.append(path)
                return True
            case known:
                return known == "NodeRef"

    def tell_next(path: GraphPath) -> bool:
        key, attribute = next(attributes)
        match type(attribute).__name__:
            case "NodeAttr":
                return tell((*path, key))
            case "ArrayAttr" | "LeafAttr":
                paths.append((*path, key))
                return True
            case known:
                return known in ("NodeRef", "Static")

    told = bool(graphdef.nodes) and tell(())
    return paths if told and len(paths) == graphdef.num_leaves else []


def _found_paths(graphdef: "nnx.GraphDef[Any]") -> list[GraphPath]:
    """The paths at which a module built of numbers has them.

    The numbers are in Variables, as flax takes a bare one for no leaf where the
    module holds an array.
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
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more) or "none"
