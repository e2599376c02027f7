"""Pages of a whole store.

- ``/uploads``: checkpoints that are being written;
- ``/storage``: the bytes of runs, and what a collection would do;
- ``/events``: changes of checkpoints as they happen;
- ``/audit``: the audit log of the server, for users who may read it;
- ``/me``: the identity of the user, and the permissions;
- ``/help``: the pages, and the commands that print the same.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, cast

from storesvc.format.names import InvalidNameError, RunName
from storesvc_client import AuditEntry, Collected, DataLossError, Usage
from storesvc_client._api.client import newest
from storesvc_client._documents import list_usages, sum_usages
from storesvc_client._values.arguments import parse_past
from storesvc_client._values.call_kinds import STAGES, AuditStage, Authentication
from storesvc_client._views.tables import unfinished_text
from storesvc_client.console.rendering import Page, command, with_values
from storesvc_client.console.visit import Visit

_NOTHING: Final = timedelta()

_SHOWN: Final = 8
"""Maximum writers that one row names."""


def show_uploads(visit: Visit) -> Page:
    parent = visit.query.get("in") or None
    damaged: list[DataLossError] = []
    found = [*visit.client.uploads(parent, on_damage=damaged.append)]
    rows = [
        {
            "upload": upload,
            "finished": upload.finished_writer_count / max(upload.writer_count, 1),
            "waits_for": unfinished_text(upload, _SHOWN),
            # zero once it has expired
            "lease_left": max(upload.renew_time + upload.lease - visit.now, _NOTHING),
        }
        for upload in found
    ]
    return Page(
        template="uploads.html",
        title="Uploads",
        document=found,
        command=command("uploads", parent),
        section="Uploads",
        values={"rows": rows, "damaged": damaged},
    )


USAGE_ROWS: Final = 100
"""Runs on one page."""


def show_storage(visit: Visit) -> Page:
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
        command=command("du", namespace),
        section="Storage",
        values={
            "totals": _totals("all runs", usages),
            "namespaces": [_totals(n, of) for n, of in sorted(by_namespace.items())],
            "rows": largest[start : start + USAGE_ROWS],
            "most_bytes": max((usage.distinct_bytes for usage in usages), default=0),
            "start": start,
            "total": len(usages),
            "page_rows": USAGE_ROWS,
            "damaged": damaged,
            "collected": collected,
            "namespace": namespace,
            "garbage_command": command("gc", namespace, "--dry-run"),
        },
    )


def _totals(name: str, usages: Sequence[Usage]) -> Mapping[str, Any]:
    """Returns sums over runs, and the share of their bytes that is reused."""
    found = sum_usages(usages)
    stored, distinct = found["stored_bytes"], found["distinct_bytes"]
    reused = 1 - distinct / stored if stored else 0.0
    return {"name": name, "reused": reused, **found}


def show_events(visit: Visit) -> Page:
    """Returns the events of a namespace or a run since the console began to watch it;
    the first ones are the newest checkpoints."""
    damaged: list[DataLossError] = []  # the list of runs shows them
    runs = visit.client.runs(on_damage=damaged.append)
    namespaces = sorted({run.name.partition("/")[0] for run in runs})
    parent = visit.query.get("of") or next(iter(namespaces), "")
    feed = visit.feeds.find_feed(parent) if parent else None
    events = feed.after(0) if feed else []
    return Page(
        template="events.html",
        title="Events",
        document=[event for _, event in events],
        command=command("watch", parent or "NAMESPACE", "--since", "latest"),
        section="Events",
        values={
            "parent": parent,
            "namespaces": namespaces,
            "events": [event for _, event in reversed(events)],
            "last": events[-1][0] if events else 0,
            "problem": str(feed.problem or "") if feed else "",
        },
    )


AUDIT_ROWS: Final = 100
"""Entries on one page, as storectl prints without --limit."""

_CALLS: Final = 8
"""Maximum calls for one page: a server searches a part of its log in each."""

FILTERS: Final = ("principal", "method", "in", "stage", "authentication", "since")
"""Values of the query that choose entries."""


def show_audit_log(visit: Visit) -> Page:
    """Returns the entries that match the query, the newest first."""
    chosen = {name: visit.query[name] for name in FILTERS if visit.query.get(name)}
    since = parse_past(chosen["since"], visit.now) if "since" in chosen else None
    entries = visit.client.audit_entries(
        principal=chosen.get("principal"),
        method=chosen.get("method"),
        parent=chosen.get("in"),
        # the client checks both
        stage=cast("AuditStage | None", chosen.get("stage")),
        authentication=cast("Authentication | None", chosen.get("authentication")),
        since=since,
        page_token=visit.query.get("after", ""),
    )
    options = list[str]()
    for name, text in chosen.items():
        options += ["--run" if name == "in" else f"--{name}", text]
    found = newest(entries, AUDIT_ROWS, most_pages=_CALLS)
    # an age would be another time, and so another list, when the next page is read
    fixed = chosen if since is None else {**chosen, "since": since.isoformat()}
    older = entries.page_token
    return Page(
        template="audit.html",
        title="Audit log",
        document=found,
        command=command("audit", "ls", *options),
        section="Audit",
        values={
            "rows": [_audit_row(entry, chosen) for entry in found],
            "server": entries.server,
            "chosen": {name: chosen.get(name, "") for name in FILTERS},
            "stages": [*_stage_links(chosen)],
            "newest": audit_url(chosen) if visit.query.get("after") else "",
            "older": audit_url({**fixed, "after": older}) if older else "",
        },
    )


def audit_url(values: Mapping[str, str]) -> str:
    """Returns the address of a list of entries."""
    return with_values("/audit", values)


def _audit_row(entry: AuditEntry, chosen: Mapping[str, str]) -> Mapping[str, Any]:
    """Returns an entry, and the addresses of the lists to which its cells lead."""
    caller = {"principal": entry.principal}
    if not entry.principal:
        caller = {"authentication": "anonymous"}
    name = "/".join(entry.detail.get("name", "").split("/")[:4])
    same_run = ""
    with suppress(InvalidNameError):  # it is about no run
        same_run = audit_url({**chosen, "in": str(RunName.from_resource(name))})
    same_principal = audit_url({**chosen, **caller})
    return {"entry": entry, "same_principal": same_principal, "same_run": same_run}


def _stage_links(chosen: Mapping[str, str]) -> list[Mapping[str, Any]]:
    others = {name: text for name, text in chosen.items() if name != "stage"}
    by_name: dict[str, Mapping[str, str]] = {"all": others}
    by_name |= {stage: {**others, "stage": stage} for stage in STAGES}
    return [
        {"name": name, "address": audit_url(values), "is_on": values == chosen}
        for name, values in by_name.items()
    ]


def show_identity(visit: Visit) -> Page:
    """Returns the identity and the permissions; ``in=`` names a run or a
    namespace."""
    parent = visit.query.get("in") or None
    identity = visit.client.identity()
    return Page(
        template="me.html",
        title=identity.principal or "(anonymous)",
        document=identity,
        command=command("whoami"),
        section="",
        values={
            "identity": identity,
            "parent": parent or "",
            "permissions": visit.client.test_permissions(parent),
            "list_command": command("auth", "list", parent),
        },
    )


PAGES: Final = tuple(
    {"address": address, "shows": shows, "command": command}
    for address, shows, command in (
        ("/", "runs of all namespaces", "storectl ls"),
        ("/?in=NAMESPACE", "runs of a namespace", "storectl ls NAMESPACE"),
        ("/r/NAMESPACE/RUN", "a run and its checkpoints", "storectl ls NAMESPACE/RUN"),
        (
            "/r/NAMESPACE/RUN?policy=POLICY",
            "what a retention policy would delete",
            "storectl retain NAMESPACE/RUN POLICY --dry-run",
        ),
        (
            "/r/NAMESPACE/RUN@STEP",
            "a checkpoint, its tree and its items",
            "storectl stat NAMESPACE/RUN@STEP",
        ),
        (
            "/r/NAMESPACE/RUN@STEP?key=KEY",
            "a leaf",
            "storectl stat NAMESPACE/RUN@STEP:KEY",
        ),
        (
            "/trace/NAMESPACE/RUN@STEP",
            "how long each part of a save took",
            "storectl trace NAMESPACE/RUN@STEP",
        ),
        (
            "/diff?a=BEFORE&b=AFTER",
            "two checkpoints compared",
            "storectl diff BEFORE AFTER",
        ),
        ("/uploads", "checkpoints that are being written", "storectl uploads"),
        ("/storage", "bytes of runs, and garbage", "storectl du"),
        ("/events?of=NAMESPACE", "changes as they happen", "storectl watch NAMESPACE"),
        (
            "/audit",
            "the audit log of the server, if you may read it",
            "storectl audit ls",
        ),
        ("/me", "who you are, and what you may do", "storectl whoami"),
    )
)


def show_help(visit: Visit) -> Page:  # noqa: ARG001 - every page gets the visit
    return Page(
        template="help.html",
        title="Help",
        document=PAGES,
        command="storectl --help",
        section="Help",
        values={"rows": PAGES},
    )
