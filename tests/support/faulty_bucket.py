"""A bucket whose calls fail as planned.

    bucket = await FaultyBucket.faulty("memory://", dies_before(3))

The plan is a function that is called before each call of the bucket, in the order in
which the calls begin, so the same calls with the same plan have the same outcome.
"""

import asyncio
import random
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, ParamSpec, TypeAlias, TypeVar

import pytest

from storesvc.errors import StorageUnavailableError
from storesvc.format.checksums import Buffer
from storesvc.format.layout import RESERVE, is_pooled
from storesvc.format.wire import Part
from storesvc.storage import kvstore, object_bucket
from storesvc.storage.bucket import (
    ALWAYS,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.storage.file_bucket import NewObject
from storesvc.storage.object_bucket import TensorStoreBucket

T = TypeVar("T")
P = ParamSpec("P")

LATE_TURNS = 5
"""Iterations of the event loop before a late call completes."""


class DiedError(Exception):
    """The process has died."""


class Fault(Enum):
    """Fault of a call."""

    NONE = "none"
    LATE = "others go first"
    UNAVAILABLE = "nothing is done, and it says so"
    LOST = "it is done, and says that the storage does not answer"
    RETRIED = "it is done, and a retry of it finds its condition broken"
    """Equal to NONE for a call without a condition."""
    DEATH = "the process dies before it: nothing is done from now on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that is about to begin."""

    operation: str
    """Name of the method."""
    path: str
    changes: bool
    """True if it changes the bucket."""
    changes_before: int
    """Number of changes that began before this call."""


Plan: TypeAlias = Callable[[Call], Fault]


def no_faults(call: Call) -> Fault:
    """The plan of a bucket that never fails."""
    del call
    return Fault.NONE


def at_change(number: int, fault: Fault) -> Plan:
    """Returns a plan with one fault, at a change by number; the first is 0."""

    def plan(call: Call) -> Fault:
        hit = call.changes and call.changes_before == number
        return fault if hit else Fault.NONE

    return plan


def dies_before(number: int) -> Plan:
    """Returns the plan of a process that dies before a change by number."""
    return at_change(number, Fault.DEATH)


def unavailable_at(*paths: str) -> Plan:
    """Returns a plan with a fault at each call for one of some paths."""
    return lambda call: Fault.UNAVAILABLE if call.path in paths else Fault.NONE


def record_calls(calls: list[Call]) -> Plan:
    """Returns a plan without faults that appends each call to a list."""

    def plan(call: Call) -> Fault:
        calls.append(call)
        return Fault.NONE

    return plan


def random_faults(
    seed: int,
    *,
    share: float,
    faults: Sequence[Fault] = (
        Fault.LATE,
        Fault.UNAVAILABLE,
        Fault.LOST,
        Fault.RETRIED,
    ),
) -> Plan:
    """Returns a plan with faults at a random share of all calls, drawn from a seed."""
    rng = random.Random(seed)

    def plan(call: Call) -> Fault:
        del call
        return rng.choice(faults) if rng.random() < share else Fault.NONE

    return plan


async def becomes_true(
    condition: Callable[[], Awaitable[object]], *, seconds: float
) -> bool:
    """Waits until a condition is true, or for some seconds; returns whether it is."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                if await condition():
                    return True
                await asyncio.sleep(0.001)
    return False


@contextmanager
def ordered_calls() -> Iterator[None]:
    """Lets tasks take turns at each call of a bucket in memory, and at each function
    that is to run in a thread.

    Then the order of what they do depends on their event loop alone, and not on when
    threads finish: a test that draws its steps sees the same outcome again.
    """

    async def await_result(future: Any) -> Any:
        await asyncio.sleep(0)
        return future.result()

    async def call(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        await asyncio.sleep(0)
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (kvstore, object_bucket):
            patch.setattr(module, "await_future", await_result)
        patch.setattr(asyncio, "to_thread", call)
        yield


class Calls:
    """Calls of a bucket by one process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        """Plan; may be replaced at any time."""
        self.changes = 0
        """Number of changes that began."""
        self.conditional: set[tuple[str, bytes]] = set()
        """Data and places of conditional writes."""
        self._is_dead = False

    def follow(self, plan: Plan) -> None:
        """Sets another plan, and resets the counters."""
        self.plan, self.changes = plan, 0

    async def make(
        self,
        operation: str,
        path: str,
        call: Coroutine[Any, Any, T],
        *,
        changes: bool = False,
        conditional: bool = False,
    ) -> T:
        """Makes a call with the fault that the plan returns."""
        fault = self._next(operation, path, changes=changes)
        if fault in (Fault.UNAVAILABLE, Fault.DEATH):
            call.close()
            if fault is Fault.DEATH:
                raise DiedError(f"{operation} {path}")
            raise StorageUnavailableError(f"{path}: the storage failed")
        if fault is Fault.LATE:
            for _ in range(LATE_TURNS):
                await asyncio.sleep(0)
        answer = await call
        if fault is Fault.LOST:
            raise StorageUnavailableError(f"{path}: the storage did not answer")
        if fault is Fault.RETRIED and conditional:
            raise PreconditionError(path)
        return answer

    def _next(self, operation: str, path: str, *, changes: bool) -> Fault:
        call = Call(
            operation=operation, path=path, changes=changes, changes_before=self.changes
        )
        self.changes += changes
        fault = Fault.DEATH if self._is_dead else self.plan(call)
        self._is_dead = fault is Fault.DEATH
        return fault


class FaultyBucket(TensorStoreBucket):
    """A bucket in one process, whose calls follow a plan."""

    calls: Calls

    @classmethod
    async def faulty(cls, root: str, plan: Plan = no_faults) -> "FaultyBucket":
        """Returns the bucket at a root."""
        bucket = await cls.open(root)
        assert isinstance(bucket, cls)
        bucket.calls = Calls(plan)
        return bucket

    def reopened(self, plan: Plan = no_faults) -> "FaultyBucket":
        """Returns the same storage in another process."""
        bucket = FaultyBucket(self.opened)
        bucket.calls = Calls(plan)
        bucket.calls.conditional = self.calls.conditional
        return bucket

    async def read(self, path: str) -> Stored | None:
        return await self.calls.make("read", path, super().read(path))

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        read = super().read_range(path, start, stop)
        return await self.calls.make("read_range", path, read)

    async def read_parts(
        self, path: str, start: int, stop: int, parts: Iterable[Part]
    ) -> list[bytes]:
        read = super().read_parts(path, start, stop, parts)
        return await self.calls.make("read_parts", path, read)

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        if condition is not ALWAYS and path != RESERVE:  # that is no record
            # where generations are sums, it would be taken for the write before
            assert (path, data) not in self.calls.conditional, f"{path} once more"
            self.calls.conditional.add((path, data))
        write = super().write(path, data, condition=condition)
        return await self.calls.make(
            "write", path, write, changes=True, conditional=condition is not ALWAYS
        )

    async def settle(self, path: str) -> None:
        await self.calls.make("settle", path, super().settle(path))

    async def delete(self, path: str, *, generation: Generation | None = None) -> None:
        delete = super().delete(path, generation=generation)
        await self.calls.make(
            "delete", path, delete, changes=True, conditional=generation is not None
        )

    async def delete_below(self, prefix: str) -> None:
        delete = super().delete_below(prefix)
        await self.calls.make("delete_below", prefix, delete, changes=True)

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        listing = super().list(prefix, after=after, limit=limit)
        return await self.calls.make("list", prefix, listing)

    async def list_versions(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> dict[str, Generation]:
        if not self.lists_pages:  # then it is a list
            return await super().list_versions(prefix, after=after, limit=limit)
        listing = super().list_versions(prefix, after=after, limit=limit)
        return await self.calls.make("list", prefix, listing)

    async def write_all(self, objects: Mapping[str, Sequence[Buffer]]) -> None:
        if not self.has_files:
            await super().write_all(objects)
            return
        for path, parts in objects.items():  # so that a plan can fail between them
            if is_pooled(path):
                await self.write_new(path, parts)
            else:
                await self.write(path, b"".join(parts))

    async def write_new(self, path: str, parts: Sequence[Buffer]) -> None:
        write = super().write_new(path, parts)
        await self.calls.make("write_new", path, write, changes=True)

    async def keep(self, new: NewObject) -> None:
        await self.calls.make("keep", new.path, super().keep(new), changes=True)

    async def adopt(self, path: str) -> None:
        await self.calls.make("adopt", path, super().adopt(path))
