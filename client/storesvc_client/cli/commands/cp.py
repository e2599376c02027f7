"""``storectl cp``: copies checkpoints between stores."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from storesvc_client.cli.arguments import json_option, run_place
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.paths import CheckpointPath, RunPath
from storesvc_client.cli.places import Place
from storesvc_client.cli.transfers import show_transfers, step_list

if TYPE_CHECKING:
    from storesvc_client import Run
    from storesvc_client._values.values import Transfer


@click.command()
@click.argument(
    "source",
    type=run_place,
    metavar="SRC",
    shell_complete=complete_path(Part.RUN, Part.CHECKPOINT, contexts=True),
)
@click.argument(
    "target",
    type=run_place,
    metavar="DST",
    shell_complete=complete_path(Part.RUN, Part.RUN, contexts=True),
)
@click.option("--steps", type=step_list, metavar="STEPS", help="Copy these: 100,200.")
@click.option("--no-tags", is_flag=True, help="Set no tags.")
@click.option(
    "--move-tags", is_flag=True, help="Move tags that name other checkpoints in DST."
)
@click.option("--retention", is_flag=True, help="Set the retention policy of SRC.")
@click.option(
    "--create", is_flag=True, help="Create the store of DST if there is none."
)
@json_option
@pass_connection
def cp(
    connection: Connection,
    *,
    source: Place,
    target: Place,
    steps: Sequence[int] | None,
    no_tags: bool,
    move_tags: bool,
    retention: bool,
    create: bool,
    as_json: bool,
) -> None:
    """Copy a run or a checkpoint, also to another store.

    SRC and DST are paths in the store of the command, or in another one: CONTEXT:PATH,
    or STORE//PATH with a STORE as of --store. Steps, metrics, labels, items, pins and
    tags are kept. Checkpoints that were copied before are skipped, so a copy that was
    interrupted is repeated to finish it. Every chunk is compared with its checksums.

    \b
    Examples:
      storectl cp prod/llama-8b@best prod/llama-8b-tuned
      storectl cp prod:prod/llama-8b lab:prod/llama-8b
      storectl cp prod/llama-8b gs://bucket/archive//prod/llama-8b --create
    """
    if steps is not None and isinstance(source.path, CheckpointPath):
        raise click.UsageError("expected one of --steps and a checkpoint in SRC")
    if not isinstance(target.path, RunPath):
        raise click.UsageError(
            f"expected a run as DST, got {target.path}; a copy keeps its step"
        )
    if no_tags and move_tags:
        raise click.UsageError("expected one of --no-tags and --move-tags")
    with ExitStack() as clients:
        reached = [connection.to_part(place.store) for place in (source, target)]
        reading = clients.enter_context(reached[0].open())
        writing = reading
        if reached[0] != reached[1]:
            writing = clients.enter_context(reached[1].open(create=create))
        into = writing.run(target.path.run)
        transfers = _copied(
            reading.run(source.path.run),
            into,
            source,
            steps,
            tags=not no_tags,
            move_tags=move_tags,
            retention=retention,
        )
        show_transfers(transfers, into=into, as_json=as_json)


def _copied(
    run: "Run",
    other: "Run",
    source: Place,
    steps: Sequence[int] | None,
    *,
    tags: bool,
    move_tags: bool,
    retention: bool,
) -> "Iterator[Transfer]":
    """Copies as ``Run.copy_to``, and yields each checkpoint once it is committed."""
    from storesvc_client import progress_bar
    from storesvc_client._api.run import run_copy

    if isinstance(source.path, CheckpointPath):
        steps = [run.checkpoint(source.path.which).step]
    copy = run_copy(run, other, progress_bar())
    copied = []
    for done in copy.checkpoints(steps):
        yield done
        copied.append(done.checkpoint.step)
    if tags:
        copy.tags(copied, move=move_tags)
    if retention:
        copy.retention()
