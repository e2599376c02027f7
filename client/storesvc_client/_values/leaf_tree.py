"""Draws the leaves of a checkpoint as a tree.

Two rules keep the drawing short and complete: a node with one child shares a line with
it (``embed/embedding``), and consecutively numbered siblings with the same keys, dtypes
and shapes are drawn once, as ``{0..11}``, with their number before their content.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, TypeAlias

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


def draw(nodes: Sequence[Node], *, depth: int | None = None) -> Iterator[Line]:
    """Yields the drawing line by line, down to ``depth`` levels."""
    groups = list(_alike(nodes))
    for group in groups:
        last = group is groups[-1]
        name, content, size = _line(group)
        yield f"{'└── ' if last else '├── '}{name}", content, size
        if depth != 1:
            below = draw(group[0].children, depth=depth and depth - 1)
            for inner, what, amount in below:
                yield f"{'    ' if last else '│   '}{inner}", what, amount


def _line(group: Sequence[Node]) -> Line:
    first = group[0]
    size = size_text(first.size_bytes)
    if len(group) == 1:
        return first.name, first.content, size
    numbers = f"{{{first.parts[0]}..{group[-1].parts[0]}}}"
    name = "/".join((numbers, *first.parts[1:]))
    return name, f"{len(group)} x {first.content}", f"{len(group)} x {size}"


def _children(entries: Iterable[_Entry]) -> tuple[Node, ...]:
    ordered = sorted(entries, key=lambda entry: [*map(_order, entry[0])])
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


def _alike(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Yields groups of nodes; each group is drawn once."""
    group: list[Node] = []
    for node in nodes:
        if group and not _continues(group[-1], node):
            yield group
            group = []
        group.append(node)
    if group:
        yield group


def _continues(before: Node, node: Node) -> bool:
    number, after = before.parts[0], node.parts[0]
    return (
        _is_number(number)
        and _is_number(after)
        and int(after) == int(number) + 1
        and (before.parts[1:], before.likeness) == (node.parts[1:], node.likeness)
    )


def _order(part: str) -> tuple[bool, int, str]:
    """Returns a sort key: numbers by value, before texts."""
    number = _is_number(part)
    return not number, int(part) if number else 0, part


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and str(int(part)) == part
