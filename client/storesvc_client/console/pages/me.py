"""``/me``: who the store takes the user for, and what the user may do."""

from storesvc_client.console.rendering import Page, command
from storesvc_client.console.visit import Visit


def page(visit: Visit) -> Page:
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
            "list_command": command("auth", "list", *([parent] if parent else [])),
        },
    )
