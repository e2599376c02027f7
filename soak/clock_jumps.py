"""R14: servers whose clocks are a day apart, or jump by a day, in either direction.

No guarantee depends on a clock: a live upload survives garbage collection by servers
with any of these clocks, and saves commit. (Servers whose clocks differ by more than
two days may abort each other's uploads: then a save fails, but no data is lost.)
"""

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import storesvc_client as store
from soak.outcomes import Outcome
from storesvc.clock import SystemClock
from storesvc.format.names import RunName, UploadName
from storesvc.format.trees import pack_leaves
from storesvc.format.wire import Frame
from storesvc.save.uploads import NewUpload
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store
from tests.support.contract import elements, frame, received, sums, tree_of

RUN = RunName("soak", "clocks")
JUMPS = tuple(timedelta(hours=hours) for hours in (-24, -12, -1, 0, 1, 12, 24))
WHOLE = elements(0) + elements(1) + elements(2)


class JumpingClock(SystemClock):
    """The time of day plus a jump; the monotonic clock is unchanged."""

    def __init__(self) -> None:
        self.jump = timedelta()

    def now(self) -> datetime:
        """Returns the time of day plus the jump."""
        return datetime.now(UTC) + self.jump


def clock_jumps() -> Outcome:
    """Saves with each clock, while a server with each other clock collects garbage."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        root = (Path(scratch) / "store").as_uri()
        pairs = [(a, b) for a in JUMPS for b in JUMPS]
        for step, (ours, theirs) in enumerate(pairs):
            lost = asyncio.run(_save_and_collect(root, step, ours, theirs))
            outcome.add(f"a save at {ours}, a collector at {theirs}", lost)
        with store.connect(root) as client:
            run = client.run(str(RUN))
            found = sorted(checkpoint.step for checkpoint in run.checkpoints())
            if found != list(range(len(pairs))):
                outcome.losses.append(f"expected {len(pairs)} steps, got {found}")
            for _, array in (row for s in found for row in run.open(s).read(["x"])):
                if array.tobytes() != WHOLE:
                    outcome.losses.append("a step came back with other bytes")
    return outcome


async def _save_and_collect(
    root: str, step: int, ours: timedelta, theirs: timedelta
) -> list[str]:
    """Saves, while the saver's clock jumps, and a collector with another clock runs
    between the calls."""
    clocks = [JumpingClock(), JumpingClock()]
    clocks[0].jump, clocks[1].jump = ours, theirs
    saver, collector = [
        await Store.open(await TensorStoreBucket.open(root), clock=clock)
        for clock in clocks
    ]
    name = UploadName(RUN, uuid.uuid4().hex)
    new = NewUpload(
        step=step,
        writer_count=1,
        labels={},
        metrics={},
        lease=timedelta(minutes=10),
        base=None,
        body=str(step).encode(),
    )
    try:
        record, _ = await saver.uploads.begin(
            name, new, b"".join(pack_leaves(tree_of()))
        )
        await _collect(collector)
        clocks[0].jump = theirs
        opened = await saver.uploads.open(name, record.epoch)
        async for _ in saver.receiver.write(opened, 0, _frames()):
            pass
        await _collect(collector)
        clocks[0].jump = ours
        staged = saver.receipts.staged(name, 0, chunk_count=3)
        await saver.receipts.finish(opened, 0, sums(0, 1, 2), staged)
        await _collect(collector)
        await saver.commits.commit(name, record.epoch)
        await _collect(collector)
    except Exception as e:  # noqa: BLE001 - any error means that the save was lost
        return [f"{type(e).__name__}: {e}"]
    return []


async def _frames() -> AsyncIterator[Frame]:
    yield received(frame(0, 1, 2))


async def _collect(collector: Store) -> None:
    async for _ in collector.collector.collect(RUN, grace=timedelta(minutes=10)):
        pass
