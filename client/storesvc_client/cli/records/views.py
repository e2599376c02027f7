"""Lists of runs, checkpoints and leaves: what ``ls`` reads and how it is shown."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from storesvc_client._values.texts import (
    ABSENT,
    dtype_text,
    key_text,
    pairs_text,
    shape_text,
    size_text,
    time_text,
)
from storesvc_client.cli.leaf_selection import select_leaves, unread_notes
from storesvc_client.cli.output import (
    Column,
    Listing,
    Shrink,
    json_value,
    print_note,
)
from storesvc_client.cli.paths import (
    CheckpointPath,
    LeafPath,
    NamespacePath,
    RunPath,
    StorePath,
    is_foreign,
)

if TYPE_CHECKING:
    from storesvc_client import (
        Checkpoint,
        Client,
        DataLossError,
        ForeignInfo,
        LeafInfo,
        Run,
        RunInfo,
    )
    from storesvc_client.cli.foreign import ForeignStore, Readable

_OnDamage: TypeAlias = "Callable[[DataLossError], object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCheckpoint:
    """A checkpoint with the names of its tags."""

    checkpoint: "Checkpoint"
    tags: tuple[str, ...]


_RECORDS: Final = ("copy.", "import.", "orbax.commit_time")
"""Beginnings of labels that record where a checkpoint comes from; ``stat`` shows
them."""


def _labels_text(labels: Mapping[str, str]) -> str:
    return pairs_text(
        {key: text for key, text in labels.items() if not key.startswith(_RECORDS)}
    )


def _run_row(run: "RunInfo") -> tuple[str, ...]:
    latest = ABSENT if run.latest_step is None else str(run.latest_step)
    return run.name, latest, time_text(run.create_time)


def _checkpoint_row(tagged: TaggedCheckpoint) -> tuple[str, ...]:
    checkpoint = tagged.checkpoint
    return (
        str(checkpoint.step),
        time_text(checkpoint.commit_time),
        size_text(checkpoint.size_bytes),
        str(checkpoint.leaf_count),
        " ".join(tagged.tags) or ABSENT,
        "yes" if checkpoint.pinned else ABSENT,
        _labels_text(checkpoint.labels),
    )


def _checkpoint_document(tagged: TaggedCheckpoint) -> object:
    return json_value(tagged.checkpoint) | {"tags": tagged.tags}


def _foreign_row(checkpoint: "ForeignInfo") -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        _moment_text(checkpoint.create_time),
        size_text(checkpoint.size_bytes),
        str(checkpoint.leaf_count),
        _labels_text(checkpoint.labels),
    )


def _deleted_row(checkpoint: "Checkpoint") -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        _moment_text(checkpoint.delete_time),
        _moment_text(checkpoint.purge_time),
        size_text(checkpoint.size_bytes),
        _labels_text(checkpoint.labels),
    )


def _moment_text(time: datetime | None) -> str:
    return ABSENT if time is None else time_text(time)


def _leaf_row(leaf: "LeafInfo") -> tuple[str, ...]:
    return (
        key_text(leaf),
        dtype_text(leaf),
        shape_text(leaf),
        size_text(leaf.size_bytes),
        str(leaf.chunk_count),
    )


_RUNS: Final = Listing(
    noun="run",
    row=_run_row,
    columns=(
        Column("RUN"),
        Column("LATEST", right=True),
        Column("CREATED", shrink=Shrink.TIME),
    ),
)
_CHECKPOINTS: Final = Listing(
    noun="checkpoint",
    row=_checkpoint_row,
    columns=(
        Column("STEP", right=True),
        Column("COMMITTED", shrink=Shrink.TIME),
        Column("SIZE", right=True),
        Column("LEAVES", right=True, is_minor=True),
        Column("TAGS", shrink=Shrink.END),
        Column("PINNED", shrink=Shrink.END),
        Column("LABELS", shrink=Shrink.END),
    ),
    document=_checkpoint_document,
    metrics=lambda tagged: tagged.checkpoint.metrics,
)
_FOREIGN: Final = Listing(
    noun="checkpoint",
    row=_foreign_row,
    metrics=lambda checkpoint: checkpoint.metrics,
    columns=(
        Column("STEP", right=True),
        Column("WRITTEN", shrink=Shrink.TIME),
        Column("SIZE", right=True),
        Column("LEAVES", right=True, is_minor=True),
        Column("LABELS", shrink=Shrink.END),
    ),
)
_DELETED: Final = Listing(
    noun="deleted checkpoint",
    row=_deleted_row,
    metrics=lambda checkpoint: checkpoint.metrics,
    columns=(
        Column("STEP", right=True),
        Column("DELETED", shrink=Shrink.TIME),
        Column("PURGE", shrink=Shrink.TIME),
        Column("SIZE", right=True),
        Column("LABELS", shrink=Shrink.END),
    ),
)
_LEAVES: Final = Listing(
    noun="leaf",
    row=_leaf_row,
    columns=(
        Column("KEY", shrink=Shrink.PREFIX),
        Column("DTYPE"),
        Column("SHAPE"),
        Column("SIZE", right=True),
        Column("CHUNKS", right=True),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A list of records of one type, and how they are read."""

    listing: Listing[Any]
    records: Callable[[Any, Any, _OnDamage], Iterable[Any]]
    """Reads the records of a path in an open store; passes on errors of damaged ones.
    """


def view_of(path: StorePath | None, *, deleted: bool) -> View:
    """Returns the view of what is at a path; ``deleted`` of a run's deleted
    checkpoints."""
    match path:
        case None | NamespacePath():
            return View(listing=_RUNS, records=_runs)
        case CheckpointPath() | LeafPath():
            return View(listing=_LEAVES, records=_leaves)
        case RunPath(run) if is_foreign(run):
            return View(listing=_FOREIGN, records=_foreign)
        case RunPath() if deleted:
            return View(listing=_DELETED, records=_deleted)
        case RunPath():
            return View(listing=_CHECKPOINTS, records=_checkpoints)


def _runs(
    client: "Client", path: NamespacePath | None, on_damage: _OnDamage
) -> "Iterable[RunInfo]":
    return client.runs(path.namespace if path else None, on_damage=on_damage)


def _checkpoints(
    client: "Client", path: RunPath, on_damage: _OnDamage
) -> Iterator[TaggedCheckpoint]:
    run = client.run(path.run)
    tags = _tags_by_uid(run)
    for checkpoint in run.checkpoints(on_damage=on_damage):
        names = tuple(tags.get(checkpoint.uid, ()))
        yield TaggedCheckpoint(checkpoint=checkpoint, tags=names)


def _tags_by_uid(run: "Run") -> Mapping[str, Sequence[str]]:
    """Returns the names of tags; a damaged one is reported, and its row is shown."""
    found: dict[str, list[str]] = defaultdict(list)
    for tag in run.tags.list(on_damage=lambda error: print_note(str(error))):
        found[tag.uid].append(tag.name)
    return found


def _deleted(
    client: "Client", path: RunPath, on_damage: _OnDamage
) -> "Iterable[Checkpoint]":
    return client.run(path.run).checkpoints(deleted=True, on_damage=on_damage)


def _leaves(
    source: "Readable", path: CheckpointPath | LeafPath, _: _OnDamage
) -> "Iterable[LeafInfo]":
    selection = select_leaves(source, path)
    for note in unread_notes(selection.unread):
        print_note(note)
    return selection.leaves


def _foreign(
    source: "ForeignStore", path: RunPath, on_damage: _OnDamage
) -> "Iterator[ForeignInfo]":
    for checkpoint in source.run(path.run).checkpoints(on_damage=on_damage):
        for note in unread_notes(checkpoint.unread):
            print_note(f"step {checkpoint.step}: {note}")
        yield checkpoint
