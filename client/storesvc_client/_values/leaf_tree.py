"""Draws the leaves of a checkpoint as a tree.

Two rules keep the drawing short and complete: a node with one child shares a line with
it (``embed/embedding``), and numbered siblings with the same keys, dtypes and shapes
are drawn once, as ``layer_{0..11}``, with their number before their content.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, TypeAlias

from storesvc_client._values.natural_order import natural_key
from storesvc_client._values.numbered_names import numbered_series
from storesvc_client._values.texts import count_text, dtype_text, shape_text, size_text

if TYPE_CHECKING:
    from storesvc_client._values.values import LeafInfo

Line: TypeAlias = tuple[str, str, str]
"""The drawn name of a node, its content, and its size."""

_Entry: TypeAlias = "tuple[tuple[str, ...], LeafInfo]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A subtree, or a leaf."""

    parts: tuple[str, ...]
    """Path from the parent; several parts where nodes between have no sibling."""
    leaf: "LeafInfo | None"
    children: "tuple[Node, ...]"
    size_bytes: int
    leaf_count: int
    likeness: tuple[object, ...]
    """Value that is equal for subtrees with the same keys, dtypes and shapes."""

    @property
    def name(self) -> str:
        """Path from the parent, as in a key."""
        return "/".join(self.parts) or "''"

    @property
    def content(self) -> str:
        """Content as text, such as "float32[2,3]" or "12 leaves"."""
        if self.leaf is None:
            return count_text(self.leaf_count, "leaf")
        return dtype_text(self.leaf) + shape_text(self.leaf)


def grow(leaves: "Iterable[LeafInfo]") -> tuple[Node, ...]:
    """Returns the top nodes of the tree of these leaves."""
    return _children([(tuple(leaf.key.split("/")), leaf) for leaf in leaves])


def draw(
    nodes: Sequence[Node], *, depth: int | None = None, expand: bool = False
) -> Iterator[Line]:
    """Yields the drawing line by line.

    Args:
        nodes: Siblings.
        depth: Maximum number of levels; None: all.
        expand: Whether to draw each of numbered siblings.
    """
    rows = [_Row(node, node.parts[0], 1) for node in nodes] if expand else _rows(nodes)
    for row in rows:
        last = row is rows[-1]
        yield f"{'└── ' if last else '├── '}{row.name}", row.content, row.size
        if depth != 1:
            below = depth and depth - 1
            inner = draw(row.node.children, depth=below, expand=expand)
            for name, content, size in inner:
                yield f"{'    ' if last else '│   '}{name}", content, size


@dataclass(frozen=True, slots=True)
class _Row:
    """One node, for all that are like it."""

    node: Node
    first_part: str
    count: int

    @property
    def name(self) -> str:
        return "/".join((self.first_part, *self.node.parts[1:])) or "''"

    @property
    def content(self) -> str:
        return f"{self._times}{self.node.content}"

    @property
    def size(self) -> str:
        return f"{self._times}{size_text(self.node.size_bytes)}"

    @property
    def _times(self) -> str:
        return "" if self.count == 1 else f"{self.count:,} x "


def _children(entries: Iterable[_Entry]) -> tuple[Node, ...]:
    ordered = sorted(entries, key=lambda entry: [*map(natural_key, entry[0])])
    siblings = groupby(ordered, key=lambda entry: entry[0][0])
    return tuple(_node(list(below)) for _, below in siblings)


def _node(entries: list[_Entry]) -> Node:
    paths = [path for path, _ in entries]
    ends = zip(min(paths), max(paths), strict=False)
    shared = takewhile(lambda pair: pair[0] == pair[1], ends)
    parts = tuple(part for part, _ in shared)
    leaf = entries[0][1] if len(entries) == 1 else None
    children = (
        () if leaf else _children((path[len(parts) :], leaf) for path, leaf in entries)
    )
    below = [(child.parts, child.likeness) for child in children]
    return Node(
        parts=parts,
        leaf=leaf,
        children=children,
        size_bytes=sum(leaf.size_bytes for _, leaf in entries),
        leaf_count=len(entries),
        likeness=(dtype_text(leaf), leaf.shape) if leaf else tuple(below),
    )


def _rows(nodes: Sequence[Node]) -> list[_Row]:
    """Returns the rows of siblings, in the order of the first node of each."""
    alike: dict[object, list[Node]] = {}
    for node in nodes:
        alike.setdefault((node.parts[1:], node.likeness), []).append(node)
    first_at = {id(node): at for at, node in enumerate(nodes)}
    rows = [
        _Row(those[series.indices[0]], series.text, len(series.indices))
        for those in alike.values()
        for series in numbered_series([node.parts[0] for node in those])
    ]
    return sorted(rows, key=lambda row: first_at[id(row.node)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Alike siblings that are drawn once."""

    node: Node
    """The first of them."""
    name: str
    """Name of the row, such as "layer_{0..11}/kernel"."""
    count: int


def groups(nodes: Sequence[Node]) -> list[Group]:
    """Returns siblings in groups, each of which is drawn once."""
    return [
        Group(node=row.node, name=row.name, count=row.count) for row in _rows(nodes)
    ]
