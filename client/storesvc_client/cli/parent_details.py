"""Details of a run or a namespace, for ``stat``: what it holds, uses and keeps."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from storesvc_client._values.texts import (
    ABSENT,
    number_text,
    pairs_text,
    printable,
    size_text,
    time_text,
)
from storesvc_client.cli.output import (
    json_value,
    print_fields,
    print_json,
    report,
    text_width,
)
from storesvc_client.cli.suggestions import check_namespace

if TYPE_CHECKING:
    from storesvc_client import (
        Checkpoint,
        Client,
        DataLossError,
        HoldInfo,
        Quota,
        RetentionPolicy,
        Run,
        RunInfo,
        Tag,
        Usage,
    )

_SHOWN: Final = 20
"""Maximum lines of one field; with --json, all are."""

_SIZES: Final = frozenset({"stored_bytes", "bytes_in_flight"})
"""Quotas that are sizes."""


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
        """Adds the value of one more checkpoint."""
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
    def of(cls, checkpoints: "Iterable[Checkpoint]") -> "Summary":
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


def print_run(run: "Run", *, as_json: bool) -> None:
    """Prints the details of a run.

    Raises:
        NotFoundError: There is no such run.
        DataLossError: The record of a checkpoint or a tag is damaged; the rest is
            printed before.
    """
    damaged: list[DataLossError] = []
    details = _details(run, damaged.append)
    if as_json:
        print_json(_run_document(details))
    else:
        print_fields(run.name, _run_fields(details).items())
    report(damaged)


def _details(run: "Run", on_damage: "Callable[[DataLossError], object]") -> RunDetails:
    usage = run.usage()
    # the store rejects lists of a run that has no checkpoint yet
    has_some = usage.checkpoint_count > 0
    now = datetime.now(UTC)
    holds = run.holds.list(on_damage=on_damage) if has_some else ()
    return RunDetails(
        usage=usage,
        info=run.info(),
        policy=run.retention.get(),
        summary=Summary.of(run.checkpoints(on_damage=on_damage) if has_some else ()),
        tags=tuple(run.tags.list(on_damage=on_damage)) if has_some else (),
        holds=tuple(hold for hold in holds if hold.expire_time > now),
    )


def print_namespace(client: "Client", namespace: str, *, as_json: bool) -> None:
    """Prints the details of a namespace.

    Raises:
        Refusal: It has no runs.
    """
    from storesvc_client._documents.usages import usages_of

    damaged: list[DataLossError] = []
    usages = usages_of(client, namespace, damaged.append)
    if not usages and not damaged:
        check_namespace(client, namespace)
    quotas = client.quotas(namespace)
    totals = {
        "run_count": len(usages),
        "checkpoint_count": sum(usage.checkpoint_count for usage in usages),
        "deleted_checkpoint_count": sum(u.deleted_checkpoint_count for u in usages),
        "upload_count": sum(usage.upload_count for usage in usages),
        "logical_bytes": sum(usage.logical_bytes for usage in usages),
        "stored_bytes": sum(usage.stored_bytes for usage in usages),
        "distinct_bytes": sum(usage.distinct_bytes for usage in usages),
        "file_count": sum(usage.file_count for usage in usages),
    }
    if as_json:
        print_json({"namespace": namespace, **totals, "quotas": json_value(quotas)})
        report(damaged)
        return
    largest = max(usages, key=lambda usage: usage.distinct_bytes, default=None)
    fields = {
        "runs": f"{totals['run_count']:,}",
        "checkpoints": f"{totals['checkpoint_count']:,}",
        "deleted": f"{totals['deleted_checkpoint_count']:,}",
        "uploads": f"{totals['upload_count']:,}",
        "logical": size_text(totals["logical_bytes"]),
        "stored": size_text(totals["stored_bytes"]),
        "distinct": size_text(totals["distinct_bytes"]),
        "data files": f"{totals['file_count']:,}",
        "largest run": f"{largest.run}, {size_text(largest.distinct_bytes)}"
        if largest
        else ABSENT,
        "quotas": _listed((quota.name, _quota_text(quota)) for quota in quotas),
    }
    print_fields(namespace, fields.items())
    report(damaged)


def _run_document(details: RunDetails) -> dict[str, Any]:
    from storesvc_client import format_policy

    used = {name: v for name, v in json_value(details.usage).items() if name != "run"}
    return {
        **json_value(details.info),
        **used,
        "first_step": details.summary.first_step,
        "pinned_count": details.summary.pinned_count,
        "retention": format_policy(details.policy) if details.policy else None,
        "tags": json_value(details.tags),
        "holds": json_value(details.holds),
        "metrics": json_value(details.summary.metrics),
    }


def _run_fields(details: RunDetails) -> dict[str, str | Sequence[str]]:
    from storesvc_client import format_policy
    from storesvc_client._values.arguments import duration_text

    info, usage, summary = details.info, details.usage, details.summary
    policy = format_policy(details.policy) if details.policy else "none: all stay"
    delay = info.purge_delay
    return {
        "uid": info.uid,
        "created": time_text(info.create_time),
        "newest": _newest_text(summary.newest),
        "checkpoints": _checkpoints_text(usage, summary),
        "pinned": f"{summary.pinned_count:,}",
        "deleted": f"{usage.deleted_checkpoint_count:,}",
        "uploads": f"{usage.upload_count:,}",
        "tags": _listed((tag.name, f"step {tag.step}") for tag in details.tags),
        "holds": _listed(
            (f"step {hold.step}", _hold_text(hold)) for hold in details.holds
        ),
        "metrics": _listed(
            (name, str(known)) for name, known in sorted(summary.metrics.items())
        ),
        "labels": pairs_text(info.labels),
        "retention": policy,
        "purge delay": "the server's" if delay is None else duration_text(delay),
        "logical": size_text(usage.logical_bytes),
        "stored": size_text(usage.stored_bytes),
        "distinct": size_text(usage.distinct_bytes),
        "data files": f"{usage.file_count:,}",
    }


def _newest_text(newest: "Checkpoint | None") -> str:
    if newest is None:
        return ABSENT
    committed = time_text(newest.commit_time)
    return f"step {newest.step}, {committed}, {size_text(newest.size_bytes)}"


def _checkpoints_text(usage: "Usage", summary: Summary) -> str:
    count = f"{usage.checkpoint_count:,}"
    if summary.newest is None or usage.checkpoint_count == 1:
        return count
    return f"{count}, steps {summary.first_step} to {summary.newest.step}"


def _hold_text(hold: "HoldInfo") -> str:
    return f"until {time_text(hold.expire_time)} by {hold.owner or ABSENT}"


def _quota_text(quota: "Quota") -> str:
    is_size = quota.name in _SIZES
    used, limit = (
        size_text(amount) if is_size else f"{amount:,}"
        for amount in (quota.used, quota.limit)
    )
    of = f"of {limit}" if quota.limit else "without a limit"
    return f"{used} {of} for {quota.scope or 'anonymous callers'}"


def _listed(pairs: Iterable[tuple[str, str]]) -> list[str]:
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
