"""``storectl tag``: lists, sets and deletes tags."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import click

from storesvc.format.names import InvalidNameError, check_tag
from storesvc_client._views.tables import TAGS
from storesvc_client.cli.arguments import etag, json_option, run_or_checkpoint
from storesvc_client.cli.completion import Part, complete_path, complete_tag
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import Listing, print_json
from storesvc_client.cli.paths import CheckpointPath, RunPath

if TYPE_CHECKING:
    from storesvc_client import DataLossError


_TAGS: Final = Listing(TAGS)


def tag_name(text: str) -> str:
    """Returns the name of a tag."""
    try:
        check_tag(text)
    except InvalidNameError as e:
        raise click.BadParameter(str(e)) from e
    return text


@click.command(context_settings={"allow_extra_args": True})
@click.argument(
    "path",
    type=run_or_checkpoint,
    metavar="PATH",
    shell_complete=complete_path(Part.RUN, Part.CHECKPOINT),
)
@click.argument(
    "name",
    type=tag_name,
    metavar="[NAME]",
    required=False,
    shell_complete=complete_tag,
)
@click.option(
    "--protected/--unprotected",
    default=None,
    help="Whether later changes need the tag's etag; unchanged by default.",
)
@click.option("--delete", is_flag=True, help="Delete the tag NAME of a run.")
@click.option(
    "--etag",
    "expected",
    type=etag,
    metavar="ETAG",
    help="Reject the change if the tag has changed since --json showed ETAG.",
)
@json_option
@pass_connection
@click.pass_context
def tag(
    ctx: click.Context,
    connection: Connection,
    *,
    path: RunPath | CheckpointPath,
    name: str | None,
    protected: bool | None,
    delete: bool,
    expected: str | None,
    as_json: bool,
) -> None:
    """List tags, set one, or delete one.

    A path takes a tag in place of a step: prod/llama-8b@best. A tagged checkpoint is
    neither deleted nor purged.

    \b
    Examples:
      storectl tag prod/llama-8b                     the tags of a run
      storectl tag prod/llama-8b@500 best            from now on, best is step 500
      storectl tag prod/llama-8b@latest prod --protected
      storectl tag prod/llama-8b@600 prod --etag 5c0d..
      storectl tag prod/llama-8b best --delete
    """
    if ctx.args:
        raise click.UsageError(
            f"unexpected argument {ctx.args[0]!r}; the step is part of the path: "
            f"storectl tag {path}@{ctx.args[0]} {name}"
        )
    match path, name:
        case RunPath(run), None if not delete and protected is None and not expected:
            with connection.open() as client:
                damaged: list[DataLossError] = []
                tags = client.run(run).tags.list(on_damage=damaged.append)
                _TAGS.show(tags, as_json=as_json, damaged=damaged)
        case RunPath(run), str() if delete and protected is None:
            with connection.open() as client, _etag_hint(run):
                client.run(run).tags.delete(name, etag=expected)
            if as_json:
                print_json({"run": run, "tag": name, "deleted": True})
            else:
                click.echo(f"tag {name} of {run} deleted")
        case CheckpointPath(run, which), str() if not delete:
            with connection.open() as client, _etag_hint(run):
                found = client.run(run).tags.set(
                    name, which, protected=protected, etag=expected
                )
            if as_json:
                print_json(found)
            else:
                suffix = ", protected" if found.protected else ""
                click.echo(f"{run}@{found.name} is step {found.step}{suffix}")
        case _:
            raise click.UsageError("expected RUN, CHECKPOINT NAME or RUN NAME --delete")


@contextmanager
def _etag_hint(run: str) -> Iterator[None]:
    """Adds the command that shows the etag of a protected tag to the error."""
    from storesvc_client import PreconditionError

    try:
        yield
    except PreconditionError as e:
        if e.reason != "TAG_PROTECTED":
            raise
        raise Refusal(f"{e}: --etag, which 'storectl tag {run} --json' shows") from e
