"""``/change/ACTION``: asks before a change, and makes it."""

from collections.abc import Mapping

from storesvc_client.console.changes import change_of
from storesvc_client.console.page import Crumb, Page, crumbs_to_run
from storesvc_client.console.visit import Visit

_OWN: frozenset[str] = frozenset({"token", "json"})
"""Fields that no change has."""


def page(visit: Visit) -> Page:
    """Returns the question before a change; changes nothing."""
    action = visit.path["action"]
    change = change_of(action, visit.query)
    seen = change.look(visit.client)
    fields = {**visit.query, "etag": visit.query.get("etag") or seen.etag}
    at = f"@{change.step}"
    crumbs = () if change.step is None else (Crumb(name=at, address=change.address),)
    return Page(
        template="change.html",
        title=change.title,
        document={
            "command": change.command,
            "effect": f"{change.effect} {seen.remark}".strip(),
        },
        command=change.command,
        crumbs=(*crumbs_to_run(change.run), *crumbs),
        values={
            "action": action,
            "change": change,
            "remark": seen.remark,
            "fields": {k: v for k, v in fields.items() if k not in _OWN},
        },
    )


def made(visit: Visit, fields: Mapping[str, str]) -> str:
    """Makes the change, and returns the address of the page that shows it.

    Raises:
        StoreError: The store rejects the change.
    """
    change = change_of(visit.path["action"], fields)
    change.apply(visit.client)
    return change.address
