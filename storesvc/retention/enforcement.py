"""Retention, applied to a run: what its policy does not keep is deleted, softly.

``policy`` decides, over what was read; this module reads, asks it, and deletes on
the condition that a checkpoint is still the one that was judged. What changed
meanwhile is left for the next time. Of a checkpoint only a few small values are held.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from typing import Final

from storesvc.catalog.catalog import Catalogue
from storesvc.catalog.records import etag_of
from storesvc.catalog.slots import COMMITTED
from storesvc.clock import Clock
from storesvc.errors import (
    CheckpointInUseError,
    CheckpointNotFoundError,
    ConflictError,
    EtagMismatchError,
    RunNotFoundError,
)
from storesvc.format.names import RunName
from storesvc.lifecycle.checkpoints import DEFAULT_PURGE_DELAY, CheckpointLifecycle
from storesvc.lifecycle.references import References
from storesvc.retention.policy import Candidate, decide, metrics_of
from storesvc.retention.validation import check
from storesvc.storage.bounded_gather import each
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import retention_pb2

PAGE: Final = 1000
"""Verdicts that are told at once."""

_DELETIONS_AT_ONCE: Final = 8
_LEFT: Final = ("changed meanwhile",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a checkpoint."""

    step: int
    uid: str
    etag: str
    """Of the record that was judged."""
    own_bytes: int
    reasons: tuple[str, ...]
    """Why it stays, for people."""

    @property
    def kept(self) -> bool:
        """Whether it stays."""
        return bool(self.reasons)


class Retaining:
    """Applies the policies of the runs of a bucket."""

    def __init__(
        self,
        catalogue: Catalogue,
        lifecycle: CheckpointLifecycle,
        references: References,
        *,
        clock: Clock,
    ) -> None:
        self._catalogue = catalogue
        self._lifecycle = lifecycle
        self._references = references
        self._clock = clock

    async def preview(
        self, run: RunName, policy: retention_pb2.RetentionPolicy | None = None
    ) -> AsyncGenerator[list[Verdict], None]:
        """Yields what a policy would do to a run, newest step first, in pages.

        Args:
            run: The run.
            policy: One to try; None: that of the run.

        Raises:
            RunNotFoundError: With the most similar names.
            InvalidPolicyError: The policy has a rule that this release does not know.
        """
        record = (await self._catalogue.run(run)).record
        if policy is None:
            policy = _policy_of(record)
        for page in _pages(await self._judge(run, policy)):
            yield page

    async def apply(self, run: RunName) -> AsyncGenerator[list[Verdict], None]:
        """Deletes what the policy of a run does not keep, and yields what became of
        each checkpoint, newest step first, in pages.

        Raises:
            RunNotFoundError: With the most similar names.
            InvalidPolicyError: The policy has a rule that this release does not know.
        """
        record = (await self._catalogue.run(run)).record
        delay = DEFAULT_PURGE_DELAY
        if record.HasField("purge_delay"):
            delay = record.purge_delay.ToTimedelta()
        verdicts = await self._judge(run, _policy_of(record))
        newest = verdicts[0] if verdicts else None
        for page in _pages(verdicts):
            doomed = [verdict for verdict in page if not verdict.kept]
            if not newest or not doomed:
                yield page
                continue
            after = await self._delete_all(run, doomed, newest, delay)
            yield [after.get(verdict.step, verdict) for verdict in page]

    async def _judge(
        self, run: RunName, policy: retention_pb2.RetentionPolicy | None
    ) -> list[Verdict]:
        if policy is not None:
            check(policy)  # a newer release may have stored what this one cannot read
        metrics = metrics_of(policy) if policy else frozenset()
        tags = await self._references.tagged(run)
        judged: dict[int, Verdict] = {}
        candidates = []
        async for record in self._committed(run):
            judged[record.step] = _verdict(record)
            tag = tags.get(record.upload)
            candidates.append(_candidate(record, metrics, tag))
        # a thread: a ping must not wait for many rules over many checkpoints
        decisions = await asyncio.to_thread(
            decide, policy, candidates, self._clock.now()
        )
        return [replace(judged[d.step], reasons=d.reasons) for d in decisions]

    async def _committed(self, run: RunName) -> AsyncIterator[pb.CheckpointRecord]:
        before = None
        while page := await self._catalogue.checkpoints(run, before=before, limit=PAGE):
            for record in page:
                yield record
            before = page[-1].step

    async def _delete_all(
        self, run: RunName, doomed: Sequence[Verdict], newest: Verdict, delay: timedelta
    ) -> dict[int, Verdict]:
        """Deletes checkpoints, and returns what became of each by its step."""

        async def delete(verdict: Verdict) -> Verdict:
            return await self._delete(run, verdict, delay)

        # 1. Not while the newest one, which is kept as such, is gone.
        if not await self._is_committed(run, newest):
            return {v.step: replace(v, reasons=_LEFT) for v in doomed}
        after = await each(delete, doomed, at_once=_DELETIONS_AT_ONCE)
        # 2. What must stay may have come to do so while it was deleted: whoever has
        #    set a tag, or deleted the newest one, before this look is seen.
        tags = await self._references.tagged(run)
        is_newest_there = await self._is_committed(run, newest)
        for at, verdict in enumerate(after):
            if not verdict.kept and (verdict.uid in tags or not is_newest_there):
                with suppress(ConflictError, CheckpointNotFoundError):
                    await self._lifecycle.undelete(
                        run,
                        verdict.step,
                        write_id=str(uuid.uuid4()),
                        uid=verdict.uid,
                    )
                    after[at] = replace(verdict, reasons=_LEFT)
        return {verdict.step: verdict for verdict in after}

    async def _delete(
        self, run: RunName, verdict: Verdict, delay: timedelta
    ) -> Verdict:
        try:
            await self._lifecycle.delete(
                run,
                verdict.step,
                purge_delay=delay,
                etag=verdict.etag,
                write_id=str(uuid.uuid4()),
            )
        except (
            CheckpointInUseError,
            CheckpointNotFoundError,
            ConflictError,
            EtagMismatchError,
            RunNotFoundError,
        ):
            return replace(verdict, reasons=_LEFT)
        return verdict

    async def _is_committed(self, run: RunName, verdict: Verdict) -> bool:
        found = await self._catalogue.slot(run, verdict.step)
        return found is not None and found[0].state == COMMITTED


def _policy_of(record: pb.RunRecord) -> retention_pb2.RetentionPolicy | None:
    return record.retention if record.HasField("retention") else None


def _verdict(record: pb.CheckpointRecord) -> Verdict:
    """What a policy is to say of a checkpoint, before it has."""
    return Verdict(
        step=record.step,
        uid=record.upload,
        etag=etag_of(record),
        own_bytes=record.own_bytes,
        reasons=(),
    )


def _candidate(
    record: pb.CheckpointRecord, metrics: frozenset[str], tag: str | None
) -> Candidate:
    return Candidate(
        step=record.step,
        commit_time=record.commit_time.ToDatetime(UTC),
        metrics={name: record.metrics[name] for name in metrics & set(record.metrics)},
        pinned=record.pinned,
        tags=(tag,) if tag else (),
    )


def _pages(verdicts: Sequence[Verdict]) -> Iterator[list[Verdict]]:
    for at in range(0, len(verdicts), PAGE):
        yield list(verdicts[at : at + PAGE])
