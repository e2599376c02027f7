"""Parameter types of commands: paths into a store, stores, durations, ``--json``.

Each function is a type of click parameters: it parses the text that was typed, or
raises an error that names the rule it breaks.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from storesvc.storage.location import parse_root
from storesvc_client.cli.completion import Completer, Part, Which, complete_path
from storesvc_client.cli.paths import (
    CheckpointPath,
    ForeignOptions,
    LeafPath,
    NamespacePath,
    QualifiedPath,
    RunPath,
    StorePart,
    StorePath,
    is_foreign,
    parse_foreign_path,
    parse_path,
    parse_qualified_path,
    parse_target,
)

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Value = TypeVar("_Value")


existing_file: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
"""A file that is there; errors name it."""


def convert(parse: Callable[[str], _Value], text: str) -> _Value:
    """Returns what a parser makes of a text; its error becomes that of a parameter."""
    try:
        return parse(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def any_path(text: str) -> StorePath:
    if is_foreign(text):
        raise click.BadParameter(
            f"{text!r}: expected a path into a store, got checkpoints of another "
            "project, which ls, tree, stat, get, cat and diff read"
        )
    return readable_path(text)


def readable_path(text: str) -> StorePath:
    """Returns the path, of checkpoints of another project too."""
    return convert(parse_foreign_path if is_foreign(text) else parse_path, text)


def readable_checkpoint(text: str) -> CheckpointPath | LeafPath:
    """Returns the path of a checkpoint, or of leaves of one, of any project."""
    return _checkpoint(text, readable_path(text))


def copied_place(text: str) -> QualifiedPath:
    """Returns a namespace, a run or a checkpoint, and its store."""
    return convert(parse_qualified_path, text)


def readable_place(text: str) -> tuple[StorePart, CheckpointPath]:
    """Returns the store of a checkpoint, and its path as a whole, of any project."""
    if is_foreign(text):
        return None, _whole(text, readable_path(text))
    place = copied_place(text)
    return place.store, _whole(text, place.path)


def _accept(
    expected: str, *kinds: type, parse: Callable[[str], StorePath] = any_path
) -> Callable[[str], Any]:
    """Returns a parser of paths of some kinds, which rejects the others."""

    def parse_kind(text: str) -> StorePath:
        path = parse(text)
        if not isinstance(path, kinds):
            raise click.BadParameter(f"{text!r}: expected {expected}")
        return path

    return parse_kind


readable_leaves: Final = _accept(
    "leaves of a checkpoint, such as 'prod/llama-8b@latest:params/**', or "
    "'prod/llama-8b@latest:**' for all; storectl ls lists runs",
    LeafPath,
    parse=readable_path,
)
parent_path: Final = _accept(
    "a namespace or a run, such as prod or prod/llama-8b", NamespacePath, RunPath
)
run_path: Final = _accept("a run, such as prod/llama-8b", RunPath)
run_or_checkpoint: Final = _accept(
    "a run or a checkpoint, such as prod/llama-8b or prod/llama-8b@latest",
    *(RunPath, CheckpointPath),
)


def readable_item(text: str) -> LeafPath:
    match readable_path(text):
        case LeafPath(_, glob) as path if glob:
            return path
        case _:
            raise click.BadParameter(
                f"{text!r}: expected an item of a checkpoint, such as "
                "prod/llama-8b@latest:config"
            )


def _checkpoint(text: str, path: StorePath) -> CheckpointPath | LeafPath:
    match path:
        case CheckpointPath() | LeafPath():
            return path
        case RunPath(run) if is_foreign(text):
            url = run.rpartition("@")[0] or run
            raise click.BadParameter(
                f"{text!r}: expected a step or latest at the end, such as "
                f"{url}@latest; other projects have no tags"
            )
        case _:
            raise click.BadParameter(
                f"{text!r}: expected a checkpoint, such as prod/llama-8b@latest"
            )


def whole_checkpoint(text: str) -> CheckpointPath:
    return _whole(text, any_path(text))


def _whole(text: str, path: StorePath) -> CheckpointPath:
    match _checkpoint(text, path):
        case CheckpointPath() as whole:
            return whole
        case LeafPath(checkpoint):
            raise click.BadParameter(
                f"{text!r}: expected a checkpoint as a whole, such as {checkpoint}"
            )


def step_path(text: str) -> CheckpointPath:
    """Returns the path of a checkpoint by its step; tags and "latest" may move."""
    run, _, which = text.partition("@")
    first, dots, last = which.partition("..")
    if dots:
        raise click.BadParameter(
            f"{text!r}: expected one step; name each, such as {run}@{first} "
            f"{run}@{last}"
        )
    path = whole_checkpoint(text)
    if isinstance(path.which, str):
        raise click.BadParameter(
            f"{text!r}: expected the step of a checkpoint, such as {path.run}@500; "
            f"{path.which!r} may move to another checkpoint"
        )
    return path


def whole_path(text: str) -> NamespacePath | RunPath | CheckpointPath:
    path = any_path(text)
    if isinstance(path, LeafPath):
        raise click.BadParameter(
            f"{text!r}: expected a checkpoint as a whole, such as {path.checkpoint}"
        )
    return path


_COMPLETIONS: Final[dict[Callable[[str], object], Completer]] = {
    parent_path: complete_path(Part.NAMESPACE, Part.RUN),
    readable_checkpoint: complete_path(Part.CHECKPOINT, Part.LEAF),
    readable_item: complete_path(Part.LEAF, Part.LEAF, items=True),
    readable_leaves: complete_path(Part.LEAF, Part.LEAF),
    readable_path: complete_path(Part.NAMESPACE, Part.LEAF),
    readable_place: complete_path(Part.CHECKPOINT, Part.CHECKPOINT, contexts=True),
    run_or_checkpoint: complete_path(Part.RUN, Part.CHECKPOINT),
    run_path: complete_path(Part.RUN, Part.RUN),
    copied_place: complete_path(Part.NAMESPACE, Part.CHECKPOINT, contexts=True),
    step_path: complete_path(Part.CHECKPOINT, Part.CHECKPOINT, which=Which.STEPS),
    whole_checkpoint: complete_path(Part.CHECKPOINT, Part.CHECKPOINT),
    whole_path: complete_path(Part.NAMESPACE, Part.CHECKPOINT),
}


def path_argument(
    name: str,
    convert: Callable[[str], object],
    *,
    metavar: str = "PATH",
    required: bool = True,
    nargs: int = 1,
    completion: Completer | None = None,
) -> Callable[[_Command], _Command]:
    """Adds a path to a command, as its argument ``name``.

    Args:
        convert: Function of this module that parses the path, and decides what a shell
            offers.
        nargs: Number of paths; -1: one or more.
        completion: What a shell offers in place of that.
    """
    text = metavar if nargs == 1 else f"{metavar}..."
    return click.argument(
        name,
        type=convert,
        metavar=text if required else f"[{text}]",
        required=required,
        nargs=nargs,
        shell_complete=completion or _COMPLETIONS[convert],
    )


def store_target(text: str) -> str:
    return convert(parse_target, text)


def store_root(text: str) -> str:
    return parse_root(text)


class WholeNumber(click.IntRange):
    """A whole number within bounds; anything else is rejected with them."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        try:
            number = int(value)
        except ValueError:
            bounds = f"of at least {self.min}"
            if self.max is not None:
                bounds = f"from {self.min} to {self.max}"
            self.fail(f"expected a whole number {bounds}, got {value!r}", param, ctx)
        return super().convert(number, param, ctx)


def duration(text: str) -> timedelta:
    from storesvc_client._values.arguments import parse_duration

    return convert(parse_duration, text)


def size(text: str) -> int:
    """Returns a size in bytes: "5GB" is 5 * 1000**3 bytes, "5GiB" 5 * 1024**3."""
    from storesvc_client.cli.records import parse_size

    try:
        return parse_size(text)
    except ValueError as e:
        raise click.BadParameter(f"{text!r}: {e}") from e


def past_time(text: str) -> datetime:
    """Returns the time of an age ("24h") or of a time in ISO 8601."""
    from storesvc_client._values.arguments import parse_past

    return convert(lambda text: parse_past(text, datetime.now(UTC)), text)


def label(text: str) -> tuple[str, str]:
    """Returns the key and the text of a label."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise click.BadParameter(f"{text!r}: expected KEY=TEXT, such as stage=final")
    return key, value


def etag(text: str) -> str:
    """Returns the etag in its quotes, which a shell may have removed."""
    return text if text.startswith('"') else f'"{text}"'


def foreign_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of reading checkpoints of other projects to a command, as its
    argument ``options``."""

    @click.option(
        "--keep-names",
        is_flag=True,
        help="Make the name of each tensor of safetensors one key; without it, a name "
        "is split at its dots.",
    )
    @click.option(
        "--trust-uncommitted",
        is_flag=True,
        help="Read steps of Orbax in a bucket without commit_success.txt, too: copies "
        "of a directory have none.",
    )
    @wraps(command)
    def call_with_options(
        *arguments: Any, keep_names: bool, trust_uncommitted: bool, **others: Any
    ) -> Any:
        options = ForeignOptions(
            keep_names=keep_names, trust_uncommitted=trust_uncommitted
        )
        return command(*arguments, options=options, **others)

    return call_with_options


json_option: Final = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document."
)
mapping_option: Final = click.option(
    "--map",
    "mapping",
    metavar="RULES",
    help="A file of rules that make another tree, or a table; see storectl map.",
)
max_shard_option: Final = click.option(
    "--max-shard",
    type=size,
    metavar="SIZE",
    help="Maximum size of a safetensors file: 5GB by default.",
)
expand_option: Final = click.option(
    "--expand", is_flag=True, help="Show each of numbered siblings that are alike."
)
