"""``/r/NAMESPACE/RUN@STEP``: a checkpoint, its tree, and where its bytes are.

The tree has rows, level by level. Consecutively numbered siblings with the same content
share a row, as in ``storectl tree``: ``{0..31}``; the rows below it show the first of
them. ``apart`` gives each of them a row. A level has at most `LEVEL` rows, so that a
page stays small whatever a checkpoint holds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

from storesvc_client import (
    DataLossError,
    Diff,
    InvalidRequestError,
    LeafInfo,
    Run,
)
from storesvc_client._documents.checkpoints import checkpoint_document, find_base_step
from storesvc_client._values.key_patterns import matching_keys
from storesvc_client._views.texts import (
    Group,
    Node,
    count_text,
    dtype_text,
    groups,
    shape_text,
    size_text,
    spec_text,
)
from storesvc_client.console.pages.runs import main_metric
from storesvc_client.console.rendering import (
    Page,
    checkpoint_url,
    command,
    crumbs_to_run,
    treemap,
    with_values,
)
from storesvc_client.console.visit import Content, Found, Visit

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
    return [*_open_rows(nodes, "", _parts(at), depth=0, apart=apart, start=start)]


def _open_rows(
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
        if step is None or row.prefix != _join_key(prefix, step):
            yield row
            continue
        yield replace(row, opened=True)
        yield from _open_rows(
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
        prefix=_join_key(parent, node),
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


def _join_key(prefix: str, node: Node) -> str:
    name = "/".join(node.parts)
    return f"{prefix}/{name}" if prefix else name


def _parts(prefix: str) -> tuple[str, ...]:
    return tuple(prefix.split("/")) if prefix else ()


LARGE: Final = 20_000
"""Leaves above which the tree comes after the rest of the page."""

_PARTS: Final = frozenset({"at", "apart", "from", "match"})
"""Values of the query that ask for a part of the tree."""

_CHANGES: Final = frozenset(
    {
        *("tags.set", "tags.delete", "holds.create", "checkpoints.update"),
        *("checkpoints.pin", "checkpoints.delete"),
    }
)
"""Permissions of the changes of a checkpoint that its page offers."""

_NEAR: Final = 1_000
"""Newest checkpoints among which the neighbours of one are looked for."""


def page(visit: Visit) -> Page:
    """Returns the page of a checkpoint, deleted or not.

    The tree of a large one is left out, unless the address asks for a part of it or for
    the whole.
    """
    run = visit.run
    is_asked = visit.wants_whole or not _PARTS.isdisjoint(visit.query)
    found = visit.opened.find(run, visit.which, most=None if is_asked else LARGE)
    checkpoint = found.checkpoint
    path = f"{run.name}@{checkpoint.step}"
    may = visit.permissions()
    damaged: list[DataLossError] = []
    tags = [
        t for t in run.tags.list(on_damage=damaged.append) if t.uid == checkpoint.uid
    ]
    holds = [
        h for h in run.holds.list(on_damage=damaged.append) if h.uid == checkpoint.uid
    ]
    opened = found.content.opened if found.content else None
    document = checkpoint_document(
        checkpoint, opened, tags=tags, base_step=find_base_step(run, checkpoint)
    )
    return Page(
        template="checkpoint.html",
        title=path,
        document=document,
        command=command("stat", f"{run.name}@{visit.which}"),
        crumbs=crumbs_to_run(run.name),
        values={
            "checkpoint": checkpoint,
            "may": may,
            "may_change": not _CHANGES.isdisjoint(may),
            "metric": main_metric([checkpoint]),
            "contents": document if opened else None,
            "tags": tags,
            "holds": holds,
            "base_step": document["base_step"],
            "shared_bytes": document["shared_bytes"],
            "damaged": damaged,
            "is_deferred": found.is_deferred,
            "whole_url": with_values(
                checkpoint_url(found.checkpoint.run, found.checkpoint.step),
                {**visit.query, "whole": 1},
            ),
            "treemap": treemap(opened, _difference(visit, run, checkpoint.step))
            if opened
            else None,
            "is_by_change": "changed" in visit.query,
            "tree_command": command("tree", path),
            "undelete_command": command("undelete", path),
            **_tree(visit, run, found),
            **_neighbours(run, checkpoint.step),
        },
    )


def tree_rows(visit: Visit) -> Page:
    """Returns rows of the tree, which htmx puts into the page."""
    run = visit.run
    found = visit.opened.find(run, visit.which)
    at = visit.query.get("at", "")
    rows = []
    if found.content:
        rows = level(
            found.content.nodes,
            at,
            apart="apart" in visit.query,
            start=visit.number("from"),
        )
    return Page(
        template="tree_rows.html",
        title=f"{run.name}@{found.checkpoint.step}",
        document=rows,
        values={
            "rows": rows,
            "run": run.name,
            "step": found.checkpoint.step,
            "apart": "apart" in visit.query,
        },
    )


def _tree(visit: Visit, run: Run, found: Found) -> Mapping[str, Any]:
    """Returns the values of the tree: a level, or the leaves that match a pattern."""
    words = visit.query.get("match", "").strip()
    values = {
        "run": run.name,
        "step": found.checkpoint.step,
        "match": words,
        "match_count": None,
        "apart": "apart" in visit.query,
        "rows": [],
    }
    if found.content is None:
        return values
    if words:
        matching = _matching(found.content, words)
        start = visit.number("from")
        rows = [_leaf_row(leaf) for leaf in matching[start : start + LEVEL]]
        return values | {"rows": rows, "match_count": len(matching)}
    rows = opened_rows(
        found.content.nodes,
        visit.query.get("at", ""),
        apart="apart" in visit.query,
        start=visit.number("from"),
    )
    return values | {"rows": rows}


def _difference(visit: Visit, run: Run, step: int) -> Diff | None:
    """Returns the difference from the step that the address names with ``changed=``;
    None without it."""
    if "changed" not in visit.query:
        return None
    return run.diff(visit.number("changed"), step)


def _matching(content: Content, words: str) -> Sequence[LeafInfo]:
    """Returns the leaves whose key matches a glob, or contains the text."""
    leaves = content.opened.leaves
    if len(words) > 512:
        raise InvalidRequestError(
            f"match: expected at most 512 characters, got {len(words)}; shorten it"
        )
    if any(char in words for char in "*?["):
        return [leaves[key] for key in matching_keys(words, leaves.keys())]
    return [leaf for key, leaf in leaves.items() if words in key]


def _leaf_row(leaf: LeafInfo) -> Row:
    return Row(
        prefix=leaf.key,
        parent="",
        name=leaf.key or "''",
        depth=0,
        leaf=True,
        content=dtype_text(leaf),
        shape=shape_text(leaf),
        size=size_text(leaf.size_bytes),
        chunks=f"{leaf.chunk_count:,}",
        sharding=spec_text(leaf.sharding),
    )


def _neighbours(run: Run, step: int) -> Mapping[str, int | None]:
    """Returns the steps of the checkpoints before and after this one, if it is one of
    the newest."""
    damaged: list[DataLossError] = []  # the page of the run shows them
    newest = islice(run.checkpoints(on_damage=damaged.append), _NEAR)
    steps = [checkpoint.step for checkpoint in newest]
    later = [other for other in steps if other > step]
    earlier = [other for other in steps if other < step]
    is_near = len(later) < _NEAR
    return {
        "later": later[-1] if later and is_near else None,
        "earlier": earlier[0] if earlier else None,
    }
