"""``/audit``: the audit log of the server, for users who may read it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, cast

from storesvc.format.names import InvalidNameError, RunName
from storesvc_client import AuditEntry
from storesvc_client._api.client import newest
from storesvc_client._values.arguments import parse_past
from storesvc_client._values.call_kinds import STAGES, AuditStage, Authentication
from storesvc_client.console.rendering import Page, command, with_values
from storesvc_client.console.visit import Visit

ROWS: Final = 100
"""Entries on one page, as storectl prints without --limit."""

_CALLS: Final = 8
"""Maximum calls for one page: a server searches a part of its log in each."""

FILTERS: Final = ("principal", "method", "in", "stage", "authentication", "since")
"""Values of the query that choose entries."""

_OPTIONS: Final = {"in": "--run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """An entry, and the addresses of the lists to which its cells lead."""

    entry: AuditEntry
    same_principal: str
    same_run: str
    """Empty: it is about no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLink:
    """A choice of the stage."""

    name: str
    address: str
    is_on: bool


def page(visit: Visit) -> Page:
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
    found = newest(entries, ROWS, most_pages=_CALLS)
    # an age would be another time, and so another list, when the next page is read
    fixed = chosen if since is None else {**chosen, "since": since.isoformat()}
    older = entries.page_token
    return Page(
        template="audit.html",
        title="Audit log",
        document=found,
        command=_command(chosen),
        section="Audit",
        values={
            "rows": [_row(entry, chosen) for entry in found],
            "server": entries.server,
            "chosen": {name: chosen.get(name, "") for name in FILTERS},
            "stages": [*_stage_links(chosen)],
            "newest": address(chosen) if visit.query.get("after") else "",
            "older": address({**fixed, "after": older}) if older else "",
        },
    )


def address(values: Mapping[str, str]) -> str:
    """Returns the address of a list of entries."""
    return with_values("/audit", values)


def _row(entry: AuditEntry, chosen: Mapping[str, str]) -> AuditRow:
    caller = {"principal": entry.principal}
    if not entry.principal:
        caller = {"authentication": "anonymous"}
    name = "/".join(entry.detail.get("name", "").split("/")[:4])
    same_run = ""
    with suppress(InvalidNameError):  # it is about no run
        same_run = address({**chosen, "in": str(RunName.from_resource(name))})
    same_principal = address({**chosen, **caller})
    return AuditRow(entry=entry, same_principal=same_principal, same_run=same_run)


def _stage_links(chosen: Mapping[str, str]) -> list[StageLink]:
    others = {name: text for name, text in chosen.items() if name != "stage"}
    by_name: dict[str, Mapping[str, str]] = {"all": others}
    by_name |= {stage: {**others, "stage": stage} for stage in STAGES}
    return [
        StageLink(name=name, address=address(values), is_on=values == chosen)
        for name, values in by_name.items()
    ]


def _command(chosen: Mapping[str, str]) -> str:
    words = list[str]()
    for name, text in chosen.items():
        words += [_OPTIONS.get(name, f"--{name}"), text]
    return command("audit", "ls", *words)
