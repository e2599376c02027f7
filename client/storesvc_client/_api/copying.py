"""Copies checkpoints of a run into a run of another store; ``Run.copy_to``.

A copy may be interrupted and repeated: a checkpoint that was copied before is skipped,
and the chunks of an interrupted one are used. The order leaves a run that is usable at
any time:

1. Reject what cannot be copied.
2. Create the run with its labels, if it does not exist.
3. Copy checkpoints, in the order of their creation; pin those that are pinned.
4. Set tags, then the retention policy, which might delete what has no tag yet.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from storesvc_client._api.groups import (
    Retention,
    Tags,
    configure_run,
    get_run,
    update_checkpoint,
)
from storesvc_client._telemetry.progress import ProgressCallback
from storesvc_client._values.models import (
    Checkpoint,
    RunInfo,
    Transfer,
    with_provenance,
)
from storesvc_client.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)

if TYPE_CHECKING:
    from storesvc_client._api.run import RunParts

PREFIX: Final = "copy."
"""Prefix of the labels that record where a checkpoint was copied from."""


def origin(checkpoint: Checkpoint) -> str:
    """Returns the uid of the checkpoint that was saved: of the first in a chain of
    copies."""
    return checkpoint.labels.get(f"{PREFIX}uid", checkpoint.uid)


class RunCopy:
    """One copy from a run to another."""

    def __init__(
        self,
        source: "RunParts",
        target: "RunParts",
        progress: ProgressCallback | None = None,
    ) -> None:
        """Creates a copy; nothing is read yet.

        Args:
            source: The run to read.
            target: The run to write.
            progress: Called with a ``Progress`` of each checkpoint.

        Raises:
            InvalidRequestError: Both are the same run.
        """
        self._from_session, self._from = source.session, source.stub
        self._to_session, self._to = target.session, target.stub
        self._progress = progress
        address = self._from.connection.address.partition("?")[0]
        self._place = f"{address}//{self._from.name}"
        if self._from.connection is self._to.connection and (
            self._from.name == self._to.name
        ):
            raise self._same_run()

    def checkpoints(self, steps: Iterable[int] | None) -> Iterator[Transfer]:
        """Copies checkpoints, and yields each once it is committed or skipped.

        Raises:
            NotFoundError: There is no such run or step.
            AlreadyExistsError: The target has another checkpoint at one of the steps;
                nothing was copied.
            StoreError: A store failed; the checkpoints before are copied.
        """
        from storesvc_client._save.transfer import list_committed

        # 1. Reject.
        record = RunInfo.from_message(get_run(self._from))
        wanted = _find_wanted(self._place, list_committed(self._from), steps)
        present = list_committed(self._to)
        for checkpoint in wanted:
            if checkpoint.step in present:
                if checkpoint.uid == present[checkpoint.step].uid:
                    raise self._same_run()  # by another address of its store
                if origin(checkpoint) != origin(present[checkpoint.step]):
                    raise AlreadyExistsError(
                        f"{self._to.name}@{checkpoint.step}: expected no checkpoint, "
                        f"or a copy of {self._url(checkpoint)}, got one with another "
                        "origin; copy to another run, or only the other steps",
                        reason="CHECKPOINT_EXISTS",
                    )
        # 2. The run.
        try:
            get_run(self._to)
        except NotFoundError:
            configure_run(
                self._to,
                labels=record.labels,
                purge_delay=record.purge_delay,
                etag=None,
            )
        # 3. The checkpoints.
        for checkpoint in wanted:
            found = present.get(checkpoint.step)
            if found is not None:
                done = Transfer.skipped(self._url(checkpoint), found)
            else:
                done = self._copy(checkpoint, present)
                present[checkpoint.step] = done.checkpoint
            if checkpoint.pinned and not done.checkpoint.pinned:
                update_checkpoint(
                    self._to,
                    checkpoint.step,
                    labels=None,
                    metrics=None,
                    pinned=True,
                    etag=None,
                )
            yield done

    def tags(self, steps: Iterable[int], *, move: bool) -> None:
        """Sets the tags of copied checkpoints.

        Args:
            steps: Steps of the copied checkpoints.
            move: Whether to move tags that name another checkpoint of the target.

        Raises:
            PreconditionError: Such tags were not moved; lists them. The others are set.
        """
        copied = set(steps)
        tags, present = Tags(self._to), {tag.name: tag for tag in Tags(self._to).list()}
        kept = []
        for tag in Tags(self._from).list():
            if tag.step not in copied:
                continue
            other = present.get(tag.name)
            if other is not None and other.step != tag.step and not move:
                kept.append(f"{tag.name} (step {other.step} there, {tag.step} here)")
            elif other is None or other.step != tag.step:
                etag = other.etag if other is not None and other.protected else None
                tags.set(tag.name, tag.step, protected=tag.protected, etag=etag)
        if kept:
            raise PreconditionError(
                f"copy to {self._to.name}: its tags {', '.join(kept)} name other "
                "checkpoints and were not moved; move them with move_tags=, or copy "
                "without tags; all checkpoints are copied"
            )

    def retention(self) -> None:
        """Sets the retention policy of the source in the target."""
        Retention(self._to).set(Retention(self._from).get())

    def _same_run(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"copy of {self._from.name}: expected another run to copy to, got the same "
            f"one; give the run to create, such as {self._from.name}-copy"
        )

    def _url(self, checkpoint: Checkpoint) -> str:
        return f"{self._place}@{checkpoint.step}"

    def _copy(self, checkpoint: Checkpoint, present: Iterable[int]) -> Transfer:
        """Copies one checkpoint."""
        from storesvc_client._api.stored_chunks import CheckpointFiller
        from storesvc_client._chunks.slabs import cut_slabs
        from storesvc_client._restore.checkpoint import read_checkpoint
        from storesvc_client._save.transfer import (
            TransferPlan,
            describe_transfer,
            transfer,
        )

        reader = read_checkpoint(
            self._from_session,
            self._from.checkpoint_name(checkpoint.step),
            uid=checkpoint.uid,
        )
        plan = TransferPlan(tree=reader.tree, slabs=())
        plan = TransferPlan(tree=plan.tree, slabs=cut_slabs(plan.tree, plan.own))
        description = describe_transfer(
            self._to,
            checkpoint.step,
            present,
            labels=self._labels(reader.info),
            metrics=reader.info.metrics,
        )
        result = transfer(
            self._to_session,
            description,
            plan,
            CheckpointFiller(reader, plan.slabs),
            known=reader.manifest.sums,
            progress=self._progress,
        )
        return Transfer(
            source=self._url(checkpoint),
            checkpoint=result.checkpoint,
            is_new=True,
            sent_bytes=result.report.sent_bytes,
            reused_bytes=result.report.reused_bytes,
            seconds=result.report.seconds,
            is_verified=True,
            verified_count=reader.info.leaf_count + reader.info.item_count,
        )

    def _labels(self, source: Checkpoint) -> Mapping[str, str]:
        """Returns the labels of a copy. A copy of a copy keeps the origin."""
        created = source.create_time.isoformat()
        own = {k: v for k, v in source.labels.items() if not k.startswith(PREFIX)}
        return with_provenance(
            f"copy of {self._url(source)}",
            PREFIX,
            own,
            {
                "uid": origin(source),
                "url": self._url(source),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "create_time": source.labels.get(f"{PREFIX}create_time", created),
            },
        )


def _find_wanted(
    place: str, found: Mapping[int, Checkpoint], steps: Iterable[int] | None
) -> list[Checkpoint]:
    """Returns the checkpoints to copy in the order of their creation."""
    if steps is None:
        wanted = set(found)
    else:
        wanted = set(steps)
        missing = sorted(wanted - found.keys())
        if missing:
            raise NotFoundError(
                f"{place} has no checkpoint at step {missing[0]}; list its checkpoints "
                "to see all",
                reason="CHECKPOINT_NOT_FOUND",
            )
    return sorted(
        (found[step] for step in wanted), key=lambda one: (one.create_time, one.step)
    )
