"""Imports the steps of another project into a run, one after another.

An import may be interrupted and repeated: a step that the run has from the same files
is skipped, and the chunks of an interrupted one are used. Each step shares the chunks
that the step before it has, too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from storesvc_client._chunks.memory import ExtentPool
from storesvc_client._foreign.foreign_step import ForeignRoot, ForeignStep
from storesvc_client._foreign.mount import ForeignReader
from storesvc_client._foreign.source import (
    MappedFiller,
    StepFiller,
    plan_mapped_units,
    plan_units,
    stored_tree,
)
from storesvc_client._foreign.steps import with_items_for_long_labels
from storesvc_client._mapping.rules import Rules
from storesvc_client._restore.open_tree import TreeReader
from storesvc_client._rpc.connection import RunStub
from storesvc_client._save.transfer import (
    Filler,
    TransferPlan,
    describe_transfer,
    list_committed,
    reading_bytes,
    staging_bytes,
    transfer,
)
from storesvc_client._session import Session
from storesvc_client._telemetry.progress import ProgressCallback
from storesvc_client._values.models import (
    Checkpoint,
    Transfer,
    label_text,
    with_provenance,
)
from storesvc_client.errors import (
    AlreadyExistsError,
    DataLossError,
    NotFoundError,
    PreconditionError,
)

MAX_CHUNKS: Final = 16_000_000
"""Maximum chunks of a step; no server accepts as many."""

STAGING_BYTES: Final = 384 << 20
"""Maximum staging memory of an import that writes data files itself. Reading could be
further ahead of writing, but would then fill new memory, which takes the kernel as long
as the copy into it; buffers that were written are there already."""

PREFIX: Final = "import."
"""Prefix of the labels that record where a checkpoint was imported from."""


def import_steps(
    session: Session,
    stub: RunStub,
    root: ForeignRoot,
    *,
    steps: Sequence[int],
    labels: Mapping[str, str],
    progress: ProgressCallback | None,
    jobs: int,
    rules: Rules | None,
) -> Iterator[Transfer]:
    """Imports steps in ascending order; yields each once it is committed or skipped.

    Raises:
        MismatchError: The rules do not fit a step; nothing was imported.
        AlreadyExistsError: The run has another checkpoint at one of the steps, or one
            that was imported before the files changed; nothing was imported.
        DataLossError: A step has an item that cannot be read; those before it are
            imported.
        StoreError: A step could not be read or stored; those before it are imported.
    """
    # 1. Reject what cannot be imported before anything is stored.
    present = list_committed(stub)
    opened = dict[int, ForeignStep]()
    for step in steps:
        if step in present:
            opened[step] = _whole(root.open(step))
            _check_same(opened[step], rules, present[step])
        elif rules is not None:
            _map(_whole(root.open(step)), rules)
    # 2. Import.
    for step in steps:
        if step in opened:
            yield Transfer.skipped(opened[step].url, present[step])
            continue
        done = _import(
            session,
            stub,
            _whole(root.open(step)),
            present,
            labels=labels,
            progress=progress,
            jobs=jobs,
            rules=rules,
            time=datetime.now(UTC),
        )
        present[step] = done.checkpoint
        yield done


def _whole(source: ForeignStep) -> ForeignStep:
    """Rejects a step with an item that cannot be read: the caller decides whether to
    leave it out."""
    if unread := [item for item in source.unread if item.is_needed]:
        names = [item.name for item in unread]
        reasons = "; ".join(f"{each.name} ({each.reason})" for each in unread)
        raise DataLossError(
            f"import of {source.url}: expected a step of which every item can be read, "
            f"got some that cannot: {reasons}; leave them out by name: "
            f"{' '.join(f'--without {name}' for name in names)}, "
            f"open_foreign(..., without={names!r})"
        )
    return source


def wanted_steps(
    url: str, found: Iterable[int], steps: Iterable[int] | None
) -> list[int]:
    """Returns the steps to import, ascending."""
    present = sorted(found)
    if not present:
        raise NotFoundError(
            f"{url} has no finished steps; expected the location below which they were "
            f"written{_bucket_advice(url)}"
        )
    if steps is None:
        return present
    wanted = sorted(set(steps))
    missing = [step for step in wanted if step not in present]
    if missing:
        shown = ", ".join(map(str, present[:8])) + (", ..." if present[8:] else "")
        raise NotFoundError(
            f"{url} has no finished step {missing[0]}; has {shown}{_bucket_advice(url)}"
        )
    return wanted


def _bucket_advice(url: str) -> str:
    """Returns what else may be the cause if steps of Orbax in a bucket are missing."""
    if not url.startswith("orbax:") or url.startswith(("orbax:file:", "orbax:hf:")):
        return ""
    return (
        ", each with commit_success.txt; accept steps that were copied there without "
        "it with trust_uncommitted=True (--trust-uncommitted)"
    )


def _check_same(source: ForeignStep, rules: Rules | None, present: Checkpoint) -> None:
    """Rejects a step at which the run has a checkpoint that was not imported from the
    same files by the same rules."""
    digest = present.labels.get(f"{PREFIX}digest", "")
    is_same = present.labels.get(f"{PREFIX}format") == source.format and (
        digest == source.digest
        if digest or source.digest
        else present.labels.get(f"{PREFIX}url") == label_text(source.url)
    )
    mapping = "" if rules is None else rules.digest
    if is_same and present.labels.get(f"{PREFIX}mapping", "") == mapping:
        return
    place, url = f"{present.run}@{present.step}", present.labels.get(f"{PREFIX}url")
    if url == label_text(source.url):
        raise AlreadyExistsError(
            f"{place}: expected the checkpoint of {source.url} as it is now, got one "
            "that was imported from there before its files changed, or under other "
            "keys or by other rules; import into another run, or delete the step "
            f"(storectl rm {place}) and import it once it is purged",
            reason="CHECKPOINT_EXISTS",
        )
    got = f"one that was imported from {url}" if url else "one that was not imported"
    raise AlreadyExistsError(
        f"{place}: expected no checkpoint, or the one of {source.url}, got {got}; "
        "import into another run, or only the other steps",
        reason="CHECKPOINT_EXISTS",
    )


def _import(
    session: Session,
    stub: RunStub,
    source: ForeignStep,
    present: Iterable[int],
    *,
    labels: Mapping[str, str],
    progress: ProgressCallback | None,
    jobs: int,
    rules: Rules | None,
    time: datetime,
) -> Transfer:
    """Imports one step."""
    source = with_items_for_long_labels(source)
    what = f"import of {source.url}"
    description = describe_transfer(
        stub,
        source.step,
        present,
        labels=with_provenance(
            what, PREFIX, {**source.labels, **labels}, _provenance(source, rules, time)
        ),
        metrics=source.metrics,
    )
    view = None if rules is None else _map(source, rules)
    tree = stored_tree(source.tree if view is None else view.tree)
    if tree.chunk_count > MAX_CHUNKS:  # before a list of them is made
        raise PreconditionError(
            f"{what}: expected at most {MAX_CHUNKS:,} chunks, got {tree.chunk_count:,} "
            "by the shapes of its arrays; such a step cannot be stored"
        )
    filler: Filler
    if view is None:
        units = plan_units(source.tree, tree)
        reading = reading_bytes(session)
        filler = StepFiller(source, units, jobs=jobs, reading_bytes=reading)
    else:
        units = plan_mapped_units(view, tree)
        filler = MappedFiller(view, units)
    plan = TransferPlan(
        tree=tree, slabs=[slab for unit in units for _, slab in unit.slabs]
    )
    limit = staging_bytes(session)
    if session.data_root is not None:
        limit = min(limit, STAGING_BYTES)
    result = transfer(
        session, description, plan, filler, progress=progress, staging=ExtentPool(limit)
    )
    return Transfer(
        source=source.url,
        checkpoint=result.checkpoint,
        is_new=True,
        sent_bytes=result.report.sent_bytes,
        reused_bytes=result.report.reused_bytes,
        seconds=result.report.seconds,
        is_verified=source.is_verified,
        verified_count=source.verified_count,
    )


def _map(source: ForeignStep, rules: Rules) -> TreeReader:
    """Returns the reader of the tree that rules make of a step."""
    return ForeignReader(source.url, source).map(rules)


def _provenance(
    source: ForeignStep, rules: Rules | None, time: datetime
) -> dict[str, str]:
    """Returns where a step comes from, as labels without their prefix."""
    created = source.create_time
    return {
        "url": source.url,
        "format": source.format,
        "digest": source.digest,
        "time": time.isoformat(timespec="seconds"),
        "create_time": "" if created is None else created.isoformat(),
        "mapping": "" if rules is None else rules.digest,
    }
