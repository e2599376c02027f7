"""``/diff?a=BEFORE&b=AFTER``: two checkpoints compared by the digests of chunks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from markupsafe import Markup

from storesvc_client import Diff, LeafDifference
from storesvc_client._views.texts import (
    ABSENT,
    natural_key,
    numbered_keys,
    sizes_text,
    value_text,
)
from storesvc_client.console.pages.checkpoint import LARGE
from storesvc_client.console.rendering import Page, command, layer_bars
from storesvc_client.console.visit import Visit, checkpoint_path

ROWS: Final = 200
"""Differences on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """A leaf or an item that differs."""

    name: str
    kind: str
    before: str
    after: str
    changed: float | None
    """Share of the chunks that differ; None if it is not known."""
    chunks: str
    key: str = ""
    """Key of the leaf, or of the first of those that are alike."""
    alike: int = 1
    """Leaves that share the row."""


def page(visit: Visit) -> Page:
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
    start = visit.number("from")
    differences = sorted(found.differences, key=lambda leaf: natural_key(leaf.key))
    apart = "apart" in visit.query
    rows = [_row(d, d.key, 1) for d in differences] if apart else _rows(differences)
    return Page(
        template="diff.html",
        title="Compare",
        document=found,
        command=command("diff", before, after),
        values=values
        | {
            "found": found,
            "counts": sorted(Counter(d.kind for d in found.differences).items()),
            "rows": rows[start : start + ROWS],
            "apart": apart,
            "items": [
                DiffRow(
                    name=item.place,
                    kind=item.kind,
                    before=value_text(item.base_value_kind, item.base_size_bytes),
                    after=value_text(item.value_kind, item.size_bytes),
                    changed=None,
                    chunks="",
                )
                for item in found.items[:ROWS]
            ],
            "layer_bars": _layer_bars(visit, other, found),
            "start": start,
            "total": len(rows),
            "page_rows": ROWS,
            "changed_chunks": sum(d.changed_chunk_count for d in found.differences),
            "chunks": sum(d.chunk_count for d in found.differences),
        },
    )


def _layer_bars(visit: Visit, run: str, found: Diff) -> Markup | None:
    """Returns the picture of the layers, unless the tree is too large to wait for."""
    later = visit.opened.find(visit.client.run(run), found.checkpoint.step, most=LARGE)
    return None if later.content is None else layer_bars(later.content.opened, found)


def _rows(leaves: Sequence[LeafDifference]) -> list[DiffRow]:
    """Returns a row for all leaves with numbered keys that differ alike."""
    likeness = [replace(leaf, key="") for leaf in leaves]
    return [
        _row(leaves[series.indices[0]], series.text, len(series.indices))
        for series in numbered_keys([leaf.key for leaf in leaves], likeness)
    ]


def _row(leaf: LeafDifference, name: str, alike: int) -> DiffRow:
    is_counted = leaf.kind == "content" and leaf.chunk_count > 0
    times = f"{alike:,} x " if alike > 1 else ""
    changed = f"{leaf.changed_chunk_count:,} of " if is_counted else ""
    return DiffRow(
        name=name,
        key=leaf.key,
        alike=alike,
        kind=leaf.kind,
        before=_array_text(leaf.base_dtype, leaf.base_shape),
        after=_array_text(leaf.dtype, leaf.shape),
        changed=leaf.changed_chunk_count / leaf.chunk_count if is_counted else None,
        chunks=f"{times}{changed}{leaf.chunk_count:,}",
    )


def _array_text(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return ABSENT if dtype is None or shape is None else dtype + sizes_text(shape)
