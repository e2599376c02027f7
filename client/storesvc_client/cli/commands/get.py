"""``storectl get``: summarizes leaves, or writes them to a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._values.texts import (
    ABSENT,
    count_text,
    dtype_text,
    key_text,
    number_text,
    shape_text,
    size_text,
)
from storesvc_client.cli.arguments import json_option, leaf_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.leaf_selection import Selection, select_leaves
from storesvc_client.cli.output import Column, json_value, print_json, print_table
from storesvc_client.cli.paths import LeafPath

if TYPE_CHECKING:
    from storesvc_client import Client, LeafInfo
    from storesvc_client.cli.array_files import Arrays
    from storesvc_client.cli.leaf_summary import Summary

_COLUMNS: Final = (
    Column("KEY", folds=True),
    Column("DTYPE"),
    Column("SHAPE"),
    Column("MIN", right=True),
    Column("MAX", right=True),
    Column("MEAN", right=True),
    Column("NAN", right=True),
)


@click.command()
@click.argument("path", type=leaf_path, metavar="PATH")
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the leaves to FILE.npy, FILE.npz or FILE.safetensors.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
@pass_connection
def get(
    connection: Connection,
    *,
    path: LeafPath,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Summarize leaves, or write them to a file.

    PATH ends in a key or a glob. Within a part of a key "*" matches any text, "?" one
    character, "[..]" one of several; "**" matches any number of parts. Without -o it
    prints minimum, maximum and mean of each leaf without NaN, and the count of NaN.

    \b
    Examples:
      storectl get prod/llama-8b@latest:params/embed/embedding
      storectl get 'prod/llama-8b@latest:params/**/kernel' --json
      storectl get 'prod/llama-8b@500:params/**' -o params.safetensors
    """
    if output is None:
        if force:
            raise click.UsageError("--force goes with --output")
        _print_summaries(connection, path, as_json=as_json)
    else:
        _write(connection, path, output=output, force=force, as_json=as_json)


def _print_summaries(connection: Connection, path: LeafPath, *, as_json: bool) -> None:
    from storesvc_client.cli.leaf_summary import summarize

    with connection.open() as client:
        selection = select_leaves(client, path)
        with _reading(client, selection) as arrays:
            summaries = [(leaf, summarize(leaf, array)) for leaf, array in arrays]
    if as_json:
        print_json(
            [json_value(leaf) | json_value(summary) for leaf, summary in summaries]
        )
    else:
        print_table(_COLUMNS, (_row(leaf, summary) for leaf, summary in summaries))


def _write(
    connection: Connection,
    path: LeafPath,
    *,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    from storesvc_client.cli.array_files import FORMATS, replacing

    if (file_format := FORMATS.get(output.suffix)) is None:
        raise click.BadParameter(
            f"{output}: expected a name that ends in {', '.join(FORMATS)}",
            param_hint="'--output'",
        )
    with connection.open() as client:
        selection = select_leaves(client, path)
        file_format.check(selection.leaves)
        with (
            replacing(output, force=force) as file,
            _reading(client, selection) as arrays,
        ):
            file_format.write(file, selection.leaves, arrays)
    count, size_bytes = len(selection.leaves), selection.size_bytes
    if as_json:
        print_json({"file": str(output), "leaf_count": count, "size_bytes": size_bytes})
    else:
        click.echo(f"{output}: {count_text(count, 'leaf')}, {size_text(size_bytes)}")


@contextmanager
def _reading(client: "Client", selection: Selection) -> "Iterator[Arrays]":
    """Yields the arrays of the leaves as they arrive; shows the progress."""
    from storesvc_client.cli.progress import progress

    checkpoint = selection.checkpoint

    def arrays() -> "Arrays":
        run = client.run(checkpoint.run)
        keys = [leaf.key for leaf in selection.leaves]
        for leaf, array in run.open(checkpoint.which).read(keys):
            yield leaf, array
            advance(leaf.size_bytes)

    with progress(str(checkpoint), total_bytes=selection.size_bytes) as advance:
        yield arrays()


def _row(leaf: "LeafInfo", summary: "Summary") -> tuple[str, ...]:
    return (
        key_text(leaf),
        dtype_text(leaf),
        shape_text(leaf),
        number_text(summary.min),
        number_text(summary.max),
        number_text(summary.mean),
        ABSENT if summary.nan_count is None else str(summary.nan_count),
    )
