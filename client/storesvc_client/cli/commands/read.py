"""``storectl get`` summarizes leaves or writes them; ``cat`` writes an item."""

import os
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from storesvc_client._views.tables import LEAVES, Column, Table
from storesvc_client._views.texts import (
    count_text,
    json_value,
    number_text,
    size_text,
)
from storesvc_client.cli.arguments import (
    foreign_options,
    json_option,
    path_argument,
    readable_item,
    readable_leaves,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.leaves import (
    FORMATS,
    ArrayFormat,
    Arrays,
    Selection,
    echo_data,
    encode_leaf,
    file_names,
    new_directory,
    replacing,
    select_leaves,
    summarize,
    write_leaves,
)
from storesvc_client.cli.output import print_json, print_result, print_table
from storesvc_client.cli.paths import ForeignOptions, LeafPath, Readable

if TYPE_CHECKING:
    from storesvc_client import LeafInfo
    from storesvc_client.cli.leaves import Array


@click.command()
@path_argument("path", readable_item)
@foreign_options
@pass_connection
def cat(connection: Connection, *, path: LeafPath, options: ForeignOptions) -> None:
    """Write an item of a checkpoint to stdout, byte for byte.

    PATH ends in the name of the item; of an item that each process of a job saved for
    itself, in NAME/PROCESS. JSON is written as it is stored, on one line. In a terminal
    a line feed is added, control characters are escaped, and bytes are rejected.

    \b
    Examples:
      storectl cat prod/llama-8b@latest:config | jq .layers
      storectl cat prod/llama-8b@latest:tokenizer >tokenizer.model
      storectl cat prod/llama-8b@500:data/3
    """
    name, slash, process = path.glob.partition("/")
    is_item = not slash or (process.isascii() and process.isdecimal())
    checkpoint = path.checkpoint
    with connection.open_for(path, options) as client:
        opened = client.run(checkpoint.run).open(checkpoint.which)
        items = opened.items
        if name not in items and path.glob in opened.leaves:
            raise Refusal(
                f"{path.glob!r} is a leaf of {opened.name}, no item; 'storectl get "
                f"{opened.name}:{path.glob}' reads it"
            )
        if not is_item:
            raise Refusal(
                f"{path.glob!r}: expected an item, NAME or NAME/PROCESS, such as data/3"
            )
        kind, count = items.info(name).kind, items.info(name).process_count
        if count is not None and not slash:
            raise Refusal(
                f"{path} has a value of each of {count_text(count, 'process')}; use "
                f"{path}/0 for that of process 0"
            )
        data = items.encoded(name, int(process) if slash else None)
    echo_data(str(path), kind, data)


_LEAF: Final = Table("leaf", LEAVES.columns[:3])
_COLUMNS: Final = (
    *_LEAF.columns,
    *(Column(title, right=True) for title in ("MIN", "MAX", "MEAN", "NAN")),
)


@click.command()
@path_argument("path", readable_leaves)
@click.option(
    "--output",
    "-o",
    metavar="FILE|DIR",
    help="Write the leaves to FILE.npy, FILE.npz or FILE.safetensors, or each to a "
    "file of its own in a new directory.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@foreign_options
@json_option
@pass_connection
def get(
    connection: Connection,
    *,
    path: LeafPath,
    output: str | None,
    force: bool,
    options: ForeignOptions,
    as_json: bool,
) -> None:
    """Summarize leaves, or write them to files.

    PATH ends in a key or a glob. Within a part of a key "*" matches any text, "?" one
    character, "[..]" one of several; "**" matches any number of parts. Without -o it
    prints minimum, maximum and mean of each leaf without NaN, and the count of NaN; of
    one leaf that is a text, a large integer or bytes, the value, as cat does.

    In a directory, arrays become KEY.npy, or KEY.safetensors if NumPy lacks their
    dtype, and others KEY.txt, KEY.json or KEY.bin.

    \b
    Examples:
      storectl get prod/llama-8b@latest:params/embed/embedding
      storectl get 'prod/llama-8b@latest:params/**/kernel' --json
      storectl get 'prod/llama-8b@500:params/**' -o params.safetensors
      storectl get 'prod/llama-8b@500:**' -o leaves/
    """
    if output is None:
        if force:
            raise click.UsageError("--force goes with --output")
        _print(connection, path, options=options, as_json=as_json)
        return
    file_format = _find_format(output, force=force)
    with connection.open_for(path, options) as client:
        selection = select_leaves(client, path)
        if file_format is None:
            names = file_names(selection.leaves)
            with (
                new_directory(Path(output)) as directory,
                _reading(client, selection) as arrays,
            ):
                write_leaves(directory, names, arrays)
        else:
            file_format.check(selection.leaves)
            with (
                replacing(Path(output), force=force) as file,
                _reading(client, selection) as arrays,
            ):
                file_format.write(file, selection.leaves, arrays)
    count, size_bytes = len(selection.leaves), selection.size_bytes
    document = {"file": output, "leaf_count": count, "size_bytes": size_bytes}
    text = f"{output}: {count_text(count, 'leaf')}, {size_text(size_bytes)}"
    print_result(document, text, as_json=as_json)


def _print(
    connection: Connection, path: LeafPath, *, options: ForeignOptions, as_json: bool
) -> None:
    with connection.open_for(path, options) as client:
        selection = select_leaves(client, path)
        if not as_json and selection.names_encoded(path.glob):
            with _reading(client, selection) as arrays:
                ((leaf, array),) = arrays
            echo_data(str(path), leaf.kind, encode_leaf(leaf, array))
            return
        with _reading(client, selection) as arrays:
            summaries = [(leaf, summarize(leaf, array)) for leaf, array in arrays]
    if as_json:
        print_json(
            [json_value(leaf) | json_value(summary) for leaf, summary in summaries]
        )
    else:
        rows = (
            [*_LEAF.row(leaf), *map(number_text, astuple(found))]
            for leaf, found in summaries
        )
        print_table(_COLUMNS, rows)


def _find_format(output: str, *, force: bool) -> ArrayFormat | None:
    """Returns the format of a file by its name; None: it names a directory."""
    if output in ("json", "yaml", "wide"):
        raise click.BadParameter(
            f"{output}: --json prints JSON; -o {output}/ writes to a directory",
            param_hint="'--output'",
        )
    suffix = Path(output).suffix
    if output.endswith(os.sep) or not suffix:
        if force:
            raise click.UsageError("--force goes with a file; a directory must be new")
        return None
    if suffix not in FORMATS:
        raise click.BadParameter(
            f"{output}: expected a name that ends in {', '.join(FORMATS)}, or in / for "
            "a directory",
            param_hint="'--output'",
        )
    return FORMATS[suffix]


@contextmanager
def _reading(client: Readable, selection: Selection) -> Iterator[Arrays]:
    """Yields the arrays of the leaves as they arrive; shows the progress."""
    from storesvc_client.cli.output import progress

    checkpoint = selection.checkpoint

    def arrays() -> "Generator[tuple[LeafInfo, Array]]":
        for leaf, array in read:
            yield leaf, array
            advance(leaf.size_bytes)

    opened = client.run(checkpoint.run).open(checkpoint.which)
    with (
        progress(str(checkpoint), total_bytes=selection.size_bytes) as advance,
        # closed here, with its hold, also if a file cannot be written
        closing(opened.read([leaf.key for leaf in selection.leaves])) as read,
        closing(arrays()) as found,
    ):
        yield found
