"""``storectl diff`` compares two checkpoints; ``verify`` reads one for damage."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import click

from storesvc_client._views.tables import DIFFERENCES, ITEM_DIFFERENCES
from storesvc_client._views.texts import count_text, json_value, printable, size_text
from storesvc_client.cli.arguments import (
    expand_option,
    foreign_options,
    json_option,
    mapping_option,
    path_argument,
    readable_place,
    whole_checkpoint,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.output import print_json, print_values
from storesvc_client.cli.paths import (
    CheckpointPath,
    ForeignOptions,
    StorePart,
    is_foreign,
)

if TYPE_CHECKING:
    from storesvc_client import Client, Diff, Verification
    from storesvc_client._foreign.comparison import Comparison
    from storesvc_client._restore.open_tree import OpenTree


@click.command()
@path_argument("path", whole_checkpoint)
@json_option
@pass_connection
def verify(connection: Connection, *, path: CheckpointPath, as_json: bool) -> None:
    """Read every byte of a checkpoint, and report damage.

    The server reads, and sends only what it finds. Each damage is a line that names the
    leaf and the chunk.

    \b
    Examples:
      storectl verify prod/llama-8b@latest
      storectl verify prod/llama-8b@500 --json

    Exit code 1: something is damaged.
    """
    with connection.open() as client:
        found = _verify(client, path)
    name = f"{found.checkpoint.run}@{found.checkpoint.step}"
    if as_json:
        print_json(json_value(found) | {"ok": found.ok})
    elif found.ok:
        read = f"{count_text(found.chunk_count, 'chunk')}, "
        click.echo(f"{name}: {read}{size_text(found.stored_bytes)}, all as saved")
    else:
        for damage in found.damages:
            click.echo(printable(damage.message))
    if not found.ok:
        raise Refusal(
            f"{name} is damaged in {count_text(len(found.damages), 'place')}; use "
            "another checkpoint"
        )


def _verify(client: "Client", path: CheckpointPath) -> "Verification":
    """Verifies a checkpoint; shows the progress."""
    from storesvc_client.cli.output import progress

    run = client.run(path.run)
    checkpoint = run.checkpoint(path.which)
    done = 0
    with progress(str(path), total_bytes=checkpoint.stored_bytes) as advance:

        def show(found: "Verification") -> None:
            nonlocal done
            advance(found.stored_bytes - done)
            done = found.stored_bytes

        return run.verify(checkpoint.step, progress=show)


@click.command()
@path_argument("before", readable_place, metavar="BEFORE")
@path_argument("after", readable_place, metavar="AFTER")
@expand_option
@mapping_option
@foreign_options
@json_option
@pass_connection
def diff(
    connection: Connection,
    *,
    before: tuple[StorePart, CheckpointPath],
    after: tuple[StorePart, CheckpointPath],
    expand: bool,
    mapping: str | None,
    options: ForeignOptions,
    as_json: bool,
) -> None:
    """Compare two checkpoints, leaf by leaf and item by item.

    Each may be in another store: CONTEXT:PATH, or STORE//PATH. Reads no data: contents
    are compared by their digests. Of two stores, with a checkpoint of another project,
    which has none, and with --map, which makes another tree of BEFORE, all elements are
    read and compared. WHAT is "added",
    "removed", "shape", "dtype" or "content"; "unknown" if a leaf was saved in other
    chunks, whose digests cannot be compared; for an item also "kind", as from text to
    JSON. CHUNKS counts the chunks of the leaf; for content, the chunks that differ. A
    terminal shows leaves with numbered keys once if they differ alike, as storectl tree
    does.

    \b
    Examples:
      storectl diff prod/llama-8b@500 prod/llama-8b@latest
      storectl diff prod/llama-8b@500 prod/llama-8b-tuned@20 --json
      storectl diff orbax:gs://bucket/run@500 prod/llama-8b@500
      storectl diff prod/llama-8b@500 gs://bucket/archive//prod/llama-8b@500
      storectl diff safetensors:/models/llama@latest prod/llama-8b@0 --map hf.toml
    """
    paths = before[1], after[1]
    options.check(*paths)
    reached = [connection.to_part(store) for store, _ in (before, after)]
    is_apart = reached[0] != reached[1] or any(is_foreign(path.run) for path in paths)
    if is_apart or mapping is not None:
        found: Diff | Comparison = _compare_elements(reached, paths, options, mapping)
    else:
        base, path = paths
        with reached[0].open() as client:
            run, of = client.run(base.run), client.run(path.run)
            found = run.diff(base.which, path.which, of=of)
    if as_json:
        print_json(found)
        return
    if found.differences:
        print_values(DIFFERENCES.columns, found.differences, expand=expand)
    if found.items:
        print_values(ITEM_DIFFERENCES.columns, found.items)
    counts = _counts(leaf.kind for leaf in found.differences)
    same = f"{count_text(found.same_leaf_count, 'leaf')} the same"
    items = f"; items: {_counts(item.kind for item in found.items)}"
    click.echo(f"{counts or 'no leaf differs'}; {same}{items if found.items else ''}")


def _compare_elements(
    reached: Sequence[Connection],
    paths: Sequence[CheckpointPath],
    options: ForeignOptions,
    mapping: str | None,
) -> "Comparison":
    """Compares elements, as mapped leaves and other projects have no digests."""
    from storesvc_client._foreign.comparison import compare

    (to, other), (before, after) = reached, paths
    with (
        to.open_for(before, options.select_options(before)) as old,
        other.open_for(after, options.select_options(after)) as new,
    ):
        base: OpenTree = old.run(before.run).open(before.which)
        if mapping is not None:
            base = base.map(mapping)
        return compare(base, new.run(after.run).open(after.which))


def _counts(kinds: Iterable[str]) -> str:
    counted = sorted(Counter(kinds).items())
    return ", ".join(f"{count:,} {kind}" for kind, count in counted)
