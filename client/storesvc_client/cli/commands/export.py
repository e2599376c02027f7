"""``storectl export``: writes a checkpoint in the format of another project."""

import re
from typing import TYPE_CHECKING, Final, Literal

import click

from storesvc_client._values.texts import count_text, size_text
from storesvc_client.cli.arguments import json_option, whole_checkpoint
from storesvc_client.cli.completion import Part, complete_path
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import json_value, print_json
from storesvc_client.cli.paths import CheckpointPath

if TYPE_CHECKING:
    from storesvc_client import ExportReport

_SIZE: Final = re.compile(r"([1-9][0-9]{0,17}) ?([KMGT]?)(i?)B?")
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _size(text: str) -> int:
    """Returns a size in bytes: "5GB" is 5 * 1000**3 bytes, "5GiB" 5 * 1024**3."""
    found = _SIZE.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise click.BadParameter(f"{text!r}: expected a size, such as 5GB or 512MiB")
    unit: int = (1024 if found[3] else 1000) ** _POWERS[found[2]]
    return int(found[1]) * unit


@click.command()
@click.argument(
    "path",
    type=whole_checkpoint,
    metavar="RUN@STEP",
    shell_complete=complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
)
@click.argument("target", metavar="FORMAT:PLACE")
@click.option(
    "--select",
    multiple=True,
    metavar="GLOB",
    help="Export leaves that match only; may be repeated.",
)
@click.option("--dtype", help="Cast floating-point arrays, such as to bf16.")
@click.option(
    "--rename",
    metavar="FILE.json",
    help="Rules that rename tensors, or the name of a table: llama_hf.",
)
@click.option(
    "--layout",
    type=click.Choice(["v0", "v1"]),
    help="Layout of Orbax: that of CheckpointManager, v0, is the default.",
)
@click.option(
    "--item", metavar="NAME", help='Item of Orbax: by default "default", in v1 "state".'
)
@click.option(
    "--max-shard",
    type=_size,
    metavar="SIZE",
    help="Maximum size of a safetensors file: 5GB by default.",
)
@click.option(
    "--drop-items", is_flag=True, help="Leave out items that the format cannot hold."
)
@json_option
@pass_connection
def export(
    connection: Connection,
    *,
    path: CheckpointPath,
    target: str,
    select: tuple[str, ...],
    dtype: str | None,
    rename: str | None,
    layout: Literal["v0", "v1"] | None,
    item: str | None,
    max_shard: int | None,
    drop_items: bool,
    as_json: bool,
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
            cast=dtype,
            rename=rename,
            layout=layout,
            item=item,
            max_shard_bytes=max_shard,
            drop_items=drop_items,
            progress=progress_bar(),
        )
    if as_json:
        print_json(json_value(report))
    else:
        click.echo(_text(report))


def _text(report: "ExportReport") -> str:
    parts = [
        f"{report.target}: {count_text(report.leaf_count, 'leaf')}",
        size_text(report.size_bytes),
    ]
    if report.renamed_count:
        parts.insert(1, f"{report.renamed_count} renamed")
    if report.linked_bytes:
        parts.append(f"{size_text(report.linked_bytes)} of data files linked")
    if report.copied_bytes:
        parts.append(f"{size_text(report.copied_bytes)} copied within the bucket")
    if report.dropped_items:
        parts.append(f"without the items {', '.join(report.dropped_items)}")
    return ", ".join(parts)
