"""Lists of runs, checkpoints and leaves, for ``ls``, and details of a run or a
namespace, for ``stat``: what it holds, uses and keeps."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from storesvc_client._views.tables import (
    LEAVES,
    RUNS,
    SIZE,
    STEP,
    Column,
    Shrink,
    Table,
    count_column,
    field_column,
    group_by_uid,
    time_column,
)
from storesvc_client._views.texts import (
    ABSENT,
    json_value,
    number_text,
    pairs_text,
    printable,
    quota_amount_text,
    size_text,
    time_text,
)
from storesvc_client.cli import records
from storesvc_client.cli.errors import check_namespace
from storesvc_client.cli.leaves import select_leaves, unread_notes
from storesvc_client.cli.output import (
    Listing,
    print_fields,
    print_json,
    print_note,
    report,
    text_width,
)
from storesvc_client.cli.paths import (
    CheckpointPath,
    ForeignStore,
    LeafPath,
    NamespacePath,
    Readable,
    RunPath,
    StorePath,
    is_foreign,
)
from storesvc_client.cli.records import Schema

if TYPE_CHECKING:
    from storesvc_client import (
        Checkpoint,
        Client,
        DataLossError,
        ForeignInfo,
        HoldInfo,
        LeafInfo,
        Quota,
        RetentionPolicy,
        Run,
        RunInfo,
        Tag,
        Usage,
    )
    from storesvc_client._restore.migrations import Migration

_OnDamage: TypeAlias = "Callable[[DataLossError], object]"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCheckpoint:
    """A checkpoint with the names of its tags."""

    checkpoint: "Checkpoint"
    tags: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)


_RECORDS: Final = ("copy.", "import.", "orbax.commit_time")
"""Beginnings of labels that record where a checkpoint comes from; ``stat`` shows
them."""


def _labels_text(labels: Mapping[str, str]) -> str:
    return pairs_text(
        {key: text for key, text in labels.items() if not key.startswith(_RECORDS)}
    )


def age_text(time: datetime | None, now: datetime) -> str:
    """Returns how long ago a time was, in one unit: "5s", "12m", "3h", "4d"."""
    if time is None:
        return ABSENT
    seconds = max(0, int((now - time).total_seconds()))
    units = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
    return next(f"{seconds // s}{unit}" for s, unit in units if seconds >= s or s == 1)


def _age_column(name: str) -> Column:
    return count_column("AGE", name, lambda time: age_text(time, datetime.now(UTC)))


_LEAF_COUNT: Final = count_column("LEAVES", "leaf_count", is_minor=True)
_LABELS: Final = field_column("LABELS", "labels", _labels_text, shrink=Shrink.END)

_RUNS: Final = Listing(Table("run", (*RUNS, _age_column("create_time"))))
_CHECKPOINTS: Final = Listing(
    Table(
        "checkpoint",
        (
            *(STEP, time_column("COMMITTED", "commit_time", is_minor=True)),
            *(_age_column("commit_time"), SIZE, _LEAF_COUNT),
            Column("TAGS", lambda one: " ".join(one.tags) or ABSENT, shrink=Shrink.END),
            Column(
                "PINNED", lambda c: "yes" if c.pinned else ABSENT, shrink=Shrink.END
            ),
            _LABELS,
        ),
    ),
    document=lambda tagged: json_value(tagged.checkpoint) | {"tags": tagged.tags},
    has_metrics=True,
)
_FOREIGN: Final = Listing(
    Table(
        "checkpoint",
        (
            *(STEP, time_column("WRITTEN", "create_time", is_minor=True)),
            *(_age_column("create_time"), SIZE, _LEAF_COUNT, _LABELS),
        ),
    ),
    has_metrics=True,
)
_DELETED: Final = Listing(
    Table(
        "deleted checkpoint",
        (
            *(STEP, time_column("DELETED", "delete_time")),
            *(time_column("PURGE", "purge_time"), SIZE, _LABELS),
        ),
    ),
    has_metrics=True,
)
_LEAVES: Final = Listing(LEAVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A list of records of one type, and how they are read."""

    listing: Listing
    schema: Schema
    records: Callable[[Any, Any, _OnDamage], Iterable[Any]]
    """Reads the records of a path in an open store; passes on errors of damaged ones.
    """


def read_view(path: StorePath | None, *, deleted: bool) -> View:
    """Returns the view of what is at a path; ``deleted`` of a run's deleted
    checkpoints."""
    match path:
        case None | NamespacePath():
            return View(
                listing=_RUNS,
                schema=records.RUNS,
                records=lambda client, path, on_damage: client.runs(
                    path.namespace if path else None, on_damage=on_damage
                ),
            )
        case CheckpointPath() | LeafPath():
            return View(listing=_LEAVES, schema=records.LEAVES, records=_leaves)
        case RunPath(run) if is_foreign(run):
            return View(listing=_FOREIGN, schema=records.FOREIGN, records=_foreign)
        case RunPath() if deleted:
            return View(
                listing=_DELETED,
                schema=records.DELETED,
                records=lambda client, path, on_damage: client.run(
                    path.run
                ).checkpoints(deleted=True, on_damage=on_damage),
            )
        case RunPath():
            return View(
                listing=_CHECKPOINTS,
                schema=records.CHECKPOINTS,
                records=_checkpoints,
            )


def _checkpoints(
    client: "Client", path: RunPath, on_damage: _OnDamage
) -> Iterator[TaggedCheckpoint]:
    run = client.run(path.run)
    # a damaged tag is reported, and the row of its checkpoint is shown
    tags = group_by_uid(run.tags.list(on_damage=lambda error: print_note(str(error))))
    for checkpoint in run.checkpoints(on_damage=on_damage):
        names = tuple(tag.name for tag in tags[checkpoint.uid])
        yield TaggedCheckpoint(checkpoint=checkpoint, tags=names)


def _leaves(
    source: Readable, path: CheckpointPath | LeafPath, _: _OnDamage
) -> "Iterable[LeafInfo]":
    selection = select_leaves(source, path)
    for note in unread_notes(selection.unread):
        print_note(note)
    return selection.leaves


def _foreign(
    source: ForeignStore, path: RunPath, on_damage: _OnDamage
) -> "Iterator[ForeignInfo]":
    for checkpoint in source.run(path.run).checkpoints(on_damage=on_damage):
        for note in unread_notes(checkpoint.unread):
            print_note(f"step {checkpoint.step}: {note}")
        yield checkpoint


_SHOWN: Final = 20
"""Maximum lines of one field; with --json, all are."""


@dataclass(slots=True, kw_only=True)
class MetricRange:
    """The values of one metric over the checkpoints of a run."""

    newest: float
    """Value of the newest checkpoint that has it."""
    count: int = 0
    """Checkpoints that have it."""
    lowest: float | None = None
    """Without NaN; None if there is nothing else."""
    lowest_step: int | None = None
    highest: float | None = None
    highest_step: int | None = None

    def add(self, value: float, step: int) -> None:
        self.count += 1
        if math.isnan(value):
            return
        if self.lowest is None or value < self.lowest:
            self.lowest, self.lowest_step = value, step
        if self.highest is None or value > self.highest:
            self.highest, self.highest_step = value, step

    def __str__(self) -> str:
        text = number_text(self.newest)
        if self.lowest is None or self.lowest == self.highest:
            return text
        return (
            f"{text}, lowest {number_text(self.lowest)} (step {self.lowest_step}), "
            f"highest {number_text(self.highest)} (step {self.highest_step})"
        )


@dataclass(slots=True, kw_only=True)
class Summary:
    """The checkpoints of a run, of which each is read once and none is kept."""

    newest: "Checkpoint | None" = None
    first_step: int | None = None
    pinned_count: int = 0
    metrics: dict[str, MetricRange]

    @classmethod
    def from_checkpoints(cls, checkpoints: "Iterable[Checkpoint]") -> "Summary":
        """Returns the summary of checkpoints, the newest first."""
        found = cls(metrics={})
        for checkpoint in checkpoints:
            found.newest = found.newest or checkpoint
            found.first_step = checkpoint.step
            found.pinned_count += checkpoint.pinned
            for name, value in checkpoint.metrics.items():
                known = found.metrics.setdefault(name, MetricRange(newest=value))
                known.add(value, checkpoint.step)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDetails:
    """A run, and all that belongs to it."""

    usage: "Usage"
    info: "RunInfo"
    policy: "RetentionPolicy | None"
    summary: Summary
    tags: "tuple[Tag, ...]"
    holds: "tuple[HoldInfo, ...]"
    """Holds that have not expired."""
    migrations: "tuple[Migration, ...]"
    """In the order in which restores apply them."""


def print_run(run: "Run", *, as_json: bool) -> None:
    from storesvc_client import format_policy

    damaged: list[DataLossError] = []
    usage = run.usage()
    # the store rejects lists of a run that has no checkpoint yet
    has_some = usage.checkpoint_count > 0
    now = datetime.now(UTC)
    holds = run.holds.list(on_damage=damaged.append) if has_some else ()
    details = RunDetails(
        usage=usage,
        info=run.info(),
        policy=run.retention.get(),
        summary=Summary.from_checkpoints(
            run.checkpoints(on_damage=damaged.append) if has_some else ()
        ),
        tags=tuple(run.tags.list(on_damage=damaged.append)) if has_some else (),
        holds=tuple(hold for hold in holds if hold.expire_time > now),
        migrations=tuple(run.migrations.list()),
    )
    if as_json:
        used = json_value(usage)
        del used["run"]
        document = {
            **json_value(details.info),
            **used,
            "first_step": details.summary.first_step,
            "pinned_count": details.summary.pinned_count,
            "retention": format_policy(details.policy) if details.policy else None,
            "migrations": [
                {"digest": each.digest, "name": each.name}
                for each in details.migrations
            ],
            "tags": json_value(details.tags),
            "holds": json_value(details.holds),
            "metrics": json_value(details.summary.metrics),
        }
        print_json(document)
    else:
        print_fields(run.name, _run_fields(details).items())
    report(damaged)


def print_namespace(client: "Client", namespace: str, *, as_json: bool) -> None:
    from storesvc_client._documents import list_usages, sum_usages

    damaged: list[DataLossError] = []
    usages = list_usages(client, namespace, damaged.append)
    if not usages and not damaged:
        check_namespace(client, namespace)
    quotas = client.quotas(namespace)
    counts = sum_usages(usages)
    if as_json:
        totals = {"namespace": namespace, "run_count": len(usages), **counts}
        print_json(totals | {"quotas": json_value(quotas)})
        report(damaged)
        return
    largest = max(usages, key=lambda usage: usage.distinct_bytes, default=None)
    fields = {
        "runs": f"{len(usages):,}",
        **usage_fields(counts),
        "largest run": f"{largest.run}, {size_text(largest.distinct_bytes)}"
        if largest
        else ABSENT,
        "quotas": _list_pairs((quota.name, _quota_text(quota)) for quota in quotas),
    }
    print_fields(namespace, fields.items())
    report(damaged)


def usage_fields(counts: Mapping[str, int]) -> dict[str, str]:
    """Returns the names and texts of what runs use, by the names of ``Usage``."""
    return {
        "checkpoints": f"{counts['checkpoint_count']:,}",
        "deleted": f"{counts['deleted_checkpoint_count']:,}",
        "uploads": f"{counts['upload_count']:,}",
        "logical": size_text(counts["logical_bytes"]),
        "stored": size_text(counts["stored_bytes"]),
        "distinct": size_text(counts["distinct_bytes"]),
        "data files": f"{counts['file_count']:,}",
    }


def _run_fields(details: RunDetails) -> dict[str, str | Sequence[str]]:
    from storesvc_client import format_policy
    from storesvc_client._views.texts import duration_text

    info, usage, summary = details.info, details.usage, details.summary
    policy = format_policy(details.policy) if details.policy else "none: all stay"
    delay = info.purge_delay
    used = usage_fields(json_value(usage))
    newest, count = ABSENT, used.pop("checkpoints")
    if (last := summary.newest) is not None:
        committed, size = time_text(last.commit_time), size_text(last.size_bytes)
        newest = f"step {last.step}, {committed}, {size}"
        if usage.checkpoint_count != 1:
            count += f", steps {summary.first_step} to {last.step}"
    return {
        "uid": info.uid,
        "created": time_text(info.create_time),
        "newest": newest,
        "checkpoints": count,
        "pinned": f"{summary.pinned_count:,}",
        "deleted": used.pop("deleted"),
        "uploads": used.pop("uploads"),
        "tags": _list_pairs((tag.name, f"step {tag.step}") for tag in details.tags),
        "holds": _list_pairs(
            (
                f"step {hold.step}",
                f"until {time_text(hold.expire_time)} by {hold.owner or ABSENT}",
            )
            for hold in details.holds
        ),
        "metrics": _list_pairs(
            (name, str(known)) for name, known in sorted(summary.metrics.items())
        ),
        "labels": pairs_text(info.labels),
        "retention": policy,
        "migrations": _list_pairs(
            (each.digest[:12], printable(each.name)) for each in details.migrations
        ),
        "purge delay": "the server's" if delay is None else duration_text(delay),
        **used,
    }


def _quota_text(quota: "Quota") -> str:
    used = quota_amount_text(quota.name, quota.used)
    limit = quota_amount_text(quota.name, quota.limit)
    of = f"of {limit}" if quota.limit else "without a limit"
    return f"{used} {of} for {quota.scope or 'anonymous callers'}"


def _list_pairs(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Returns the lines of a field, with the second texts aligned."""
    shown = [(printable(name), text) for name, text in pairs]
    width = max((text_width(name) for name, _ in shown[:_SHOWN]), default=0)
    lines = [
        f"{name}{' ' * (width - text_width(name))}  {text}"
        for name, text in shown[:_SHOWN]
    ]
    if len(shown) > _SHOWN:
        lines.append(f"and {len(shown) - _SHOWN:,} more")
    return lines or [ABSENT]
