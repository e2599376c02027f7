"""``/help``: the pages, and the commands that print the same."""

from dataclasses import dataclass
from typing import Final

from storesvc_client.console.rendering import Page
from storesvc_client.console.visit import Visit


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpRow:
    """A page."""

    address: str
    shows: str
    command: str


ROWS: Final = tuple(
    HelpRow(address=address, shows=shows, command=command)
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


def page(visit: Visit) -> Page:  # noqa: ARG001 - every page gets the visit
    """Returns the list of pages."""
    return Page(
        template="help.html",
        title="Help",
        document=ROWS,
        command="storectl --help",
        section="Help",
        values={"rows": ROWS},
    )
