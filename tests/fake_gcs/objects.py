"""Buckets, objects, generations and preconditions, without any I/O.

Methods never wait. Called from one thread, each request is atomic, and every read sees
the last write.

    buckets = Buckets(time.time)
    bucket = buckets.create("b1")
    bucket.insert("a", Content.of(b"x", {}), {}, Conditions(generation=0))
    bucket.read("a", Conditions()).generation
"""

import base64
import bisect
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import crc32c as crc32c_of

_REASONS: Final = {
    HTTPStatus.NOT_MODIFIED: "conditionNotMet",
    HTTPStatus.BAD_REQUEST: "invalid",
    HTTPStatus.UNAUTHORIZED: "required",
    HTTPStatus.FORBIDDEN: "forbidden",
    HTTPStatus.NOT_FOUND: "notFound",
    HTTPStatus.CONFLICT: "conflict",
    HTTPStatus.PRECONDITION_FAILED: "conditionNotMet",
    HTTPStatus.TOO_MANY_REQUESTS: "rateLimitExceeded",
    HTTPStatus.SERVICE_UNAVAILABLE: "backendError",
}


class RefusedError(Exception):
    """A request that gets an error response, and changed nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def document(self) -> dict[str, object]:
        """Body of the response."""
        return error_document(self.status, str(self))


def error_document(status: int, message: str) -> dict[str, object]:
    """Returns the body of an error response."""
    reason = _REASONS.get(HTTPStatus(status), "backendError")
    detail = {"domain": "global", "reason": reason, "message": message}
    return {"error": {"code": status, "message": message, "errors": [detail]}}


Data: TypeAlias = bytes | bytearray | memoryview

MD5_MOST_BYTES: Final = 1 << 20
"""Largest object that gets an MD5 which no client sent: an MD5 takes ten times as long
as a CRC-32C. Clients work without one, as composed objects never have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Immutable data of an object, and its checksums."""

    data: Data
    crc32c: str
    md5: str | None

    @classmethod
    def of(cls, data: Data, claims: Mapping[str, str]) -> "Content":
        """Returns data with its checksums.

        Args:
            data: The data; it is referenced, not copied.
            claims: Checksums that the client announced, by name: "crc32c", "md5".

        Raises:
            RefusedError: A checksum differs from the data's.
        """
        has_md5 = len(data) <= MD5_MOST_BYTES or "md5" in claims
        content = cls(
            data=data, crc32c=_crc32c(data), md5=_md5(data) if has_md5 else None
        )
        for name, computed in (("crc32c", content.crc32c), ("md5", content.md5)):
            claimed = claims.get(name, computed)
            if claimed != computed:
                raise RefusedError(
                    HTTPStatus.BAD_REQUEST,
                    f"{name} of the upload: expected {claimed}, got {computed}",
                )
        return content

    @classmethod
    def composed(cls, contents: list["Content"]) -> "Content":
        """Returns the concatenation of contents, without an MD5."""
        data = b"".join(content.data for content in contents)
        return cls(data=data, crc32c=_crc32c(data), md5=None)

    @property
    def hashes(self) -> dict[str, str]:
        """Checksums by name."""
        known = {"crc32c": self.crc32c}
        return known if self.md5 is None else known | {"md5": self.md5}


def _crc32c(data: Data) -> str:
    return base64.b64encode(crc32c_of.crc32c(data).to_bytes(4, "big")).decode()


def _md5(data: Data) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of the names that a listing returns."""

    prefix: str = ""
    delimiter: str = ""
    """Names that contain it after the prefix are listed as one group that ends with it.
    """
    first: str = ""
    before: str = ""
    """Exclusive upper bound of the names; empty: no bound."""

    def group(self, name: str) -> str:
        """Returns the entry for a name: the name itself, or its group."""
        if not self.delimiter:
            return name
        found = name.find(self.delimiter, len(self.prefix))
        return name if found < 0 else name[: found + len(self.delimiter)]

    def is_group(self, listed: str) -> bool:
        """Returns whether an entry is a group."""
        return bool(self.delimiter) and self.delimiter in listed[len(self.prefix) :]


@dataclass(slots=True)
class Page:
    """One page of a listing."""

    names: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    more_after: str | None = None
    """The last entry if more follow."""


def list_names(names: Sequence[str], where: Range, *, after: str, most: int) -> Page:
    """Returns the next page of a listing.

    Args:
        names: All names, sorted.
        where: Bounds of the listing.
        after: Last entry of the page before; empty: this is the first page.
        most: Most entries of the page, groups included.
    """
    page, last = Page(), after
    at = bisect.bisect_left(names, max(where.prefix, where.first))
    if after:
        at = max(at, _behind(names, where, after))
    while at < len(names) and names[at].startswith(where.prefix):
        name = names[at]
        if where.before and name >= where.before:
            break
        if len(page.names) + len(page.groups) == most:
            page.more_after = last
            break
        last = where.group(name)
        (page.groups if where.is_group(last) else page.names).append(last)
        at = _behind(names, where, last)
    return page


def _behind(names: Sequence[str], where: Range, listed: str) -> int:
    """Returns the index of the first name after an entry, or after all of its group."""
    if not where.is_group(listed):
        return bisect.bisect_right(names, listed)
    return bisect.bisect_right(names, listed, key=lambda name: name[: len(listed)])
