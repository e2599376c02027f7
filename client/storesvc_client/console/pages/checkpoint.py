"""``/r/NAMESPACE/RUN@STEP``: a checkpoint, its tree, and where its bytes are."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from storesvc_client import (
    DataLossError,
    Diff,
    InvalidRequestError,
    LeafInfo,
    Run,
)
from storesvc_client._documents.checkpoints import (
    base_step_of,
    checkpoint_document,
)
from storesvc_client._values.key_patterns import matching_keys
from storesvc_client._values.texts import dtype_text, shape_text, size_text, spec_text
from storesvc_client.console.addresses import checkpoint_url, command, with_values
from storesvc_client.console.opened import Content, Found
from storesvc_client.console.page import Page, crumbs_to_run
from storesvc_client.console.pages.runs import main_metric
from storesvc_client.console.pictures import treemap
from storesvc_client.console.tree_rows import (
    LEVEL,
    Row,
    level,
    opened_rows,
)
from storesvc_client.console.visit import Visit

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
        checkpoint, opened, tags=tags, base_step=base_step_of(run, checkpoint)
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
