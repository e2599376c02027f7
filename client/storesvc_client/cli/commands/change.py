"""Changes of checkpoints: ``storectl rm``, ``undelete``, ``update`` and ``tag``."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import click

from storesvc.format.names import check_tag
from storesvc_client._views.tables import TAGS
from storesvc_client._views.texts import json_value, pairs_text, time_text
from storesvc_client.cli.arguments import (
    convert,
    duration,
    etag,
    json_option,
    label,
    path_argument,
    run_or_checkpoint,
    step_path,
    whole_checkpoint,
)
from storesvc_client.cli.completion import Part, Which, complete_path, complete_tag
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal, json_line
from storesvc_client.cli.output import (
    Listing,
    print_fields,
    print_json,
    print_note,
    print_result,
)
from storesvc_client.cli.paths import CheckpointPath, RunPath

if TYPE_CHECKING:
    from storesvc_client import Checkpoint, DataLossError, Run


Change: TypeAlias = "Callable[[Run, int], tuple[str, object]]"
"""Changes a checkpoint; returns the output, as a line and as JSON."""


def change_each(
    connection: Connection,
    paths: Iterable[CheckpointPath],
    change: Change,
    *,
    as_json: bool,
) -> None:
    """Changes checkpoints, one after another, and prints each result."""
    from storesvc_client import StoreError, UnavailableError

    documents: list[object] = []
    refused: list[StoreError | Refusal] = []
    with connection.open() as client:
        for path in dict.fromkeys(paths):
            assert isinstance(path.which, int)  # click has checked it
            try:
                line, document = change(client.run(path.run), path.which)
            except (StoreError, Refusal) as e:
                refused.append(e)
                if isinstance(e, UnavailableError):  # the others would time out too
                    break
                continue
            documents.append(document)
            if not as_json:
                click.echo(line)
    if as_json and documents:
        print_json(documents)
    for refusal in refused[:-1]:
        if as_json:
            click.echo(json_line(refusal), err=True)
        else:
            print_note(str(refusal))
    if refused:
        raise refused[-1]


@click.command()
@path_argument("paths", step_path, nargs=-1)
@click.option(
    "--purge-delay",
    type=duration,
    metavar="TIME",
    help="How long it can be undeleted, such as 3d; by default, as set for the run.",
)
@click.option(
    "--purge",
    is_flag=True,
    help="Purge it: it cannot be undeleted, and its step is free.",
)
@click.option("--yes", is_flag=True, help="Do not ask before a purge.")
@json_option
@pass_connection
def rm(
    connection: Connection,
    *,
    paths: Sequence[CheckpointPath],
    purge_delay: timedelta | None,
    purge: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete checkpoints; undelete reverts it until they are purged.

    PATH names the step, because "latest" or a tag may move. A pinned or tagged
    checkpoint is not deleted. --purge ends a checkpoint permanently, unless a hold or a
    live upload needs it; in a terminal it asks before.

    \b
    Examples:
      storectl rm prod/llama-8b@500
      storectl rm prod/llama-8b@500 prod/llama-8b@600 --purge-delay 12h
      storectl rm prod/llama-8b@500 --purge

    Exit code 1: one of them could not be deleted; the others are.
    """
    if purge and purge_delay is not None:
        raise click.UsageError("expected one of --purge and --purge-delay")
    if yes and not purge:
        raise click.UsageError("--yes goes with --purge")
    if purge and not yes and sys.stdin.isatty():
        names = ", ".join(map(str, paths))
        click.confirm(f"Purge {names} permanently?", abort=True, err=True)

    def delete(run: "Run", step: int) -> tuple[str, dict[str, Any]]:
        deleted = run.delete(step, purge_delay=purge_delay)
        path = f"{deleted.run}@{deleted.step}"
        if purge:
            from storesvc_client import PreconditionError

            try:
                run.purge(deleted.step, uid=deleted.uid, etag=deleted.etag)
            except PreconditionError as e:
                until = "until then it stays deleted and can be undeleted"
                raise Refusal(f"{e}; {until}") from e
            line = f"{path} purged"
        else:
            assert deleted.purge_time is not None
            until = time_text(deleted.purge_time)
            line = f"{path} deleted; until {until}: storectl undelete {path}"
        return line, json_value(deleted) | {"purged": purge}

    change_each(connection, paths, delete, as_json=as_json)


@click.command()
@path_argument(
    "paths",
    step_path,
    nargs=-1,
    completion=complete_path(Part.CHECKPOINT, Part.CHECKPOINT, which=Which.DELETED),
)
@json_option
@pass_connection
def undelete(
    connection: Connection, *, paths: Sequence[CheckpointPath], as_json: bool
) -> None:
    """Revert the deletion of checkpoints that are not yet purged.

    \b
    Examples:
      storectl undelete prod/llama-8b@500
      storectl ls prod/llama-8b --deleted   lists what can be undeleted

    Exit code 1: one of them could not be undeleted; the others are.
    """

    from storesvc_client import NotFoundError

    def undelete_one(run: "Run", step: int) -> tuple[str, object]:
        with suppress(NotFoundError):  # as of a deleted one
            run.checkpoint(step)
            raise Refusal(f"{run.name}@{step} is not deleted")
        checkpoint = run.undelete(step)
        return f"{checkpoint.run}@{checkpoint.step} undeleted", checkpoint

    change_each(connection, paths, undelete_one, as_json=as_json)


T = TypeVar("T")

_ATTEMPTS: Final = 8
"""Maximum attempts of a change, while others change the same checkpoint."""


def metric(text: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    try:
        if key:
            return key, float(value)
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r}: expected KEY=NUMBER, such as loss=2.31")


@click.command()
@path_argument("path", whole_checkpoint)
@click.option(
    "--label",
    "labels",
    type=label,
    metavar="KEY=TEXT",
    multiple=True,
    help="Set a label; the others stay. Repeatable, like all options but --pin.",
)
@click.option(
    "--remove-label", "no_labels", metavar="KEY", multiple=True, help="Remove a label."
)
@click.option(
    "--metric",
    "metrics",
    type=metric,
    metavar="KEY=NUMBER",
    multiple=True,
    help="Set a metric; the others stay.",
)
@click.option(
    "--remove-metric",
    "no_metrics",
    metavar="KEY",
    multiple=True,
    help="Remove a metric.",
)
@click.option(
    "--pin/--unpin",
    "pinned",
    default=None,
    help="Protect it from deletion, also by retention policies, or stop that.",
)
@json_option
@pass_connection
def update(
    connection: Connection,
    *,
    path: CheckpointPath,
    labels: Sequence[tuple[str, str]],
    no_labels: Sequence[str],
    metrics: Sequence[tuple[str, float]],
    no_metrics: Sequence[str],
    pinned: bool | None,
    as_json: bool,
) -> None:
    """Set labels, metrics or the pin of a checkpoint.

    Its leaves never change.

    \b
    Examples:
      storectl update prod/llama-8b@500 --pin
      storectl update prod/llama-8b@best --label stage=final --metric loss=2.1
      storectl update prod/llama-8b@500 --unpin --remove-label stage
    """
    new_labels, new_metrics = dict(labels), dict(metrics)
    if both := new_labels.keys() & no_labels or new_metrics.keys() & no_metrics:
        raise click.UsageError(f"expected to set or to remove {min(both)}, not both")
    if not (labels or no_labels or metrics or no_metrics or pinned is not None):
        raise click.UsageError("expected something to set, such as --label or --pin")

    def change(run: "Run", known: "Checkpoint") -> "Checkpoint":
        return run.update(
            known.step,
            labels=_change_entries(known.labels, new_labels, no_labels),
            metrics=_change_entries(known.metrics, new_metrics, no_metrics),
            pinned=pinned,
            etag=known.etag,
        )

    with connection.open() as client:
        found = _update_with_retries(client.run(path.run), path, change)
    if as_json:
        print_json(found)
        return
    fields = {
        "pinned": "yes" if found.pinned else "no",
        "metrics": pairs_text(found.metrics),
        "labels": pairs_text(found.labels),
    }
    print_fields(f"{found.run}@{found.step}", fields.items())


def _update_with_retries(
    run: "Run", path: CheckpointPath, change: "Callable[[Run, Checkpoint], Checkpoint]"
) -> "Checkpoint":
    """Changes a checkpoint; retries if another client has changed it."""
    from storesvc_client import ConflictError

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return change(run, run.checkpoint(path.which))
        except ConflictError as e:
            if e.reason != "ETAG_MISMATCH" or attempt == _ATTEMPTS:
                raise
    raise AssertionError


def _change_entries(
    known: Mapping[str, T], given: Mapping[str, T], removed: Sequence[str]
) -> dict[str, T] | None:
    """Returns all entries after the change; None if none changes."""
    if not (given or removed):
        return None
    return {
        key: value for key, value in {**known, **given}.items() if key not in removed
    }


_TAGS: Final = Listing(TAGS)


def tag_name(text: str) -> str:
    convert(check_tag, text)
    return text


@click.command(context_settings={"allow_extra_args": True})
@path_argument("path", run_or_checkpoint)
@click.argument(
    "name", type=tag_name, metavar="[NAME]", required=False, shell_complete=complete_tag
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
    neither deleted nor purged. PROTECTED is about the tag itself: one that is protected
    moves only with its etag.

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
            document = {"run": run, "tag": name, "deleted": True}
            print_result(document, f"tag {name} of {run} deleted", as_json=as_json)
        case CheckpointPath(run, which), str() if not delete:
            with connection.open() as client, _etag_hint(run):
                found = client.run(run).tags.set(
                    name, which, protected=protected, etag=expected
                )
            suffix = ", protected" if found.protected else ""
            text = f"{run}@{found.name} is step {found.step}{suffix}"
            print_result(found, text, as_json=as_json)
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
