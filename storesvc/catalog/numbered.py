"""Lists objects that are named by numbers, as the slots of a run and the journal of a
namespace, or by ids, as the runs of a namespace and the tags of a run.

A bucket lists names in ascending order, a page per request, and the newest object is
the last one. So no list begins at the first name if a number near the end is known, and
where none is, the last page is searched: the distance to the next probe doubles until a
probe finds nothing, and is then halved. That takes some 2 log2(pages) requests. Objects
that are named by ids are listed from the last one of the page before on.

>>> slots = NumberedObjects(bucket, places.checkpoints, places.checkpoint)
>>> (await slots.list_end(after=120_000)).numbers
[120500, 121000]
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from itertools import compress
from typing import Final, TypeVar

from storesvc.format.layout import parse_number
from storesvc.format.names import MAX_STEP
from storesvc.storage.bucket import Bucket, Generation
from storesvc.storage.requests import gather_each

T = TypeVar("T")

PAGE: Final = 1000
"""Names in one response of a bucket."""

_SUFFIX: Final = ".binpb"

MAX_NUMBER: Final = MAX_STEP
"""The highest number."""


@dataclass(frozen=True, slots=True)
class Span:
    """The numbers that exist from a first one on."""

    first: int
    found: dict[int, Generation]
    """Their generations, by ascending numbers; ``UNLISTED`` where lists have none."""
    end: str | None = None
    """Path up to which they are complete; None: there are no more."""

    @property
    def numbers(self) -> list[int]:
        """The numbers, ascending."""
        return [*self.found]

    @property
    def stride(self) -> int:
        """Mean distance of two numbers, rounded up; 0: unknown."""
        numbers, gaps = self.numbers, len(self.found) - 1
        return -(-(numbers[-1] - numbers[0]) // gaps) if gaps > 0 else 0


@dataclass(frozen=True, slots=True)
class NumberedObjects:
    """The objects below a prefix that are named by numbers of 20 digits."""

    bucket: Bucket
    prefix: str
    path: Callable[[int], str]
    """Returns the path of a number."""

    async def list(self, *, after: int = -1, limit: int | None = None) -> Span:
        """Returns the numbers after a given one; at least as many as a limit if there
        are more.

        Args:
            after: The number; -1 returns them from the first one.
            limit: Number of them that the caller needs; None: a page.
        """
        start = self.path(after) if after >= 0 else ""
        return await self._list(after + 1, start, PAGE if limit is None else limit)

    async def list_between(
        self, first: int, stop: int, *, limit: int | None = None
    ) -> Span:
        """Returns all numbers from one on and below another one.

        Args:
            stop: The number after the highest one.
            limit: Number of them that the caller expects; None: a page.
        """
        page = await self.list(after=first - 1, limit=limit)
        found = page.found
        while page.end is not None and page.end < self.path(stop - 1):
            page = await self._list(first, page.end, PAGE)
            found |= page.found
        return Span(first, {number: found[number] for number in found if number < stop})

    async def list_end(self, *, after: int = -1) -> Span:
        """Returns the last numbers, of those after a given one: one page, or a part of
        it; none only if none exists."""
        low, high, step = await self.list(after=after), MAX_NUMBER, 0
        while low.end is not None:
            # 1. Upwards until a probe finds nothing, then by halves. The last pages
            #    one after another.
            last = next(reversed(low.found)) if low.found else MAX_NUMBER
            size = last - low.first + 1
            step = max(2 * step, 2 * size) if high == MAX_NUMBER else (high - last) // 2
            if step < size or last + step >= MAX_NUMBER:
                page = await self._list(last + 1, low.end, PAGE)
                if not page.found and page.end is None:
                    break
            else:
                page = await self.list(after=last + step)
                if not page.found and page.end is None:
                    high = last + step
                    continue
            low = page if page.found else Span(low.first, low.found, page.end)
        return Span(low.first, low.found)

    async def _list(self, first: int, start: str, limit: int) -> Span:
        """Returns the numbers of the paths after a given one."""
        listed = await self.bucket.list_versions(self.prefix, after=start, limit=limit)
        numbers = ((self._parse(path), version) for path, version in listed.items())
        found = {number: version for number, version in numbers if number is not None}
        # A storage that does not list in pages returns more than the limit: all.
        return Span(first, found, [*listed][-1] if len(listed) == limit else None)

    def _parse(self, path: str) -> int | None:
        name = path.removeprefix(self.prefix)
        return None if "/" in name else parse_number(name)


async def list_ids(
    bucket: Bucket, prefix: str, parse: Callable[[str], T | None], *, after: str
) -> AsyncGenerator[list[T], None]:
    """Yields the parsed paths of the objects ``<prefix><id>.binpb`` in pages, ascending
    by id.

    Args:
        parse: Parses a path; returns None for a foreign object.
        after: Yields only those with an id after this one.
    """

    def get_id(path: str) -> str:
        return path[len(prefix) : -len(_SUFFIX)]

    start = f"{prefix}{after}" if after else ""
    while True:
        listed = await bucket.list(prefix, after=start, limit=PAGE)
        paths, is_last = [path for path in listed if parse(path)], len(listed) != PAGE
        if not is_last:
            # A bucket orders paths, in which "a-b.binpb" comes before "a.binpb": ids
            # with which the highest one begins may follow on a later page.
            start, highest = listed[-1], max(map(get_id, paths), default="")
            shorter = (highest[:length] for length in range(1, len(highest)))
            places = [f"{prefix}{id_}{_SUFFIX}" for id_ in shorter]
            places = [path for path in places if path > start and parse(path)]
            paths += compress(places, await gather_each(bucket.read, places))
        paths = sorted((path for path in paths if get_id(path) > after), key=get_id)
        if paths:
            yield [found for path in paths if (found := parse(path)) is not None]
            after = get_id(paths[-1])
        if is_last:
            return
