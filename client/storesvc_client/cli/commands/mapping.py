"""``storectl map``: checks rules of a mapping against a checkpoint, shows the tree that
they make, and proposes rules."""

from collections.abc import Callable
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from storesvc_client._views.tables import Column, Shrink, Table, field_column
from storesvc_client._views.texts import ABSENT, count_text, sizes_text
from storesvc_client.cli.arguments import (
    foreign_options,
    json_option,
    path_argument,
    readable_place,
    run_or_checkpoint,
)
from storesvc_client.cli.connection import Connection, pass_connection
from storesvc_client.cli.output import Listing, print_json, print_result
from storesvc_client.cli.paths import CheckpointPath, ForeignOptions, RunPath, StorePart

if TYPE_CHECKING:
    from storesvc_client._mapping.planning import MappedLeaf
    from storesvc_client._restore.mapped import MappedReader

_FILE: Final = click.Path(dir_okay=False, path_type=Path)
"""A file, or the name of a table."""


@click.group("map")
def map_() -> None:
    """Check, show, invert or propose the rules of mappings; keep some.

    Rules are a TOML or JSON file, or a table that comes with storesvc. With them a
    checkpoint is restored as another tree: other names, layers stacked or apart,
    projections joined or divided.

    \b
    Examples:
      storectl map check hf.toml prod/llama-8b@latest
      storectl map show hf.toml prod/llama-8b@500
      storectl map invert hf.toml prod/llama-8b@500 > back.json
      storectl map learn safetensors:/models/llama@latest prod/llama-8b@500 > hf.toml
      storectl map migrate prod/llama-8b@500 renamed.toml
    """


def _add_reader(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the rules and the checkpoint to a command, which gets the reader of the tree
    that they make; no leaf is read."""

    @click.argument("rules", type=_FILE, metavar="RULES")
    @path_argument("place", readable_place, metavar="RUN@STEP")
    @foreign_options
    @pass_connection  # type: ignore[arg-type] # wraps hides its parameters
    @wraps(command)
    def run(
        connection: Connection,
        *,
        rules: Path,
        place: tuple[StorePart, CheckpointPath],
        options: ForeignOptions,
        **more: bool,
    ) -> None:
        from storesvc_client._restore.mapped import MappedReader
        from storesvc_client._restore.open_tree import get_reader

        part, path = place
        options.check(path)
        with connection.to_part(part).open_for(path, options) as source:
            opened = source.run(path.run).open(path.which)
            reader = MappedReader(get_reader(opened), rules)
        command(reader, **more)

    return run


def _document(reader: "MappedReader", mapped: "MappedLeaf") -> dict[str, Any]:
    from storesvc_client._mapping.rules import COMPUTING

    stored = reader.inner.tree.leaves
    rows = dict.fromkeys(each.row for each in mapped.expression.sources())
    operations = () if mapped.rule is None else mapped.rule.operations
    return {
        "key": mapped.leaf.key,
        "shape": list(mapped.leaf.shape),
        "dtype": mapped.leaf.dtype,
        "from": [stored[row].key for row in rows],
        "rule": None if mapped.rule is None else mapped.rule.place,
        "operations": [str(each) for each in operations],
        "is_computed": any(each.name in COMPUTING for each in operations),
    }


def _sources_text(leaf: dict[str, Any]) -> str:
    first, *others = leaf["from"] or [ABSENT]
    return f"{first} and {len(others):,} more" if others else first


def _operations_text(leaf: dict[str, Any]) -> str:
    how = "computed: " if leaf["is_computed"] else ""
    return how + ("; ".join(leaf["operations"]) or ABSENT)


LISTING: Final = Listing(
    Table(
        "leaf",
        (
            Column("KEY", itemgetter("key"), shrink=Shrink.PREFIX),
            Column("ARRAY", lambda leaf: leaf["dtype"] + sizes_text(leaf["shape"])),
            Column("FROM", _sources_text, shrink=Shrink.END),
            Column("OPERATIONS", _operations_text, shrink=Shrink.END),
        ),
    )
)


@map_.command("check")
@_add_reader
@json_option
def check_rules(reader: "MappedReader", *, as_json: bool) -> None:
    """Check that rules fit a checkpoint; no leaf of it is read.

    Every leaf must be used or left out by a rule, every leaf of the new tree made once,
    and shapes and dtypes must fit. The error names all that does not.

    \b
    Examples:
      storectl map check hf.toml prod/llama-8b@latest
      storectl map check hf.toml safetensors:/models/llama@latest

    Exit code 1: the rules do not fit.
    """
    mapped, source = reader.mapped, reader.inner
    made, dropped = len(mapped.leaves), len(mapped.dropped)
    document = {
        "name": source.name,
        "source_leaf_count": source.tree.tree_count,
        "leaf_count": made,
        "dropped": list(mapped.dropped),
        "size_bytes": mapped.tree.size_bytes,
    }
    before = count_text(source.tree.tree_count, "leaf")
    text = f"{source.name}: {count_text(made, 'leaf')} of {before}, {dropped:,} dropped"
    print_result(document, text, as_json=as_json)


@map_.command("learn")
@path_argument("source", readable_place, metavar="A")
@path_argument("target", readable_place, metavar="B")
@click.option(
    "--values", is_flag=True, help="Read parts of the leaves, and compare them."
)
@foreign_options
@pass_connection
def learn_rules(
    connection: Connection,
    *,
    source: tuple[StorePart, CheckpointPath],
    target: tuple[StorePart, CheckpointPath],
    values: bool,
    options: ForeignOptions,
) -> None:
    """Propose rules that make the tree of B of that of A, as TOML.

    Keys and shapes decide: other names, transposed, divided, joined, stacked. They say
    nothing of square matrices and of the order of joined parts, and comments say where;
    with --values equal elements decide, also between names. What has no match is left
    to you: storectl map check rejects the rules until it is decided.

    \b
    Examples:
      storectl map learn safetensors:/models/llama@latest prod/llama-8b@500 > hf.toml
      storectl map learn prod/llama-8b@500 prod/scanned@10 --values > scan.toml
    """
    from storesvc_client._mapping.learning import learn_rules as learn
    from storesvc_client._restore.mapped import sample_leaves
    from storesvc_client._restore.open_tree import get_reader

    (store, before), (other, after) = source, target
    options.check(before, after)
    with (
        connection.to_part(store).open_for(
            before, options.select_options(before)
        ) as old,
        connection.to_part(other).open_for(after, options.select_options(after)) as new,
    ):
        one = get_reader(old.run(before.run).open(before.which))
        two = get_reader(new.run(after.run).open(after.which))
        read = partial(sample_leaves, one), partial(sample_leaves, two)
        click.echo(learn(one.tree, two.tree, read if values else None), nl=False)


@map_.command("invert")
@_add_reader
def invert_rules(reader: "MappedReader") -> None:
    """Print the rules of the way back, as JSON; no leaf is read.

    They make the checkpoint again from the tree that the rules make of it, bit by bit;
    only a cast may change the payload of a NaN. Rules that compute or leave something
    out have no way back, nor have several leaves that are made of one.

    \b
    Examples:
      storectl map invert hf.toml prod/llama-8b@500 > back.json

    Exit code 1: there is no way back, for the reason on stderr.
    """
    from storesvc_client._mapping.inverses import invert_rules as invert

    print_json(invert(reader.mapped, reader.inner.tree))


@map_.command("table")
@click.argument("rules", type=_FILE, metavar="NAME")
def print_table(rules: Path) -> None:
    """Print a table that comes with storesvc, as JSON.

    llama makes the model of a checkpoint of EasyDeL from the files of transformers.
    Behind the name: -tied if the head is the embedding, -scanned for stacked layers,
    -inverse for the way back. Another name prints the names of all tables.

    \b
    Examples:
      storectl map table llama
      storectl map table qwen3-tied-scanned-inverse > mine.json
    """
    from storesvc_client._restore.mapped import load_rules

    print_json(dict(load_rules(rules).document))


@map_.command("show")
@_add_reader
@json_option
def show_leaves(reader: "MappedReader", *, as_json: bool) -> None:
    """List the leaves that rules make of a checkpoint, and what each is made of.

    \b
    Examples:
      storectl map show hf.toml prod/llama-8b@500
      storectl map show hf.toml prod/llama-8b@500 --json
    """
    leaves = [_document(reader, each) for each in reader.mapped.leaves]
    if as_json:
        print_json({"leaves": leaves, "dropped": list(reader.mapped.dropped)})
    else:
        LISTING.show(leaves, as_json=False)


MIGRATIONS: Final = Listing(
    Table(
        "migration",
        (
            Column("DIGEST", lambda each: each.digest[:12]),
            field_column("RULES", "name", shrink=Shrink.END),
            Column("COUNT", lambda each: str(len(each.rules["rules"]))),
        ),
    ),
    lambda each: {"digest": each.digest, "name": each.name, "rules": each.rules},
)


@map_.command("migrate")
@path_argument("path", run_or_checkpoint, metavar="RUN[@STEP]")
@click.argument("rules", type=_FILE, required=False, metavar="[RULES]")
@click.option("--remove", metavar="DIGEST", help="Remove this migration.")
@json_option
@pass_connection
def migrate(
    connection: Connection,
    *,
    path: RunPath | CheckpointPath,
    rules: Path | None,
    remove: str | None,
    as_json: bool,
) -> None:
    """Add a migration to a run, or remove one; list those that it then has.

    A migration is kept with the run. Restores of jobs apply its rules to checkpoints
    with the tree of the given one, by default the newest: same keys, shapes and dtypes.
    Several are applied in their order, each to the tree that those before it make. All
    other commands show checkpoints as they are stored.

    \b
    Examples:
      storectl map migrate prod/llama-8b
      storectl map migrate prod/llama-8b@500 renamed.toml
      storectl map migrate prod/llama-8b --remove 3f2a90c1
    """
    if rules is not None and remove is not None:
        raise click.UsageError("expected one of RULES and --remove")
    with connection.open() as client:
        migrations = client.run(path.run).migrations
        if rules is not None:
            which = path.which if isinstance(path, CheckpointPath) else "latest"
            migrations.add(rules, which=which)
        if remove is not None:
            migrations.remove(remove)
        MIGRATIONS.show(migrations.list(), as_json=as_json)
