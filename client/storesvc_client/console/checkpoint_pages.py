"""Pages of checkpoints.

- ``/r/NAMESPACE/RUN@STEP``: a checkpoint, its tree, and where its bytes are;
- with ``?key=KEY``: one leaf;
- ``/diff?a=BEFORE&b=AFTER``: two checkpoints compared by the digests of chunks;
- ``/trace/NAMESPACE/RUN@STEP``: how long each part of a save took.

The tree has rows, level by level. Consecutively numbered siblings with the same content
share a row, as in ``storectl tree``: ``{0..31}``; the rows below it show the first of
them. ``apart`` gives each of them a row. A level has at most `LEVEL` rows, so that a
page stays small whatever a checkpoint holds.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Literal

from storesvc_client import (
    DataLossError,
    InvalidRequestError,
    LeafDifference,
    LeafInfo,
    NotFoundError,
    OpenCheckpoint,
    Run,
)
from storesvc_client._documents import (
    checkpoint_document,
    chunk_grid,
    find_base_step,
    leaf_document,
)
from storesvc_client._values.key_patterns import keys_below, matching_keys, nearest_keys
from storesvc_client._views.tables import DIFFERENCES, ITEM_DIFFERENCES
from storesvc_client._views.texts import (
    Group,
    Node,
    count_text,
    dtype_text,
    groups,
    mesh_text,
    natural_key,
    numbered_keys,
    shape_text,
    size_text,
    sizes_text,
    spec_text,
)
from storesvc_client.console.rendering import (
    Crumb,
    Page,
    checkpoint_url,
    chunk_map,
    command,
    crumbs_to_run,
    heatmap,
    histogram,
    layer_bars,
    save_phases,
    sharding_grid,
    treemap,
    with_values,
)
from storesvc_client.console.run_pages import main_metric
from storesvc_client.console.visit import (
    READ_BYTES,
    Content,
    Found,
    Visit,
    checkpoint_path,
    is_readable,
)

LEVEL: Final = 200
"""Maximum rows of one level on a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the tree: a leaf, a subtree, several alike, or a link to more rows."""

    prefix: str
    """Key of the leaf, or the common beginning of the keys below it."""
    parent: str = ""
    """Prefix of the row above."""
    name: str
    depth: int = 0
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
) -> list[Row]:
    """Returns the rows directly below a prefix; none if there is no such subtree.

    Args:
        prefix: Beginning of keys, such as "params/layers"; "": the top.
    """
    below, above = _below(nodes, prefix)
    return _level(below, prefix, depth=above, apart=apart, start=start)


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
    # a row of several stands for the step, and shows another one
    is_hidden = step is not None and not any(one.node is step for one in groups(nodes))
    for row in _level(
        nodes,
        prefix,
        depth=depth,
        apart=(apart and is_last) or is_hidden,
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
    node, times = group.node, f"{group.count:,} x " if group.count > 1 else ""
    if node.leaf:
        row = _leaf_row(node.leaf)
    else:
        content, size = count_text(node.leaf_count, "leaf"), size_text(node.size_bytes)
        row = Row(prefix="", name="", leaf=False, content=content, size=size)
    return replace(
        row,
        prefix=_join_key(parent, node),
        parent=parent,
        name=group.name,
        depth=depth,
        content=times + row.content,
        size=times + row.size,
        alike=group.count,
    )


def _leaf_row(leaf: LeafInfo) -> Row:
    return Row(
        prefix=leaf.key,
        name=leaf.key or "''",
        leaf=True,
        content=dtype_text(leaf),
        shape=shape_text(leaf),
        size=size_text(leaf.size_bytes),
        chunks=f"{leaf.chunk_count:,}",
        sharding=spec_text(leaf.sharding),
    )


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


def show_checkpoint(visit: Visit) -> Page:
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
    picture = None
    if opened:
        difference = None
        if "changed" in visit.query:
            difference = run.diff(visit.number("changed"), checkpoint.step)
        picture = treemap(opened, difference)
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
            "treemap": picture,
            "is_by_change": "changed" in visit.query,
            "tree_command": command("tree", path),
            "undelete_command": command("undelete", path),
            **_tree(visit, run, found),
            **_neighbours(run, checkpoint.step),
        },
    )


def show_tree_rows(visit: Visit) -> Page:
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
        rows = [*map(_leaf_row, matching[start : start + LEVEL])]
        return values | {"rows": rows, "match_count": len(matching)}
    rows = opened_rows(
        found.content.nodes,
        visit.query.get("at", ""),
        apart="apart" in visit.query,
        start=visit.number("from"),
    )
    return values | {"rows": rows}


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


def show_leaf(visit: Visit) -> Page:
    """Returns the page of a leaf; reads its values with ``values=1``."""
    run, key = visit.run, visit.query["key"]
    found = visit.opened.find(run, visit.which)
    step = found.checkpoint.step
    path = f"{run.name}@{step}"
    if found.content is None:
        raise NotFoundError(
            f"{path} is deleted; to see its leaves, undelete it: storectl undelete "
            f"{path}"
        )
    opened = found.content.opened
    is_group = not key or keys_below(key, opened.leaves.keys())
    if key not in opened.leaves and is_group:
        return show_checkpoint(replace(visit, query={"at": key}))
    leaf = _find_leaf(opened, key)
    keys = [*opened.leaves]
    at = keys.index(key)
    values = None
    if "values" in visit.query and is_readable(leaf):
        values = found.content.values(leaf)
    scale: Literal["linear", "symlog"] = "linear"
    if visit.query.get("scale") == "symlog":
        scale = "symlog"
    crumb = Crumb(name=f"@{step}", address=checkpoint_url(run.name, step))
    return Page(
        template="leaf.html",
        title=key or "''",
        document=leaf_document(leaf),
        command=command("stat", f"{run.name}@{visit.which}:{key}"),
        crumbs=(*crumbs_to_run(run.name), crumb),
        values={
            "run": run.name,
            "step": step,
            "leaf": leaf,
            "dtype": dtype_text(leaf),
            "shape": shape_text(leaf),
            "stored": leaf.dtype + sizes_text(leaf.shape),
            "grid": sizes_text(chunk_grid(leaf)),
            "chunk_shape": sizes_text(leaf.chunk_shape),
            "mesh": mesh_text(leaf.sharding),
            "spec": spec_text(leaf.sharding),
            "is_readable": is_readable(leaf),
            "read_bytes": READ_BYTES,
            "values": values,
            "chunk_map": chunk_map(leaf),
            "sharding_grid": sharding_grid(leaf),
            "statistics": values.statistics if values else None,
            "scale": scale,
            "histogram": histogram(values, scale) if values else None,
            "heatmap": heatmap(values) if values else None,
            "get_command": command("get", f"{path}:{key}"),
            "previous": keys[at - 1] if at else None,
            "next": keys[at + 1] if at + 1 < len(keys) else None,
        },
    )


def _find_leaf(opened: OpenCheckpoint, key: str) -> LeafInfo:
    if key in opened.leaves:
        return opened.leaves[key]
    nearest = nearest_keys(key, opened.leaves.keys())
    hint = f"nearest: {', '.join(nearest)}" if nearest else "list its leaves"
    raise NotFoundError(
        f"{opened.name} has no leaf {key!r}; {hint}",
        metadata={"checkpoint": opened.name, "nearest_keys": "\n".join(nearest)},
    )


DIFF_ROWS: Final = 200
"""Differences on one page."""


def show_difference(visit: Visit) -> Page:
    """Returns the comparison, or the form for one."""
    before, after = visit.query.get("a", "").strip(), visit.query.get("b", "").strip()
    values = {"before": before, "after": after, "found": None}
    if not (before and after):
        return Page(
            template="diff.html",
            title="Compare",
            document=None,
            command=command("diff", before or "BEFORE", after or "AFTER"),
            values=values,
        )
    (run, which), (other, that) = checkpoint_path(before), checkpoint_path(after)
    found = visit.client.run(run).diff(which, that, of=visit.client.run(other))
    later = visit.opened.find(
        visit.client.run(other), found.checkpoint.step, most=LARGE
    )
    start = visit.number("from")
    differences = sorted(found.differences, key=lambda leaf: natural_key(leaf.key))
    apart = "apart" in visit.query
    rows = (
        [_diff_row(d, d.key, 1) for d in differences]
        if apart
        else _group_differences(differences)
    )
    return Page(
        template="diff.html",
        title="Compare",
        document=found,
        command=command("diff", before, after),
        values=values
        | {
            "found": found,
            "counts": sorted(Counter(d.kind for d in found.differences).items()),
            "rows": rows[start : start + DIFF_ROWS],
            "apart": apart,
            "items": [*map(ITEM_DIFFERENCES.row, found.items[:DIFF_ROWS])],
            # unless the tree is too large to wait for
            "layer_bars": layer_bars(later.content.opened, found)
            if later.content
            else None,
            "start": start,
            "total": len(rows),
            "page_rows": DIFF_ROWS,
            "changed_chunks": sum(d.changed_chunk_count for d in found.differences),
            "chunks": sum(d.chunk_count for d in found.differences),
        },
    )


def _group_differences(leaves: Sequence[LeafDifference]) -> list[Mapping[str, Any]]:
    """Returns a row for all leaves with numbered keys that differ alike."""
    likeness = [replace(leaf, key="") for leaf in leaves]
    return [
        _diff_row(leaves[series.indices[0]], series.text, len(series.indices))
        for series in numbered_keys([leaf.key for leaf in leaves], likeness)
    ]


def _diff_row(leaf: LeafDifference, name: str, alike: int) -> Mapping[str, Any]:
    """Returns the row of a leaf that differs, or of the first of several alike."""
    _, kind, before, after, _ = DIFFERENCES.row(leaf)
    is_counted = leaf.kind == "content" and leaf.chunk_count > 0
    times = f"{alike:,} x " if alike > 1 else ""
    changed = f"{leaf.changed_chunk_count:,} of " if is_counted else ""
    share = leaf.changed_chunk_count / leaf.chunk_count if is_counted else None
    return {
        "name": name,
        "key": leaf.key,
        "alike": alike,
        "kind": kind,
        "before": before,
        "after": after,
        "changed": share,
        "chunks": f"{times}{changed}{leaf.chunk_count:,}",
    }


_PHASES: Final = {
    "await previous": "waits for the previous save of the run",
    "plan": "divides the tree into chunks",
    "snapshot": "copies arrays to memory of the host",
    "wait": "waits for memory of the staging buffers",
    "begin": "asks the store to begin the upload",
    "digest": "computes the digests of chunks",
    "find": "asks which chunks the store has; they are not sent again",
    "write": "writes data files",
    "sync": "makes data files durable",
    "send": "sends chunks to the server",
    "acknowledge": "waits, after the last send, until the server has stored all",
    "finish": "ends the part of this process",
    "await others": "waits for the other processes of the job",
    "commit": "makes the checkpoint visible",
}
"""Meaning of the phases of a save."""


def show_trace(visit: Visit) -> Page:
    """Returns the phases of the processes of a save, the slowest first."""
    run = visit.run
    found = run.trace(visit.which)
    longest = max((writer.seconds for writer in found.writers), default=0.0)
    writers = sorted(found.writers, key=lambda writer: -writer.seconds)
    return Page(
        template="trace.html",
        title=f"Save of {run.name}@{found.step}",
        document=found,
        command=command("trace", f"{run.name}@{visit.which}"),
        crumbs=(
            *crumbs_to_run(run.name),
            Crumb(name=f"@{found.step}", address=checkpoint_url(run.name, found.step)),
        ),
        values={
            "found": found,
            "writers": [
                {"report": writer, "chart": save_phases(writer, longest)}
                for writer in writers
            ],
            "longest": longest,
            "phases": {
                name: text
                for name, text in _PHASES.items()
                if any(s.name == name for writer in writers for s in writer.timeline)
            },
            "sent_bytes": sum(writer.sent_bytes for writer in writers),
            "reused_bytes": sum(w.total_bytes - w.sent_bytes for w in writers),
        },
    )
