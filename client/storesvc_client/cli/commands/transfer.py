"""Copies between stores and other projects: ``storectl cp``, ``export``, ``import``."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING, Any

import click

from storesvc.format.names import Which
from storesvc_client._views.texts import count_text, json_value, size_text
from storesvc_client.cli.arguments import (
    WholeNumber,
    copied_place,
    foreign_options,
    json_option,
    label,
    mapping_option,
    max_shard_option,
    path_argument,
    run_path,
    whole_checkpoint,
)
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import print_json, show_transfers, step_list
from storesvc_client.cli.paths import (
    CheckpointPath,
    ForeignOptions,
    LeafPath,
    NamespacePath,
    QualifiedPath,
    RunPath,
    parse_foreign_path,
)

if TYPE_CHECKING:
    from storesvc_client import Client, Run
    from storesvc_client._values.models import Transfer


@click.command()
@path_argument("source", copied_place, metavar="SRC")
@path_argument(
    "target",
    copied_place,
    metavar="DST",
    completion=complete_path(Part.NAMESPACE, Part.RUN, contexts=True),
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
    source: QualifiedPath,
    target: QualifiedPath,
    steps: Sequence[int] | None,
    no_tags: bool,
    move_tags: bool,
    retention: bool,
    create: bool,
    as_json: bool,
) -> None:
    """Copy a namespace, a run or a checkpoint, also to another store.

    SRC and DST are paths in the store of the command, or in another one: CONTEXT:PATH,
    or STORE//PATH with a STORE as of --store. Steps, metrics, labels, items, pins and
    tags are kept. Checkpoints that were copied before are skipped, so a copy that was
    interrupted is repeated to finish it, and a backup is the same command again. Every
    chunk is compared with its checksums.

    \b
    Examples:
      storectl cp prod/llama-8b@best prod/llama-8b-tuned
      storectl cp prod:prod/llama-8b lab:prod/llama-8b
      storectl cp prod/llama-8b gs://bucket/archive//prod/llama-8b --create
      storectl cp prod gs://backup/ckpts//prod --move-tags --retention --create
    """
    if steps is not None and not isinstance(source.path, RunPath):
        raise click.UsageError("expected --steps with a run as SRC only")
    if isinstance(target.path, CheckpointPath):
        raise click.UsageError(
            f"expected a run as DST, got {target.path}; a copy keeps its step"
        )
    is_whole = isinstance(source.path, NamespacePath)
    if is_whole != isinstance(target.path, NamespacePath):
        raise click.UsageError(
            f"expected a namespace for a namespace and a run for a run, got "
            f"{source.path} and {target.path}"
        )
    if no_tags and move_tags:
        raise click.UsageError("expected one of --no-tags and --move-tags")

    def copy(run: "Run", into: "Run") -> "Iterator[Transfer]":
        """Copies as ``Run.copy_to``, and yields each checkpoint once it is
        committed."""
        from storesvc_client import progress_bar
        from storesvc_client._api.run import run_copy

        wanted = steps
        if isinstance(source.path, CheckpointPath):
            wanted = [run.checkpoint(source.path.which).step]
        copying = run_copy(run, into, progress_bar())
        copied = []
        for done in copying.checkpoints(wanted):
            yield done
            copied.append(done.checkpoint.step)
        if not no_tags:
            copying.tags(copied, move=move_tags)
        if retention:
            copying.retention()

    with ExitStack() as clients:
        reached = [connection.to_part(place.store) for place in (source, target)]
        reading = clients.enter_context(reached[0].open())
        writing = reading
        if reached[0] != reached[1]:
            writing = clients.enter_context(reached[1].open(create=create))
        runs = [
            (reading.run(source_run), writing.run(target_run))
            for source_run, target_run in _list_pairs(reading, source, target)
        ]
        transfers = chain.from_iterable(copy(run, into) for run, into in runs)
        into = None if is_whole else runs[0][1]
        show_transfers(transfers, into=into, as_json=as_json)


def _list_pairs(
    reading: "Client", source: QualifiedPath, target: QualifiedPath
) -> list[tuple[str, str]]:
    """Returns the names of the runs to copy, and of those that they become."""
    match source.path, target.path:
        case NamespacePath(old), NamespacePath(new):
            names = [found.name for found in reading.runs(old)]
            return [(name, f"{new}/{name.partition('/')[2]}") for name in names]
        case (RunPath() | CheckpointPath()) as one, RunPath(run):
            return [(one.run, run)]
        case _:
            raise AssertionError(source, target)


@click.command()
@path_argument("path", whole_checkpoint, metavar="RUN@STEP")
@click.argument("target", metavar="FORMAT:PLACE")
@click.option(
    "--select",
    multiple=True,
    metavar="GLOB",
    help="Export leaves that match only; may be repeated.",
)
@click.option("--dtype", "cast", help="Cast floating-point arrays, such as to bf16.")
@mapping_option
@click.option(
    "--layout",
    type=click.Choice(["v0", "v1"]),
    help="Layout of Orbax: that of CheckpointManager, v0, is the default.",
)
@click.option(
    "--item", metavar="NAME", help='Item of Orbax: by default "default", in v1 "state".'
)
@max_shard_option
@click.option(
    "--config",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Copy config, tokenizer and settings of generation of DIR, instead of items.",
)
@click.option(
    "--drop-items", is_flag=True, help="Leave out items that the format cannot hold."
)
@json_option
@pass_connection
def export(
    connection: Connection,
    /,
    *,
    path: CheckpointPath,
    target: str,
    select: tuple[str, ...],
    max_shard: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Write a checkpoint in the format of another project.

    The formats: orbax:URL writes a step below a root of Orbax, safetensors:URL a folder
    for Hugging Face's libraries or FILE.safetensors, npz:FILE.npz one file of NumPy.
    What a format would lose is rejected. Nothing is replaced; after a failure the same
    command goes on.

    \b
    Examples:
      storectl export prod/llama-8b@best orbax:gs://bucket/ckpts
      storectl export prod/llama-8b@best safetensors:/models/llama --dtype bf16
      storectl export prod/llama-8b@500 npz:embed.npz --select 'params/embed/**'
    """
    from storesvc_client import progress_bar

    with connection.open() as client:
        report = client.run(path.run).export(
            path.which,
            target,
            select=select or None,
            max_shard_bytes=max_shard,
            progress=progress_bar(),
            **options,
        )
    if as_json:
        print_json(json_value(report))
        return
    parts = [
        f"{report.target}: {count_text(report.leaf_count, 'leaf')}",
        size_text(report.size_bytes),
    ]
    if report.linked_bytes:
        parts.append(f"{size_text(report.linked_bytes)} of data files linked")
    if report.copied_bytes:
        parts.append(f"{size_text(report.copied_bytes)} copied within the bucket")
    if report.dropped_items:
        parts.append(f"without the items {', '.join(report.dropped_items)}")
    click.echo(", ".join(parts))


def _source(text: str) -> RunPath | CheckpointPath:
    match parse_foreign_path(text):
        case RunPath() | CheckpointPath() as path:
            return path
        case LeafPath(checkpoint):
            raise click.BadParameter(
                f"{text!r}: expected whole checkpoints, such as {checkpoint}"
            )


@click.command("import")
@click.argument("source", type=_source, metavar="SRC")
@path_argument("path", run_path, metavar="RUN")
@click.option(
    "--steps", type=step_list, metavar="STEPS", help="Import these steps: 100,200."
)
@click.option("--latest", is_flag=True, help="Import the newest step only.")
@click.option(
    "--jobs",
    type=WholeNumber(min=1),
    metavar="N",
    help="Reads in flight, by default 16.",
)
@click.option(
    "--label",
    "labels",
    type=label,
    metavar="KEY=TEXT",
    multiple=True,
    help="Set a label of each checkpoint. Repeatable.",
)
@click.option(
    "--without",
    multiple=True,
    metavar="ITEM",
    help="Leave this item of Orbax out of each step, such as one that cannot be read. "
    "Repeatable.",
)
@mapping_option
@foreign_options
@click.option("--create", is_flag=True, help="Create the store if there is none.")
@json_option
@pass_connection
def import_(
    connection: Connection,
    *,
    source: RunPath | CheckpointPath,
    path: RunPath,
    steps: Sequence[int] | None,
    latest: bool,
    jobs: int | None,
    labels: Sequence[tuple[str, str]],
    without: Sequence[str],
    mapping: str | None,
    options: ForeignOptions,
    create: bool,
    as_json: bool,
) -> None:
    """Import checkpoints that other projects wrote.

    SRC is a format and a location: orbax:/ckpts/run, safetensors:gs://bucket/model;
    @STEP or @latest after it means that step alone. Steps that were imported before are
    skipped, so an import that was interrupted is repeated to finish it. Labels of a
    checkpoint record where it comes from.

    \b
    Examples:
      storectl import orbax:/ckpts/llama-8b prod/llama-8b
      storectl import orbax:gs://bucket/llama-8b prod/llama-8b --create
      storectl import safetensors:/models/llama prod/llama --label team=a
      storectl import safetensors:/models/llama prod/llama --map rules.toml
    """
    options.check(source)
    which: Which | None = "latest" if latest else None
    if isinstance(source, CheckpointPath):
        if steps is not None or latest:
            raise click.UsageError(
                "expected one of --steps, --latest and a step in SRC"
            )
        which = source.which
    if steps is not None and latest:
        raise click.UsageError("expected one of --steps and --latest")
    from storesvc_client import open_foreign, progress_bar
    from storesvc_client._api.run import run_import
    from storesvc_client._foreign.importing import wanted_steps

    foreign = open_foreign(
        source.run,
        trust_uncommitted=options.trust_uncommitted,
        without=without,
        keep_names=options.keep_names,
        mapping=mapping,
    )
    wanted = steps
    if isinstance(which, int):
        wanted = [which]
    elif which is not None:
        found = foreign.steps()
        wanted = [max(found)] if found else None
    if create:
        # rejects a wrong location before a store is created
        wanted_steps(foreign.name, foreign.steps(), wanted)
    with connection.open(create=create) as client:
        run = client.run(path.run)
        transfers = run_import(
            run,
            foreign,
            steps=wanted,
            labels=dict(labels),
            mapping=None,
            progress=progress_bar(),
            jobs=jobs,
        )
        show_transfers(transfers, into=run, as_json=as_json)
