"""Pages as values: what a page function returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from storesvc_client.console.addresses import run_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Crumb:
    """A link to a page above."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page for people, and its document for programs."""

    template: str
    """File below `templates/`."""
    title: str
    document: Any
    """Value of ``?json``; equals that of the command with ``--json`` where both
    exist."""
    command: str = ""
    """The storectl command that prints the same; "" if there is none."""
    section: str = "Runs"
    """Entry of the navigation that it belongs to."""
    crumbs: tuple[Crumb, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values for the template."""
    status: int = 200


RUNS = Crumb(name="Runs", address="/")


def crumbs_to_namespace(run: str) -> tuple[Crumb, ...]:
    """Returns the links above the page of a run."""
    namespace = run.partition("/")[0]
    return RUNS, Crumb(name=namespace, address=f"/?in={namespace}")


def crumbs_to_run(run: str) -> tuple[Crumb, ...]:
    """Returns the links above the page of a checkpoint."""
    name = run.partition("/")[2]
    return *crumbs_to_namespace(run), Crumb(name=name, address=run_url(run))
