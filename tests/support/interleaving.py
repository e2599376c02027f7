"""Concurrent calls of several processes, in a random order.

They share one bucket in memory. Before each operation other calls run a random number
of steps. Everything runs on one event loop and draws from one generator, so a seed
determines the order.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.message import Message

from storesvc.catalog.catalog import Catalog
from storesvc.catalog.journal import Journal
from storesvc.catalog.records import timestamp
from storesvc.catalog.slots import COMMITTED
from storesvc.clock import Clock
from storesvc.errors import CorruptDataError, StoreError
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import seal, unseal
from storesvc.lifecycle.checkpoints import CheckpointLifecycle
from storesvc.lifecycle.holds import Holds, References
from storesvc.lifecycle.tags import Tags
from storesvc.storage.bucket import (
    ALWAYS,
    IF_ABSENT,
    Bucket,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc_proto.v1 import bucket_pb2 as pb

RUN = RunName("tests", "races")
START = datetime(2030, 1, 1, tzinfo=UTC)
SHORT_TURNS = 3
LONG_TURNS = 300
MOST_FAULTS = 2


@dataclass
class World:
    """The time, and the other state that all processes share."""

    rng: random.Random
    slow_share: float
    """Share of the operations that take long."""
    seconds: float = 0.0
    stored: dict[str, Stored] = field(default_factory=dict)
    watch: Callable[[str, bytes], None] = lambda place, data: None
    """Called with each write when it is applied."""
    writes: int = 0
    faults: int = 0

    async def turns(self, most: int) -> None:
        """Yields to other tasks a random number of times, up to a limit."""
        for _ in range(self.rng.randrange(most)):
            await asyncio.sleep(0)


@dataclass(frozen=True)
class SkewedClock:
    """The clocks of one process, whose time of day may be wrong."""

    world: World
    skew: timedelta = timedelta()

    def now(self) -> datetime:
        """Returns the time of day of this process."""
        return START + self.skew + timedelta(seconds=self.world.seconds)

    def elapsed(self) -> float:
        """Returns seconds since an arbitrary moment."""
        return self.world.seconds + self.skew.total_seconds() / 7


class ShuffledBucket(Bucket):
    """A bucket whose operations take random times."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def read(self, place: str) -> Stored | None:
        await self._others()
        found = self._world.stored.get(place)
        await self._others()
        return found

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        found = await self.read(place)
        if found is None or len(found.data) < stop:
            raise CorruptDataError(f"{place} is missing or short")
        return found.data[start:stop]

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        await self._others()
        found = self._world.stored.get(place)
        expected = found.generation if found else IF_ABSENT
        if condition not in (ALWAYS, expected):
            raise PreconditionError(place)
        self._world.writes += 1
        generation = Generation(self._world.writes.to_bytes(8, "big"))
        self._world.stored[place] = Stored(data, generation)
        self._world.watch(place, data)
        await self._others()
        self._maybe_lose(place, condition)
        return generation

    async def settle(self, place: str) -> None:
        await self._others()

    async def delete(self, place: str, *, generation: Generation | None = None) -> None:
        await self._others()
        found = self._world.stored.get(place)
        if found and generation not in (None, found.generation):
            raise PreconditionError(place)
        self._world.stored.pop(place, None)
        await self._others()

    async def delete_below(self, prefix: str) -> None:
        for place in await self.list(prefix):
            await self.delete(place)

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        await self._others()
        places = [p for p in self._world.stored if p.startswith(prefix) and p > after]
        await self._others()
        return sorted(places)[:limit]

    async def list_versions(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> dict[str, Generation]:
        await self._others()
        stored = self._world.stored
        places = sorted(p for p in stored if p.startswith(prefix) and p > after)
        found = {place: stored[place].generation for place in places[:limit]}
        await self._others()
        return found

    @property
    def lists_pages(self) -> bool:
        return True

    async def _others(self) -> None:
        """Yields to other tasks, and advances the clock."""
        rng = self._world.rng
        # mostly short, sometimes long enough for a whole call of another process
        await self._world.turns(
            LONG_TURNS if rng.random() < self._world.slow_share else SHORT_TURNS
        )
        if rng.random() < 0.1:
            self._world.seconds += rng.random()

    def _maybe_lose(self, place: str, condition: WriteCondition) -> None:
        """Reports an applied write as a conflict, as a retry in the driver would."""
        world = self._world
        if condition is ALWAYS or world.faults == MOST_FAULTS:
            return
        if world.rng.random() < 0.05:
            world.faults += 1
            raise PreconditionError(place)


class Process:
    """A server process on the bucket."""

    def __init__(self, world: World, *, skew: timedelta = timedelta()) -> None:
        self.clock: Clock = SkewedClock(world, skew)
        self.bucket = bucket = ShuffledBucket(world)
        self.catalog = Catalog(bucket)
        self.journal = journal = Journal(bucket, clock=self.clock)
        self.references = References(bucket, self.catalog, clock=self.clock)
        self.lifecycle = CheckpointLifecycle(
            bucket, self.catalog, journal, self.references, self.clock
        )
        self.tags = Tags(bucket, self.catalog, journal, self.clock)
        self.holds = Holds(bucket, self.catalog, clock=self.clock)

    async def remove(self, step: int) -> None:
        """Deletes a checkpoint, and purges it."""
        with suppress(StoreError):
            await self.lifecycle.delete(
                RUN, step, purge_delay=timedelta(), etag="", write_id=new_id()
            )
        with suppress(StoreError):
            await self.lifecycle.purge(RUN, step, etag="")

    async def collect(self) -> None:
        """Purges all checkpoints that are due, as garbage collection does."""
        slots = await self.catalog.checkpoints(
            RUN, before=None, limit=100, show_deleted=True
        )
        await self.lifecycle.purge_due(RUN, slots)


def world_of(seed: int, *, steps: int) -> World:
    """Returns a world with one run, and its committed checkpoints."""
    rng = random.Random(seed)
    world = World(rng, slow_share=rng.choice((0.02, 0.1, 0.3)))
    when = timestamp(START - timedelta(days=1))
    run = pb.RunRecord(uid="u", create_time=when)
    put_record(world, layout.run_record(RUN), run)
    for step in range(steps):
        record = pb.CheckpointRecord(
            state=COMMITTED, step=step, upload=uid_of(step), epoch=1, commit_time=when
        )
        put_record(world, RunPaths(RUN).checkpoint(step), record)
    return world


def put_record(world: World, place: str, record: Message) -> None:
    """Writes the record of a place without yielding."""
    world.writes += 1
    generation = Generation(world.writes.to_bytes(8, "big"))
    world.stored[place] = Stored(seal(record, place=place), generation)


def slot_of(world: World, step: int) -> pb.CheckpointRecord:
    """Returns the record in the slot of a step."""
    place = RunPaths(RUN).checkpoint(step)
    return unseal(world.stored[place].data, pb.CheckpointRecord, place=place)


def put_state(
    world: World, step: int, state: "pb.CheckpointRecord.State.ValueType"
) -> None:
    """Sets the slot of a step to a state, as a process that dies leaves it."""
    slot = slot_of(world, step)
    slot.state = state
    put_record(world, RunPaths(RUN).checkpoint(step), slot)


def freed_uid(place: str, data: bytes) -> str | None:
    """Returns the UUID of the checkpoint whose slot a write frees."""
    if RunPaths(RUN).parse_step(place) is None or not place.startswith("data/"):
        return None
    slot = unseal(data, pb.CheckpointRecord, place=place)
    return slot.upload if slot.state == pb.CheckpointRecord.STATE_FREE else None


def uid_of(step: int) -> str:
    """Returns the uid of a step's checkpoint."""
    return f"{step:032x}"


def new_id() -> str:
    """Returns a new request id."""
    return str(uuid.uuid4())


def together(*calls: Coroutine[Any, Any, None]) -> None:
    """Runs calls concurrently until all have ended."""

    async def main() -> None:
        await asyncio.gather(*calls)

    asyncio.run(main())
