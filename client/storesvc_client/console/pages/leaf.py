"""``/r/NAMESPACE/RUN@STEP?key=KEY``: one leaf of a checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from storesvc_client import LeafInfo, NotFoundError, OpenCheckpoint
from storesvc_client._documents.checkpoints import chunk_grid, leaf_document
from storesvc_client._values.key_patterns import keys_below, nearest_keys
from storesvc_client._views.texts import (
    dtype_text,
    mesh_text,
    shape_text,
    sizes_text,
    spec_text,
)
from storesvc_client.console.pages import checkpoint
from storesvc_client.console.rendering import (
    Crumb,
    Page,
    checkpoint_url,
    chunk_map,
    command,
    crumbs_to_run,
    heatmap,
    histogram,
    sharding_grid,
)
from storesvc_client.console.visit import READ_BYTES, Visit, is_readable


def page(visit: Visit) -> Page:
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
        return checkpoint.page(replace(visit, query={"at": key}))
    leaf = _find_leaf(opened, key)
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
            **_neighbours(opened, key),
        },
    )


def _find_leaf(opened: OpenCheckpoint, key: str) -> LeafInfo:
    try:
        return opened.leaves[key]
    except KeyError:
        nearest = nearest_keys(key, opened.leaves.keys())
        hint = f"nearest: {', '.join(nearest)}" if nearest else "list its leaves"
        raise NotFoundError(
            f"{opened.name} has no leaf {key!r}; {hint}",
            metadata={
                "checkpoint": opened.name,
                "nearest_keys": "\n".join(nearest),
            },
        ) from None


def _neighbours(opened: OpenCheckpoint, key: str) -> Mapping[str, str | None]:
    """Returns the keys before and after this one."""
    keys = [*opened.leaves]
    at = keys.index(key)
    return {
        "previous": keys[at - 1] if at else None,
        "next": keys[at + 1] if at + 1 < len(keys) else None,
    }
