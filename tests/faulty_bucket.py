"""A bucket that fails as storages do, where a plan says so.

    bucket = await FaultyBucket.faulty("memory://", dies_before(3))

A plan is asked before each call, in the order in which the calls begin; so the same
plan, over the same calls, does the same.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from storesvc.bucket import (
    ALWAYS,
    Generation,
    PreconditionError,
    Stored,
    WriteCondition,
)
from storesvc.errors import StorageUnavailableError
from storesvc.kvbucket import Contents, KeySpace, KvBucket, Share

T = TypeVar("T")

LATE_TURNS = 5
"""Turns of the event loop that a late call lets pass."""


class DiedError(Exception):
    """The process is gone."""


class Fault(Enum):
    """What becomes of a call."""

    NONE = "none"
    LATE = "others go first"
    UNAVAILABLE = "nothing is done, and it says so"
    LOST = "it is done, and says that the storage does not answer"
    RETRIED = "it is done, and a retry of it finds its condition broken"
    """Of a call without a condition: as NONE."""
    DEATH = "the process dies before it: nothing is done from now on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that is about to be made."""

    operation: str
    """The method's name."""
    place: str
    changes: bool
    """Whether it changes the bucket."""
    changes_before: int
    """How many changes were begun before this call."""


Plan: TypeAlias = Callable[[Call], Fault]


def no_faults(call: Call) -> Fault:
    """The plan of a bucket that never fails."""
    del call
    return Fault.NONE


def at_change(number: int, fault: Fault) -> Plan:
    """Returns the plan of one fault, at a change; the first is 0."""

    def plan(call: Call) -> Fault:
        hit = call.changes and call.changes_before == number
        return fault if hit else Fault.NONE

    return plan


def dies_before(number: int) -> Plan:
    """Returns the plan of a process that makes so many changes and then dies."""
    return at_change(number, Fault.DEATH)


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
    """Returns the plan of faults at a share of all calls, drawn from a seed."""
    rng = random.Random(seed)

    def plan(call: Call) -> Fault:
        del call
        return rng.choice(faults) if rng.random() < share else Fault.NONE

    return plan


class Calls:
    """The calls that one process makes of a bucket."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        """May be exchanged at any time."""
        self.changes = 0
        """How many changes were begun."""
        self._is_dead = False

    def follow(self, plan: Plan) -> None:
        """Follows another plan, and counts from the beginning."""
        self.plan, self.changes = plan, 0

    async def make(
        self,
        operation: str,
        place: str,
        call: Coroutine[Any, Any, T],
        *,
        changes: bool = False,
        conditional: bool = False,
    ) -> T:
        """Makes a call as the plan says."""
        fault = self._next(operation, place, changes=changes)
        if fault in (Fault.UNAVAILABLE, Fault.DEATH):
            call.close()
            if fault is Fault.DEATH:
                raise DiedError(f"{operation} {place}")
            raise StorageUnavailableError(f"{place}: the storage failed")
        if fault is Fault.LATE:
            for _ in range(LATE_TURNS):
                await asyncio.sleep(0)
        answer = await call
        if fault is Fault.LOST:
            raise StorageUnavailableError(f"{place}: the storage did not answer")
        if fault is Fault.RETRIED and conditional:
            raise PreconditionError(place)
        return answer

    def _next(self, operation: str, place: str, *, changes: bool) -> Fault:
        call = Call(
            operation=operation,
            place=place,
            changes=changes,
            changes_before=self.changes,
        )
        self.changes += changes
        fault = Fault.DEATH if self._is_dead else self.plan(call)
        self._is_dead = fault is Fault.DEATH
        return fault


class FaultyBucket(KvBucket):
    """A bucket as one process sees it, whose calls follow a plan."""

    calls: Calls

    @classmethod
    async def faulty(cls, root: str, plan: Plan = no_faults) -> "FaultyBucket":
        """Returns the bucket at a root."""
        bucket = await cls.open(root)
        assert isinstance(bucket, cls)
        bucket.calls = Calls(plan)
        return bucket

    def reopened(self, plan: Plan = no_faults) -> "FaultyBucket":
        """Returns the same storage as another process sees it."""
        bucket = FaultyBucket(self._root, self._context)
        bucket.calls = Calls(plan)
        return bucket

    async def read(self, place: str) -> Stored | None:
        return await self.calls.make("read", place, super().read(place))

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        read = super().read_range(place, start, stop)
        return await self.calls.make("read_range", place, read)

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        write = super().write(place, data, condition=condition)
        return await self.calls.make(
            "write", place, write, changes=True, conditional=condition is not ALWAYS
        )

    async def settle(self, place: str) -> None:
        await self.calls.make("settle", place, super().settle(place))

    async def delete(self, place: str, *, generation: Generation | None = None) -> None:
        delete = super().delete(place, generation=generation)
        await self.calls.make(
            "delete", place, delete, changes=True, conditional=generation is not None
        )

    async def delete_below(self, prefix: str) -> None:
        delete = super().delete_below(prefix)
        await self.calls.make("delete_below", prefix, delete, changes=True)

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        return await self.calls.make("list", prefix, super().list(prefix, after=after))

    def key_space(self, *, place: str, pool: str, prefix: str = "d/") -> KeySpace:
        space = FaultyKeySpace(
            self._root, self._context, place=place, pool=pool, prefix=prefix
        )
        space.calls = self.calls
        return space


class FaultyKeySpace(KeySpace):
    """A key space of it."""

    calls: Calls

    async def take_over(
        self, shares: Sequence[Share], values: Mapping[str, bytes]
    ) -> None:
        take = super().take_over(shares, values)
        await self.calls.make("take_over", self._place, take, changes=True)

    async def contents(self) -> Contents:
        return await self.calls.make("contents", self._place, super().contents())

    async def read_aside(self) -> list[bytes]:
        return await self.calls.make("read_aside", self._place, super().read_aside())

    async def exists(self) -> bool:
        return await self.calls.make("exists", self._place, super().exists())
