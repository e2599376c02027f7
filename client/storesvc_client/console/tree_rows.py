"""Rows of the tree of a checkpoint, level by level.

Consecutively numbered siblings with the same content share a row, as in ``storectl
tree``: ``{0..31}``; the rows below it show the first of them. ``apart`` gives each of
them a row. A level has at most `LEVEL` rows, so that a page stays small whatever a
checkpoint holds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from storesvc_client._values.texts import (
    Group,
    Node,
    count_text,
    dtype_text,
    groups,
    shape_text,
    size_text,
    spec_text,
)

LEVEL: Final = 200
"""Maximum rows of one level on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the tree: a leaf, a subtree, several alike, or a link to more rows."""

    prefix: str
    """Key of the leaf, or the common beginning of the keys below it."""
    parent: str
    """Prefix of the row above."""
    name: str
    depth: int
    leaf: bool
    content: str
    """Dtype of a leaf; "12 leaves"."""
    shape: str = ""
    size: str = ""
    chunks: str = ""
    sharding: str = ""
    alike: int = 1
    """Subtrees or leaves that share the row."""
    opened: bool = False
    """True if the rows below it follow."""
    more_from: int = 0
    """For the link to more rows: how many rows come before; else 0."""


def level(
    nodes: Sequence[Node],
    prefix: str,
    *,
    apart: bool = False,
    start: int = 0,
    depth: int | None = None,
) -> list[Row]:
    """Returns the rows directly below a prefix; none if there is no such subtree.

    Args:
        nodes: Top nodes of the tree.
        prefix: Beginning of keys, such as "params/layers"; "": the top.
        apart: Whether alike siblings have a row each.
        start: Rows to leave out.
        depth: Depth of the rows; None: as many as the prefix has nodes above.
    """
    below, above = _below(nodes, prefix)
    return _level(
        below,
        prefix,
        depth=above if depth is None else depth,
        apart=apart,
        start=start,
    )


def opened_rows(
    nodes: Sequence[Node], at: str, *, apart: bool = False, start: int = 0
) -> list[Row]:
    """Returns the rows from the top, with the subtrees on the way to `at` opened.

    It is what a browser without JavaScript shows.
    """
    return [*_opened(nodes, "", _parts(at), depth=0, apart=apart, start=start)]


def _opened(
    nodes: Sequence[Node],
    prefix: str,
    way: tuple[str, ...],
    *,
    depth: int,
    apart: bool,
    start: int,
) -> Iterator[Row]:
    step = next((node for node in nodes if way and _leads(node, way)), None)
    rest = way[len(step.parts) :] if step else ()
    is_last = step is None
    for row in _level(
        nodes,
        prefix,
        depth=depth,
        apart=(apart and is_last) or (step is not None and _is_hidden(nodes, step)),
        start=start if is_last else 0,
    ):
        if step is None or row.prefix != _joined(prefix, step):
            yield row
            continue
        yield replace(row, opened=True)
        yield from _opened(
            step.children, row.prefix, rest, depth=depth + 1, apart=apart, start=start
        )


def _level(
    nodes: Sequence[Node], prefix: str, *, depth: int, apart: bool, start: int
) -> list[Row]:
    found = groups(nodes)
    if apart:
        found = [Group(node=node, name=node.name, count=1) for node in nodes]
    rows = [_row(group, prefix, depth) for group in found[start : start + LEVEL]]
    left = len(found) - start - len(rows)
    if left > 0:
        more = Row(
            prefix=prefix,
            parent=prefix,
            name=f"{min(left, LEVEL):,} of {left:,} more",
            depth=depth,
            leaf=False,
            content="",
            more_from=start + len(rows),
        )
        rows.append(more)
    return rows


def _row(group: Group, parent: str, depth: int) -> Row:
    node, leaf = group.node, group.node.leaf
    times = f"{group.count:,} x " if group.count > 1 else ""
    return Row(
        prefix=_joined(parent, node),
        parent=parent,
        name=group.name,
        depth=depth,
        leaf=leaf is not None,
        content=times
        + (dtype_text(leaf) if leaf else count_text(node.leaf_count, "leaf")),
        shape=shape_text(leaf) if leaf else "",
        size=times + size_text(node.size_bytes),
        chunks=f"{leaf.chunk_count:,}" if leaf else "",
        sharding=spec_text(leaf.sharding) if leaf else "",
        alike=group.count,
    )


def _is_hidden(nodes: Sequence[Node], node: Node) -> bool:
    """Returns whether a row of several stands for the node and shows another one."""
    return not any(group.node is node for group in groups(nodes))


def _below(nodes: Sequence[Node], prefix: str) -> tuple[Sequence[Node], int]:
    """Returns the nodes below a prefix, and the number of nodes above them."""
    way, depth = _parts(prefix), 0
    while way:
        step = next((node for node in nodes if _leads(node, way)), None)
        if step is None:
            return (), depth
        nodes, way, depth = step.children, way[len(step.parts) :], depth + 1
    return nodes, depth


def _leads(node: Node, way: tuple[str, ...]) -> bool:
    return way[: len(node.parts)] == node.parts


def _joined(prefix: str, node: Node) -> str:
    name = "/".join(node.parts)
    return f"{prefix}/{name}" if prefix else name


def _parts(prefix: str) -> tuple[str, ...]:
    return tuple(prefix.split("/")) if prefix else ()
