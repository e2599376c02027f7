"""``/``: the runs of the store."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from markupsafe import Markup

from storesvc_client import (
    Checkpoint,
    Client,
    DataLossError,
    NotFoundError,
    RunInfo,
    Tag,
)
from storesvc_client._views.texts import order_metrics
from storesvc_client.console.rendering import RUNS, Page, command, sparkline
from storesvc_client.console.visit import Visit

ROWS: Final = 50
"""Runs on one page; each costs two calls."""

_NEWEST: Final = 60
"""Checkpoints of the sparkline."""

CALLS: Final = 8
"""Calls in flight for one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run in the list."""

    info: RunInfo
    newest: Checkpoint | None
    tags: tuple[Tag, ...]
    uploads: int
    metric: str
    """Metric that is shown; "" if there is none."""
    spark: Markup | None


def page(visit: Visit) -> Page:
    """Returns the list of runs, of one namespace with ``in=``."""
    namespace = visit.query.get("in") or None
    damaged: list[DataLossError] = []
    found = list(visit.client.runs(namespace, on_damage=damaged.append))
    namespaces = sorted({run.name.partition("/")[0] for run in found})
    words = visit.query.get("q", "").strip()
    matching = [run for run in found if words.lower() in run.name.lower()]
    start = visit.number("from")
    shown = matching[start : start + ROWS]
    unread: list[DataLossError] = []  # the page of uploads shows them
    live = visit.client.uploads(namespace, on_damage=unread.append)
    uploads = Counter(upload.run for upload in live)
    with ThreadPoolExecutor(CALLS) as pool:
        rows = [*pool.map(lambda run: _row(visit.client, run, uploads), shown)]
    known = {run.name for run in found}
    return Page(
        template="runs.html",
        title=namespace or "Runs",
        document=found,
        command=command("ls", *([namespace] if namespace else [])),
        crumbs=(RUNS,) if namespace else (),
        values={
            "rows": rows,
            "namespaces": namespaces,
            "namespace": namespace or "",
            "words": words,
            "start": start,
            "total": len(matching),
            "page_rows": ROWS,
            "newest": _NEWEST,
            "starting": sorted(set(uploads) - known),
            "damaged": damaged,
        },
    )


def _row(client: Client, info: RunInfo, uploads: Counter[str]) -> RunRow:
    run = client.run(info.name)
    damaged: list[DataLossError] = []  # the page of the run shows them
    newest, tags = list[Checkpoint](), list[Tag]()
    with suppress(NotFoundError):  # it was configured, and nothing was saved
        newest = [*islice(run.checkpoints(on_damage=damaged.append), _NEWEST)]
        tags = [*run.tags.list(on_damage=damaged.append)]
    metric = main_metric(newest)
    values = [c.metrics[metric] for c in reversed(newest) if metric in c.metrics]
    return RunRow(
        info=info,
        newest=newest[0] if newest else None,
        tags=tuple(tags),
        uploads=uploads[info.name],
        metric=metric,
        spark=sparkline(values, f"{metric} of the newest checkpoints of {info.name}"),
    )


def main_metric(checkpoints: Sequence[Checkpoint]) -> str:
    """Returns the metric to show first; "" if there is none."""
    names = order_metrics(n for found in checkpoints for n in found.metrics)
    return names[0] if names else ""
