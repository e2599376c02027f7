"""``/storage``: the bytes of runs, and what a collection would do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from storesvc_client import Collected, DataLossError, Usage
from storesvc_client._documents.checkpoints import list_usages
from storesvc_client.console.rendering import Page, command
from storesvc_client.console.visit import Visit

ROWS: Final = 100
"""Runs on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over runs."""

    name: str
    checkpoints: int
    logical_bytes: int
    stored_bytes: int
    distinct_bytes: int

    @property
    def reused(self) -> float:
        """Share of the stored bytes that is not stored again."""
        if not self.stored_bytes:
            return 0.0
        return 1 - self.distinct_bytes / self.stored_bytes


def page(visit: Visit) -> Page:
    """Returns how many bytes runs take; with ``garbage=1`` what is garbage."""
    namespace = visit.query.get("in") or None
    damaged: list[DataLossError] = []
    usages = list_usages(visit.client, namespace, damaged.append)
    by_namespace: dict[str, list[Usage]] = {}
    for usage in usages:
        by_namespace.setdefault(usage.run.partition("/")[0], []).append(usage)
    start = visit.number("from")
    largest = sorted(usages, key=lambda usage: -usage.distinct_bytes)
    collected: list[Collected] | None = None
    if "garbage" in visit.query:
        collected = [*visit.client.collect(namespace, dry_run=True)]
    return Page(
        template="storage.html",
        title="Storage",
        document=usages,
        command=command("du", *([namespace] if namespace else [])),
        section="Storage",
        values={
            "totals": _totals("all runs", usages),
            "namespaces": [_totals(n, of) for n, of in sorted(by_namespace.items())],
            "rows": largest[start : start + ROWS],
            "most_bytes": max((usage.distinct_bytes for usage in usages), default=0),
            "start": start,
            "total": len(usages),
            "page_rows": ROWS,
            "damaged": damaged,
            "collected": collected,
            "namespace": namespace,
            "garbage_command": command(
                "gc", *([namespace] if namespace else []), "--dry-run"
            ),
        },
    )


def _totals(name: str, usages: Iterable[Usage]) -> Totals:
    known = [*usages]
    return Totals(
        name=name,
        checkpoints=sum(usage.checkpoint_count for usage in known),
        logical_bytes=sum(usage.logical_bytes for usage in known),
        stored_bytes=sum(usage.stored_bytes for usage in known),
        distinct_bytes=sum(usage.distinct_bytes for usage in known),
    )
