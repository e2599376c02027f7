"""Contents of a store: ``storectl du`` shows the bytes of runs and checkpoints, ``gc``
collects garbage, ``upgrade`` raises the format of the store, ``retain`` shows or sets
which checkpoints of a run stay, and ``uploads`` lists those that are being written."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, assert_never

import click

from storesvc_client._views.tables import (
    DECISIONS,
    STEP,
    UPLOADS,
    UPLOADS_BY_RUN,
    Column,
    Shrink,
    Table,
    count_column,
    field_column,
    size_column,
)
from storesvc_client._views.texts import (
    json_value,
    plural,
    purge_text,
    size_text,
    time_text,
)
from storesvc_client.cli.arguments import (
    convert,
    duration,
    json_option,
    parent_path,
    path_argument,
    run_path,
    whole_path,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal, check_namespace
from storesvc_client.cli.output import (
    Listing,
    print_fields,
    print_json,
    print_note,
    print_result,
    print_values,
)
from storesvc_client.cli.parent_details import usage_fields
from storesvc_client.cli.paths import CheckpointPath, NamespacePath, RunPath

if TYPE_CHECKING:
    from storesvc_client import (
        Checkpoint,
        Client,
        DataLossError,
        RetentionDecision,
        RetentionPolicy,
        Run,
    )


_COUNTS: Final = {
    "ABORTED": "aborted_upload_count",
    "DELETED": "deleted_checkpoint_count",
    "PURGED": "purged_checkpoint_count",
    "GARBAGE": "garbage_object_count",
    "REMOVED": "deleted_object_count",
}
"""Columns of a collection, each with its field of ``Collected``."""

_PASSES: Final = Listing(
    Table(
        "run",
        (
            field_column("RUN", "run"),
            *(count_column(title, name) for title, name in _COUNTS.items()),
            field_column("LEFT", "postponed", shrink=Shrink.END),
        ),
    )
)


@click.command()
@click.option(
    "--to",
    type=click.IntRange(1, 2**31 - 1),
    metavar="VERSION",
    help="The version.  [default: the newest that the server writes]",
)
@click.option("--dry-run", is_flag=True, help="Change nothing; show what would be.")
@json_option
@pass_connection
def upgrade(
    connection: Connection, *, to: int | None, dry_run: bool, as_json: bool
) -> None:
    """Raise the format of the store.

    Upgrade all servers and embedded clients first: releases that do not know the
    version reject the store from then on, and the way back is a backup.

    \b
    Examples:
      storectl upgrade --dry-run
      storectl upgrade
    """
    with connection.open() as client:
        before, after = client.upgrade(to, dry_run=dry_run)
    if as_json:
        print_json({"previous_version": before, "format_version": after})
    else:
        was = "would be" if dry_run else "was"
        done = f"the format {was} raised from {before} to {after}"
        click.echo(done if after > before else f"format {after}; nothing to raise")


@click.command()
@path_argument("path", parent_path, required=False)
@click.option(
    "--dry-run", is_flag=True, help="Change nothing; show what a collection would do."
)
@click.option(
    "--grace",
    type=duration,
    metavar="TIME",
    help="How long an object must have been garbage, such as 10m.  [default: 1h]",
)
@json_option
@pass_connection
def gc(
    connection: Connection,
    *,
    path: NamespacePath | RunPath | None,
    dry_run: bool,
    grace: timedelta | None,
    as_json: bool,
) -> None:
    """Collect garbage.

    Servers do the same at an interval. A collection aborts uploads whose lease has
    expired, applies retention policies, purges deleted checkpoints that are due, and
    deletes objects that nothing needs. Objects that a checkpoint, a hold or a live
    upload needs stay, also during saves and restores. Without a server, gc aborts only
    uploads that were idle for two days. With a short --grace, readers without a hold
    may lose what they read.

    \b
    ABORTED   uploads whose lease had expired
    DELETED   checkpoints that the retention policy does not keep
    PURGED    deleted checkpoints whose purge time had passed
    GARBAGE   objects that nothing refers to
    REMOVED   the objects of these that were deleted
    LEFT      why something is left for the next collection

    \b
    Examples:
      storectl gc --dry-run              all runs, changes nothing
      storectl gc prod/llama-8b
      storectl gc prod --grace 10m --json
    """
    parent = None if path is None else str(path)
    with connection.open() as client:
        passes = list(client.collect(parent, grace=grace, dry_run=dry_run))
        if isinstance(path, NamespacePath) and not passes:
            check_namespace(client, path.namespace)
    _PASSES.show(passes, as_json=as_json)


_RUNS: Final = Listing(
    Table(
        "run",
        (
            field_column("RUN", "run"),
            count_column("CHECKPOINTS", "checkpoint_count"),
            count_column("UPLOADS", "upload_count"),
            size_column("LOGICAL", "logical_bytes"),
            size_column("STORED", "stored_bytes"),
            size_column("DISTINCT", "distinct_bytes"),
        ),
    )
)


def _shared_bytes(checkpoint: "Checkpoint") -> int:
    return checkpoint.stored_bytes - checkpoint.own_bytes


_CHECKPOINTS: Final = (
    *(STEP, size_column("LOGICAL", "size_bytes")),
    *(size_column("STORED", "stored_bytes"), size_column("OWN", "own_bytes")),
    Column("SHARED", lambda one: size_text(_shared_bytes(one)), right=True),
)


@click.command()
@path_argument("path", whole_path, required=False)
@json_option
@pass_connection
def du(
    connection: Connection,
    *,
    path: NamespacePath | RunPath | CheckpointPath | None,
    as_json: bool,
) -> None:
    """Show how many bytes runs and checkpoints take.

    \b
    UPLOADS   checkpoints that are being written; their bytes are not counted
    LOGICAL   bytes of all leaves
    STORED    bytes of the chunks that hold them
    OWN       bytes of the chunks that came with this checkpoint
    SHARED    bytes of the chunks that it shares with an earlier one
    DISTINCT  bytes of all chunks of a run, shared ones counted once

    \b
    Examples:
      storectl du                       all runs
      storectl du prod                  the runs of a namespace
      storectl du prod/llama-8b         a run, and each of its checkpoints
      storectl du prod/llama-8b@latest --json
    """
    with connection.open() as client:
        match path:
            case None:
                _print_runs(client, None, as_json=as_json)
            case NamespacePath(namespace):
                _print_runs(client, namespace, as_json=as_json)
            case RunPath(run):
                _print_run(client, run, as_json=as_json)
            case CheckpointPath(run, which):
                found = client.run(run).checkpoint(which)
                if as_json:
                    print_json(_checkpoint_value(found))
                else:
                    print_values(_CHECKPOINTS, [found])


def _print_runs(client: "Client", namespace: str | None, *, as_json: bool) -> None:
    from storesvc_client._documents import list_usages

    damaged: list[DataLossError] = []
    usages = list_usages(client, namespace, damaged.append)
    if namespace and not usages and not damaged:
        check_namespace(client, namespace)
    _RUNS.show(usages, as_json=as_json, damaged=damaged)


def _print_run(client: "Client", name: str, *, as_json: bool) -> None:
    run = client.run(name)
    usage = run.usage()
    # the store rejects a list of a run that has no checkpoint yet
    checkpoints = list(run.checkpoints()) if usage.checkpoint_count else []
    if as_json:
        values = list(map(_checkpoint_value, checkpoints))
        print_json(json_value(usage) | {"checkpoints": values})
        return
    print_fields(usage.run, usage_fields(json_value(usage)).items())
    if checkpoints:
        click.echo()
        print_values(_CHECKPOINTS, checkpoints)


def _checkpoint_value(checkpoint: "Checkpoint") -> dict[str, Any]:
    return {
        "run": checkpoint.run,
        "step": checkpoint.step,
        "uid": checkpoint.uid,
        "logical_bytes": checkpoint.size_bytes,
        "stored_bytes": checkpoint.stored_bytes,
        "own_bytes": checkpoint.own_bytes,
        "shared_bytes": _shared_bytes(checkpoint),
    }


def policy(text: str) -> "RetentionPolicy":
    from storesvc_client import parse_policy

    return convert(parse_policy, text)


@click.command()
@path_argument("path", run_path, metavar="RUN")
@click.argument("wanted", type=policy, metavar="[POLICY]", required=False)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Change nothing; show what POLICY, or the run's, would delete.",
)
@click.option(
    "--apply", "now", is_flag=True, help="Delete now what the policy does not keep."
)
@click.option("--clear", is_flag=True, help="Remove the policy: all checkpoints stay.")
@click.option(
    "--purge-delay",
    type=duration,
    metavar="TIME",
    help="How long a deleted checkpoint can be undeleted, such as 3d.",
)
@json_option
@pass_connection
def retain(
    connection: Connection,
    *,
    path: RunPath,
    wanted: "RetentionPolicy | None",
    dry_run: bool,
    now: bool,
    clear: bool,
    purge_delay: timedelta | None,
    as_json: bool,
) -> None:
    """Show or set which checkpoints of a run stay.

    POLICY alone becomes the policy of the run: servers delete the checkpoints that it
    does not keep, now, after each commit and at each collection. The newest, pinned and
    tagged checkpoints always stay.

    \b
    A policy combines rules with | (either), & (both), ~ (not) and parentheses:
      latest(3)                 the three highest steps
      every(1000 steps)         multiples of 1000
      every(1 day)              the first checkpoint of each day
      newer-than(12h)           checkpoints committed within 12 hours
      best(2, loss, min)        the two with the lowest loss; max: the highest
      best(2, loss, min, or-without)   also checkpoints without a loss
      best(2, loss, min, force)        even if no checkpoint has a loss
      steps(0, 500)             these steps
      tagged, pinned            tagged or pinned checkpoints
    ~ applies only to rules that judge one checkpoint at a time.

    \b
    Examples:
      storectl retain prod/llama-8b
      storectl retain prod/llama-8b 'latest(3) | every(1 day)' --dry-run
      storectl retain prod/llama-8b 'latest(3) | every(1 day)' --purge-delay 3d
      storectl retain prod/llama-8b --apply
      storectl retain prod/llama-8b --clear
    """
    from storesvc_client import format_policy

    if dry_run + now + clear > 1 or (clear and wanted is not None):
        raise click.UsageError("expected one of POLICY, --dry-run, --apply and --clear")
    if dry_run and purge_delay is not None:
        raise click.UsageError(
            "expected --dry-run without --purge-delay: it changes nothing"
        )
    with connection.open() as client:
        run = client.run(path.run)
        if dry_run:
            decisions = run.retention.preview(wanted)
            _print_decisions(decisions, "would delete", as_json=as_json)
            if not as_json:
                _print_cost(run, decisions)
            return
        if wanted is not None or clear:
            run.retention.set(wanted, purge_delay=purge_delay)
        elif purge_delay is not None:
            run.configure(purge_delay=purge_delay)
        if now:
            decisions = run.retention.apply()
            _print_decisions(decisions, "deleted", as_json=as_json)
            ends = _last_purge(run, decisions)
            if ends and not as_json:
                print_note(
                    f"deleted checkpoints are purged after {time_text(ends)}, and the "
                    f"next collection frees their space; {_FREE_NOW}"
                )
            return
        info, kept = run.info(), run.retention.get()
        if as_json:
            text = format_policy(kept) if kept else None
            print_json(json_value(info) | {"retention": text})
        elif kept is None:
            print_note(f"{run.name} has no retention policy: all its checkpoints stay")
        else:
            click.echo(format_policy(kept))
            _print_cost(run, run.retention.preview())


def _print_cost(run: "Run", decisions: Sequence["RetentionDecision"]) -> None:
    """Prints the bytes that deleted checkpoints keep, with those that a policy will
    delete, and how to free them."""
    damaged: list[Exception] = []  # named by ls
    held = run.checkpoints(deleted=True, on_damage=damaged.append)
    freed = sum(c.own_bytes for c in held if c.delete_time)
    freed += sum(decision.own_bytes for decision in decisions if not decision.kept)
    print_note(
        f"{purge_text(freed, run.info().purge_delay, '--purge-delay')}; the next "
        f"collection after that frees them; {_FREE_NOW}"
    )


def _last_purge(
    run: "Run", decisions: Sequence["RetentionDecision"]
) -> datetime | None:
    """Returns the latest purge time of the deleted checkpoints, if any."""
    if all(decision.kept for decision in decisions):
        return None
    damaged: list[Exception] = []  # named by ls
    ends = (
        c.purge_time for c in run.checkpoints(deleted=True, on_damage=damaged.append)
    )
    return max(filter(None, ends), default=None)


_FREE_NOW: Final = (
    "to free it at once: 'storectl rm RUN@STEP --purge', then 'storectl gc --grace 0s'"
)


def _print_decisions(
    decisions: Sequence["RetentionDecision"], done: str, *, as_json: bool
) -> None:
    if as_json:
        print_json(decisions)
        return
    if decisions:
        print_values(DECISIONS.columns, decisions)
    deleted = [decision for decision in decisions if not decision.kept]
    own = size_text(sum(decision.own_bytes for decision in deleted))
    print_note(
        f"{done} {len(deleted):,} of {len(decisions):,} {plural('checkpoint')}, up to "
        f"{own}"
    )


_UPLOADS: Final = Listing(UPLOADS)
_UPLOADS_BY_RUN: Final = Listing(UPLOADS_BY_RUN)


@click.command()
@path_argument("path", parent_path, required=False)
@click.option(
    "--abort",
    metavar="UPLOAD",
    help="Abort an upload: its writers can no longer commit.",
)
@json_option
@pass_connection
def uploads(
    connection: Connection,
    *,
    path: NamespacePath | RunPath | None,
    abort: str | None,
    as_json: bool,
) -> None:
    """List checkpoints that are being written, or abort one.

    Without PATH: the uploads of all runs, including runs without a checkpoint. WRITERS
    counts the writers that have finished, WAITS FOR numbers the first of the others, by
    their process in the job; OWNER began the upload. A server aborts an upload whose
    lease has expired.

    \b
    Examples:
      storectl uploads
      storectl uploads prod
      storectl uploads prod/llama-8b
      storectl uploads prod/llama-8b --abort 0d2f6c1e9a5b4c3d8e7f60718293a4b5
    """
    if abort is not None and not isinstance(path, RunPath):
        raise click.UsageError("--abort needs the run of the upload")
    with connection.open() as client:
        if abort is not None and isinstance(path, RunPath):
            _abort_upload(client.run(path.run), abort, as_json=as_json)
            return
        damaged: list[DataLossError] = []
        parent = None if path is None else str(path)
        found = list(client.uploads(parent, on_damage=damaged.append))
        listing = _UPLOADS_BY_RUN
        if isinstance(path, RunPath):
            listing = _UPLOADS
            if not found and not damaged:
                client.run(path.run).info()  # raises if there is no such run
        listing.show(found, as_json=as_json, damaged=damaged)


def _abort_upload(run: "Run", upload: str, *, as_json: bool) -> None:
    found = run.uploads.get(upload)
    match found.state:
        case "live":
            run.uploads.abort(upload)
        case "ended":
            raise Refusal(f"{run.name} upload {upload}: it has already ended")
        case "committed":
            path = f"{run.name}@{found.step}"
            raise Refusal(
                f"{run.name} upload {upload}: it is committed; 'storectl rm {path}' "
                "deletes the checkpoint"
            )
        case "unknown":
            raise Refusal(
                f"{run.name} upload {upload}: expected a live upload, got one in a "
                "state that this release does not know; use a newer storectl"
            )
        case state:
            assert_never(state)
    text = f"upload {upload} of {run.name}@{found.step} aborted"
    print_result(run.uploads.get(upload), text, as_json=as_json)
