"""Pages of runs: ``/`` lists them, ``/r/NAMESPACE/RUN`` shows one with its checkpoints,
and what its retention policy does.

The function of a page takes a visit and returns a page; it imports no web framework. A
page has a template for people, a document for ``?json``, and the storectl command that
prints the same.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from statistics import median
from typing import Any, Final

from storesvc_client import (
    Checkpoint,
    Client,
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    RetentionDecision,
    Run,
    RunInfo,
    Tag,
    format_policy,
    parse_policy,
)
from storesvc_client._pictures.plots import make_scale
from storesvc_client._views.tables import group_by_uid
from storesvc_client._views.texts import json_value, order_metrics
from storesvc_client.console.rendering import (
    RUNS,
    Page,
    command,
    crumbs_to_namespace,
    metric_plot,
    run_url,
    sparkline,
    timeline,
    with_values,
)
from storesvc_client.console.visit import Visit

ROWS: Final = 50
"""Runs on one page of the list, each of which costs two calls; checkpoints on one page
of the table of a run."""

_DRAWN: Final = 60
"""Checkpoints of the sparkline."""

_CALLS: Final = 8
"""Calls in flight for one page."""


def show_runs(visit: Visit) -> Page:
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
    with ThreadPoolExecutor(_CALLS) as pool:
        rows = [*pool.map(lambda run: _run_row(visit.client, run, uploads), shown)]
    known = {run.name for run in found}
    return Page(
        template="runs.html",
        title=namespace or "Runs",
        document=found,
        command=command("ls", namespace),
        crumbs=(RUNS,) if namespace else (),
        values={
            "rows": rows,
            "namespaces": namespaces,
            "namespace": namespace or "",
            "words": words,
            "start": start,
            "total": len(matching),
            "page_rows": ROWS,
            "newest": _DRAWN,
            "starting": sorted(set(uploads) - known),
            "damaged": damaged,
        },
    )


def _run_row(client: Client, info: RunInfo, uploads: Counter[str]) -> Mapping[str, Any]:
    """Returns a run in the list."""
    run = client.run(info.name)
    damaged: list[DataLossError] = []  # the page of the run shows them
    newest, tags = list[Checkpoint](), list[Tag]()
    with suppress(NotFoundError):  # it was configured, and nothing was saved
        newest = [*islice(run.checkpoints(on_damage=damaged.append), _DRAWN)]
        tags = [*run.tags.list(on_damage=damaged.append)]
    metric = main_metric(newest)
    values = [c.metrics[metric] for c in reversed(newest) if metric in c.metrics]
    title = f"{metric} of the newest checkpoints of {info.name}"
    return {
        "info": info,
        "newest": newest[0] if newest else None,
        "tags": tags,
        "uploads": uploads[info.name],
        "metric": metric,
        "spark": sparkline(values, title),
    }


def main_metric(checkpoints: Sequence[Checkpoint]) -> str:
    """Returns the metric to show first; "" if there is none."""
    names = order_metrics(n for found in checkpoints for n in found.metrics)
    return names[0] if names else ""


NEWEST: Final = 1_000
"""Checkpoints that a page of a longer run reads at first; ``whole=1`` reads all."""

_METRICS: Final = 12
"""Metrics that the chart offers, and that have a column of their own."""

_SAVES: Final = 50
"""Newest saves whose duration counts."""

_DECISIONS: Final = 10
"""Decisions of a retention policy that are listed."""

_REASONS: Final = 6
"""Rules of a retention policy whose checkpoints are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """Outcome of a retention policy, or the reason why there is none."""

    policy: str
    decisions: tuple[RetentionDecision, ...]
    problem: str

    @property
    def deleted(self) -> list[RetentionDecision]:
        """Decisions that delete."""
        return [decision for decision in self.decisions if not decision.kept]

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Rules that keep checkpoints, and how many."""
        kept = (reason for d in self.decisions if d.kept for reason in d.reasons)
        return Counter(kept).most_common(_REASONS)

    @property
    def freed_bytes(self) -> int:
        """Bytes that only the deleted checkpoints' saves added."""
        return sum(decision.own_bytes for decision in self.deleted)


def show_run(visit: Visit) -> Page:
    """Returns the page of a run; of a long one the newest part, unless ``whole=1``."""
    run = visit.run
    damaged: list[DataLossError] = []
    start = visit.number("from")
    asked_step = visit.number("step") if visit.query.get("step") else None
    is_whole = visit.wants_whole or asked_step is not None
    most = max(NEWEST, start + ROWS)
    found = run.checkpoints(on_damage=damaged.append)
    checkpoints = [*islice(found, None if is_whole else most + 1)]
    is_partial = len(checkpoints) > most and not is_whole
    if asked_step is not None:  # the page with that step, or the next one below
        later = sum(checkpoint.step > asked_step for checkpoint in checkpoints)
        start = max(min(later, len(checkpoints) - 1), 0) // ROWS * ROWS
    names = order_metrics(n for found in checkpoints for n in found.metrics)
    metric = visit.query.get("metric") or main_metric(checkpoints)
    order = visit.query.get("sort", "") if asked_step is None else ""
    whole: dict[str, str | int] = {"whole": 1} if is_whole else {}
    listed = _sort_by_metric(checkpoints, order) if order else checkpoints
    kept = run.retention.get()
    tags = [*run.tags.list(on_damage=damaged.append)]
    tagged = group_by_uid(tags)
    holds = [*run.holds.list(on_damage=damaged.append)]
    held = group_by_uid(holds)
    deleted = list[Checkpoint]()
    if not is_partial:
        deleted += run.checkpoints(deleted=True, on_damage=damaged.append)
    steps = [checkpoint.step for checkpoint in (*checkpoints, *deleted)]
    span = (min(steps), max(steps)) if steps else None  # of all plots
    _, ticks = make_scale(span or (0, 0), 0.0, 1.0, whole=True)
    return Page(
        template="run.html",
        title=run.name,
        document=[
            json_value(one) | {"tags": [tag.name for tag in tagged[one.uid]]}
            for one in listed
        ],
        command=command("ls", run.name, order and "--sort", order),
        crumbs=crumbs_to_namespace(run.name),
        values={
            "run": run,
            "info": run.info(),
            "may": visit.permissions(),
            "is_partial": is_partial,
            "whole_url": with_values(run_url(run.name), {**visit.query, "whole": 1}),
            "facts": _facts(checkpoints),
            "rows": [
                {"checkpoint": one, "tags": tagged[one.uid], "holds": held[one.uid]}
                for one in listed[start : start + ROWS]
            ],
            "order": order,
            "pages": whole | ({"sort": order} if order else {}),
            "start": start,
            "total": len(checkpoints),
            "page_rows": ROWS,
            "asked_step": asked_step,
            "whole": whole,
            "metric": metric,
            "columns": names[:_METRICS],
            "span": span,
            "tick": ticks[1][0] - ticks[0][0] if len(ticks) > 1 else 0,
            "timeline": timeline([*checkpoints, *deleted], tags, holds),
            "plot": metric_plot(run.name, metric, checkpoints) if metric else None,
            "deleted": deleted,
            "uploads": [*run.uploads.list(on_damage=damaged.append)],
            "policy": format_policy(kept) if kept else "",
            "preview": _preview(
                run,
                visit.query.get("policy"),
                has_policy=kept is not None and not is_partial,
            ),
            "damaged": damaged,
            "shown_decisions": _DECISIONS,
        },
    )


def metric_points(visit: Visit) -> Mapping[str, Any]:
    """Returns the steps and the values of a metric, for the interactive plot."""
    metric = visit.query.get("metric", "")
    damaged: list[DataLossError] = []
    found = sorted(
        (checkpoint.step, checkpoint.metrics[metric])
        for checkpoint in visit.run.checkpoints(on_damage=damaged.append)
        if metric in checkpoint.metrics
    )
    return {
        "metric": metric,
        "steps": [step for step, _ in found],
        "values": [value for _, value in found],
    }


def _facts(checkpoints: Sequence[Checkpoint]) -> Mapping[str, Any]:
    stored = sum(checkpoint.stored_bytes for checkpoint in checkpoints)
    own = sum(checkpoint.own_bytes for checkpoint in checkpoints)
    times = [(c.commit_time - c.create_time) for c in checkpoints[:_SAVES]]
    seconds = [time.total_seconds() for time in times]
    return {
        "newest": checkpoints[0] if checkpoints else None,
        "logical_bytes": sum(checkpoint.size_bytes for checkpoint in checkpoints),
        "own_bytes": own,
        "reused": (stored - own) / stored if stored else None,
        "save": timedelta(seconds=median(seconds)) if seconds else None,
    }


def _sort_by_metric(
    checkpoints: Sequence[Checkpoint], order: str
) -> Sequence[Checkpoint]:
    """Returns checkpoints by a metric as ``ls --sort`` does: the lowest first, with "-"
    the highest; the others last."""
    name, sign = order.removeprefix("-"), -1 if order.startswith("-") else 1
    values = {c.uid: sign * c.metrics.get(name, math.nan) for c in checkpoints}
    known = [c for c in checkpoints if not math.isnan(values[c.uid])]
    others = [c for c in checkpoints if math.isnan(values[c.uid])]
    return sorted(known, key=lambda c: values[c.uid]) + others


def _preview(run: Run, asked: str | None, *, has_policy: bool) -> Preview | None:
    """Returns what the policy in the form, or the one of the run, would do."""
    if asked is None and not has_policy:
        return None
    try:
        policy = parse_policy(asked) if asked else None
        if policy is None and not has_policy:
            return None
        decisions = run.retention.preview(policy)
    except (InvalidRequestError, PermissionDeniedError) as e:
        return Preview(policy=asked or "", decisions=(), problem=str(e))
    return Preview(policy=asked or "", decisions=tuple(decisions), problem="")
