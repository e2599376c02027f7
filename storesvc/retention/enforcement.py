"""Applies the retention policy of a run: soft-deletes the checkpoints it does not keep.

``policy`` decides on values that this module reads. Each deletion is conditional on the
etag of the checkpoint that was judged; a checkpoint that changed in the meantime is
left for the next pass. One that another call deleted, such as a pass of the server
itself, counts as deleted. Only a few small values per checkpoint are held in memory
(``committed``), where a pass of the server finds them again.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

from storesvc.catalog.catalog import Catalog
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
from storesvc.lifecycle.checkpoints import CheckpointLifecycle, find_purge_delay
from storesvc.lifecycle.holds import References
from storesvc.retention.committed import Committed, CommittedCheckpoints, Known
from storesvc.retention.policy import (
    Candidate,
    check,
    check_metrics,
    decide,
    list_metrics,
)
from storesvc.storage.requests import gather_each
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import retention_pb2

PAGE: Final = 1000
"""Outcomes per page."""

_CHANGED: Final = ("changed in the meantime",)
"""Reason of a checkpoint that is kept because it, or what protects it, changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a retention policy for one checkpoint."""

    step: int
    uid: str
    etag: str
    """Etag of the record that was judged."""
    own_bytes: int
    reasons: tuple[str, ...]
    """Reasons why it is kept, as text; empty: it is deleted."""

    @property
    def kept(self) -> bool:
        """True if the checkpoint is kept."""
        return bool(self.reasons)


class RecentCommits:
    """Runs to which this process committed, or whose policy it set, for retention soon
    after; bounded by the number of runs."""

    def __init__(self) -> None:
        self._runs: set[RunName] = set()
        self._any = asyncio.Event()

    def add(self, run: RunName) -> None:
        self._runs.add(run)
        self._any.set()

    async def wait(self) -> None:
        """Waits until there is at least one run."""
        await self._any.wait()

    @property
    def runs(self) -> list[RunName]:
        return sorted(self._runs)

    def remove(self, run: RunName) -> None:
        self._runs.discard(run)
        if not self._runs:
            self._any.clear()


@dataclass(eq=False, repr=False)
class RetentionEnforcer:
    """Applies the retention policies of the runs of a bucket."""

    catalog: Catalog
    lifecycle: CheckpointLifecycle
    references: References
    committed: CommittedCheckpoints
    clock: Clock

    async def check(self, run: RunName, policy: retention_pb2.RetentionPolicy) -> None:
        """Rejects a policy with a metric that no checkpoint of the run has, if the run
        has checkpoints."""
        if list_metrics(policy):
            with suppress(RunNotFoundError):
                await self._judge(run, policy, await self.committed.read(run))

    async def preview(
        self, run: RunName, policy: retention_pb2.RetentionPolicy | None = None
    ) -> AsyncGenerator[list[Outcome], None]:
        """Yields the outcomes that a policy would have, newest step first, in pages."""
        record = (await self.catalog.run(run)).record
        if policy is None:
            policy = _run_policy(record)
        committed = await self.committed.read(run)
        for page in _pages(await self._judge(run, policy, committed)):
            yield page

    async def apply(
        self, run: RunName, record: pb.RunRecord | None = None
    ) -> AsyncGenerator[list[Outcome], None]:
        """Deletes the checkpoints that the policy of a run does not keep; reads only
        those that have changed since the last call.

        Yields the outcome of each checkpoint, newest step first, in pages.
        """
        record = record or (await self.catalog.run(run)).record
        policy, committed = _run_policy(record), await self.committed.update(run)
        outcomes = await self._judge(run, policy, committed)
        # A person may have deleted slots; then other checkpoints are kept.
        is_idle = all(outcome.kept for outcome in outcomes)
        if not is_idle and not await self.committed.is_current(run, committed):
            committed = await self.committed.read(run)
            outcomes = await self._judge(run, policy, committed)
        delay = find_purge_delay(record)
        newest = outcomes[0] if outcomes else None
        for page in _pages(outcomes):
            doomed = [outcome for outcome in page if not outcome.kept]
            if not newest or not doomed:
                yield page
                continue
            after = await self._delete_all(run, doomed, newest, delay)
            yield [after.get(outcome.step, outcome) for outcome in page]

    async def _judge(
        self,
        run: RunName,
        policy: retention_pb2.RetentionPolicy | None,
        committed: Committed,
    ) -> list[Outcome]:
        if policy is not None:
            check(policy)  # a newer release may have stored a rule unknown to this one
        known, candidates, present = committed.known, list[Candidate](), set[str]()
        for one in known.values():
            tag = committed.tags.get(one.uid)
            candidates.append(replace(one, tags=(tag,)) if tag else one)
            present.update(one.metrics)
        if candidates and policy is not None:
            check_metrics(policy, str(run), present)
        # In a thread: many rules over many checkpoints would block the event loop.
        decisions = await asyncio.to_thread(
            decide, policy, candidates, self.clock.now()
        )
        return [_describe_outcome(known[d.step], d.reasons) for d in decisions]

    async def _delete_all(
        self, run: RunName, doomed: Sequence[Outcome], newest: Outcome, delay: timedelta
    ) -> dict[int, Outcome]:
        """Deletes checkpoints; returns their outcomes by step."""
        own: set[int] = set()
        """Steps that this call deleted, which it may undelete."""

        async def delete(outcome: Outcome) -> Outcome:
            if await self._delete(run, outcome, delay):
                own.add(outcome.step)
            elif await self._is_committed(run, outcome):
                return replace(outcome, reasons=_CHANGED)
            return outcome

        # 1. Delete nothing if the newest checkpoint is gone in the meantime: the policy
        #    was evaluated on the assumption that it is kept.
        if not await self._is_committed(run, newest):
            return {v.step: replace(v, reasons=_CHANGED) for v in doomed}
        # 2. Delete, each on the condition that it is unchanged since it was judged.
        after = await gather_each(delete, doomed, at_once=8)
        # 3. Read the protections again, and undelete what gained one during step 2. A
        #    tag that was set, or a newest one that was deleted, before this read is
        #    visible here; one that comes later finds the checkpoint deleted.
        tags = await self.references.find_tags(run)
        is_newest_there = await self._is_committed(run, newest)
        for at, outcome in enumerate(after):
            if outcome.step in own and (outcome.uid in tags or not is_newest_there):
                with suppress(ConflictError, CheckpointNotFoundError):
                    await self.lifecycle.undelete(
                        run, outcome.step, write_id=str(uuid.uuid4()), uid=outcome.uid
                    )
                    after[at] = replace(outcome, reasons=_CHANGED)
        return {outcome.step: outcome for outcome in after}

    async def _delete(self, run: RunName, outcome: Outcome, delay: timedelta) -> bool:
        """Deletes a checkpoint; returns False if it, or what protects it, changed."""
        try:
            await self.lifecycle.delete(
                run,
                outcome.step,
                purge_delay=delay,
                etag=outcome.etag,
                write_id=str(uuid.uuid4()),
            )
        except (
            CheckpointInUseError,
            CheckpointNotFoundError,
            ConflictError,
            EtagMismatchError,
            RunNotFoundError,
        ):
            return False
        return True

    async def _is_committed(self, run: RunName, outcome: Outcome) -> bool:
        found = await self.catalog.slot(run, outcome.step)
        if found is None or found[0].upload != outcome.uid:
            return False
        return found[0].state == COMMITTED


def _describe_outcome(known: Known, reasons: tuple[str, ...]) -> Outcome:
    return Outcome(
        step=known.step,
        uid=known.uid,
        etag=known.etag,
        own_bytes=known.own_bytes,
        reasons=reasons,
    )


def _run_policy(record: pb.RunRecord) -> retention_pb2.RetentionPolicy | None:
    return record.retention if record.HasField("retention") else None


def _pages(outcomes: Sequence[Outcome]) -> Iterator[list[Outcome]]:
    for at in range(0, len(outcomes), PAGE):
        yield list(outcomes[at : at + PAGE])
