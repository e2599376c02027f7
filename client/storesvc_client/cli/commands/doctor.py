"""``storectl doctor``: checks whether a place can hold a store."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from storesvc_client.cli.arguments import duration, json_option, size, store_target
from storesvc_client.cli.connection import (
    Connection,
    is_verbose,
    native_log_hidden,
    pass_connection,
)
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import print_json

if TYPE_CHECKING:
    from storesvc_client._doctor.findings import Diagnosis, Finding


@click.command()
@click.argument("target", type=store_target, metavar="[TARGET]", required=False)
@click.option(
    "--direct",
    metavar="ROOT",
    help="Root of the store of a server: compare saves through the server with direct "
    "ones.",
)
@click.option(
    "--tree",
    metavar="SIZE|RUN@STEP",
    help="Size of a checkpoint, such as 140GB, or a checkpoint: estimate the cost of a "
    "month.",
)
@click.option(
    "--every",
    type=duration,
    metavar="TIME",
    default="10m",
    show_default=True,
    help="Time between two saves, for the cost.",
)
@json_option
@pass_connection
def doctor(
    connection: Connection,
    *,
    target: str | None,
    direct: str | None,
    tree: str | None,
    every: timedelta,
    as_json: bool,
) -> None:
    """Check whether a place can hold a store.

    TARGET is a root, which need not hold a store yet, or a server; the one of --store
    by default. It takes up to ten minutes, writes up to 2 GiB, and deletes what it
    wrote. On a root, that is below probes/; on a server, in a run doctor/....

    The exit code is 0 if a store works there, 1 if it works with warnings, and 2 if no
    store should be kept there.

    \b
    Examples:
      storectl doctor /ckpts
      storectl doctor gs://bucket/prefix --tree 140GB --every 10m
      storectl doctor ckpt.example:7070 --ca ca.pem --direct gs://bucket/prefix
    """
    from storesvc_client._doctor.doctor import doctor as examine

    if target is not None:
        connection = connection.to_store(target)
    with _errors_reported(), native_log_hidden(shown=is_verbose()):
        resolved = connection.resolve()
        found = examine(
            resolved.target,
            **resolved.server_files(),
            insecure=resolved.insecure,
            token=resolved.token(),
            direct=direct,
            tree=size(tree) if tree is not None and "@" not in tree else tree,
            interval=every,
            on_finding=(lambda _: None) if as_json else _show,
        )
    if as_json:
        print_json(found.document())
    else:
        _show_end(found)
    click.get_current_context().exit(found.exit_code)


class _NotExamined(Refusal):
    """An error before the first check; the exit code 1 would say that a store works."""

    exit_code = 2


@contextmanager
def _errors_reported() -> Generator[None]:
    from storesvc_client import StoreError

    try:
        yield
    except (Refusal, StoreError) as e:
        raise _NotExamined(str(e)) from e


def _show(finding: "Finding") -> None:
    click.echo(f"{finding.severity.value:<8}{finding.check:<15} {finding.found}")
    if finding.meaning:
        click.echo(f"{'':<24}means: {finding.meaning}")
        click.echo(f"{'':<24}do:    {finding.action}")


def _show_end(found: "Diagnosis") -> None:
    click.echo()
    click.echo(f"{found.place}: {found.verdict}")
