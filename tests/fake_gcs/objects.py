"""Buckets, objects, generations and preconditions, without any I/O.

Methods never wait. Called from one thread, each request is atomic, and every read sees
the last write.

    buckets = Buckets(time.time)
    bucket = buckets.create("b1")
    bucket.insert("a", Content.of(b"x", {}), {}, Conditions(generation=0))
    bucket.read("a", Conditions()).generation
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, TypeAlias

from tests.fake_gcs.contents import Content
from tests.fake_gcs.refusals import RefusedError

Clock: TypeAlias = Callable[[], float]
"""Returns seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One version of an object."""

    content: Content
    generation: int
    metageneration: int
    created: float
    updated: float
    properties: Mapping[str, Any]
    """Properties that clients set and may change, under the names of the JSON API."""
    component_count: int | None = None
    """Number of objects that it was composed of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Preconditions on an object; 0 is the generation of an absent object."""

    generation: int | None = None
    not_generation: int | None = None
    metageneration: int | None = None
    not_metageneration: int | None = None

    def check(
        self,
        found: StoredObject | None,
        *,
        unchanged: HTTPStatus = HTTPStatus.PRECONDITION_FAILED,
    ) -> None:
        """Checks the preconditions.

        Args:
            found: The object, if there is one.
            unchanged: Status if the object has the generation that is excluded.

        Raises:
            RefusedError: A precondition does not hold.
        """
        pairs = (
            (found.generation, found.metageneration) if found is not None else (0, 0)
        )
        wanted = (self.generation, self.metageneration)
        unwanted = (self.not_generation, self.not_metageneration)
        if any(w not in (None, got) for w, got in zip(wanted, pairs, strict=True)):
            raise RefusedError(
                HTTPStatus.PRECONDITION_FAILED,
                "At least one of the pre-conditions you specified did not hold.",
            )
        if any(u == got for u, got in zip(unwanted, pairs, strict=True)):
            raise RefusedError(unchanged, "The object is the one you excluded.")


NO_CONDITIONS = Conditions()


class Bucket:
    """The objects of a bucket, by name."""

    def __init__(
        self, name: str, clock: Clock, *, seconds_between_writes: float = 0.0
    ) -> None:
        self.name = name
        self.created = clock()
        self._clock = clock
        self._seconds_between_writes = seconds_between_writes
        self._objects: dict[str, StoredObject] = {}
        self._names: list[str] = []
        self._written: dict[str, float] = {}
        self._last_generation = 0

    @property
    def names(self) -> Sequence[str]:
        """The names of all objects, in order."""
        return self._names

    def get(self, name: str) -> StoredObject | None:
        """Returns an object, if there is one."""
        return self._objects.get(name)

    def __getitem__(self, name: str) -> StoredObject:
        return self._objects[name]

    def read(
        self, name: str, conditions: Conditions, *, generation: int | None = None
    ) -> StoredObject:
        """Returns an object.

        Raises:
            RefusedError: It is absent (404), has another generation (404), fails a
                precondition (412), or has the excluded generation (304).
        """
        found = self._find(name, generation)
        # with ifGenerationMatch an absent object fails the precondition, not with 404
        if found is None and not conditions.generation:
            raise self._absent(name)
        conditions.check(found, unchanged=HTTPStatus.NOT_MODIFIED)
        assert found is not None
        return found

    def insert(
        self,
        name: str,
        content: Content,
        properties: Mapping[str, Any],
        conditions: Conditions,
        *,
        component_count: int | None = None,
    ) -> StoredObject:
        """Stores an object, replaces an existing one, and returns it.

        Raises:
            RefusedError: A precondition fails, or the last change is too recent.
        """
        if not name:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "Required parameter: name")
        conditions.check(self._objects.get(name))
        now = self._begin_change(name)
        # as in the real storage, a generation is the time in microseconds
        self._last_generation = max(self._last_generation + 1, int(now * 1e6))
        made = StoredObject(
            content=content,
            generation=self._last_generation,
            metageneration=1,
            created=now,
            updated=now,
            properties=properties,
            component_count=component_count,
        )
        if name not in self._objects:
            bisect.insort(self._names, name)
        self._objects[name] = made
        return made

    def update(
        self,
        name: str,
        properties: Callable[[StoredObject], Mapping[str, Any]],
        conditions: Conditions,
        *,
        generation: int | None = None,
    ) -> StoredObject:
        """Sets the properties of an object to the result of a function of it.

        Raises:
            RefusedError: See ``read``; or the last change is too recent.
        """
        found = self._find_to_change(name, conditions, generation)
        updated = self._objects[name] = replace(
            found,
            properties=properties(found),
            metageneration=found.metageneration + 1,
            updated=self._begin_change(name),
        )
        return updated

    def delete(
        self, name: str, conditions: Conditions, *, generation: int | None = None
    ) -> None:
        """Deletes an object.

        Raises:
            RefusedError: See ``read``; or the last change is too recent.
        """
        self._find_to_change(name, conditions, generation)
        self._begin_change(name)
        del self._objects[name]
        del self._names[bisect.bisect_left(self._names, name)]

    def _find(self, name: str, generation: int | None) -> StoredObject | None:
        found = self._objects.get(name)
        if found is None or generation in (None, found.generation):
            return found
        return None

    def _find_to_change(
        self, name: str, conditions: Conditions, generation: int | None
    ) -> StoredObject:
        found = self._find(name, generation)
        if found is None:
            raise self._absent(name)
        conditions.check(found)
        return found

    def _absent(self, name: str) -> RefusedError:
        return RefusedError(HTTPStatus.NOT_FOUND, f"No such object: {self.name}/{name}")

    def _begin_change(self, name: str) -> float:
        """Returns the time of a change, if the rate limit allows the change."""
        now = self._clock()
        if not self._seconds_between_writes:
            return now
        if now < self._written.get(name, 0.0) + self._seconds_between_writes:
            raise RefusedError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"The object {self.name}/{name} exceeded the rate limit for object "
                "mutation operations (create, update, and delete).",
            )
        self._written[name] = now
        return now


class Buckets:
    """All buckets, by name."""

    def __init__(self, clock: Clock, *, seconds_between_writes: float = 0.0) -> None:
        """Makes an empty set of buckets.

        Args:
            clock: Returns seconds since 1970.
            seconds_between_writes: Shortest time between changes of one name; the real
                storage allows about one per second.
        """
        self._clock = clock
        self._seconds_between_writes = seconds_between_writes
        self._buckets: dict[str, Bucket] = {}
        self._denied: set[str] = set()

    @property
    def all(self) -> list[Bucket]:
        """Names of all buckets, also of denied ones."""
        return list(self._buckets.values())

    def create(self, name: str) -> Bucket:
        """Returns a new bucket.

        Raises:
            RefusedError: A bucket of that name exists.
        """
        if name in self._buckets:
            raise RefusedError(HTTPStatus.CONFLICT, f"You already own bucket {name}.")
        made = self._buckets[name] = Bucket(
            name, self._clock, seconds_between_writes=self._seconds_between_writes
        )
        return made

    def get(self, name: str) -> Bucket:
        """Returns a bucket.

        Raises:
            RefusedError: It does not exist, or access to it is denied.
        """
        if name in self._denied:
            raise RefusedError(HTTPStatus.FORBIDDEN, f"Access to {name} is denied.")
        if name not in self._buckets:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"Bucket {name} does not exist.")
        return self._buckets[name]

    def deny(self, name: str) -> None:
        """Denies access to a bucket from now on."""
        self._denied.add(name)

    def allow(self, name: str) -> None:
        """Allows access to a bucket again."""
        self._denied.discard(name)
