"""A bucket in memory that lists in pages, as one on the network."""

from storesvc.catalog import numbered
from storesvc.storage.bucket import ALWAYS, Generation, Stored, WriteCondition
from storesvc.storage.object_bucket import TensorStoreBucket


class PagedBucket(TensorStoreBucket):
    """Counts the requests that the calls of its lists would send, and their names,
    reads and writes."""

    lists = 0
    names = 0
    reads = 0
    writes = 0

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        self.writes += 1
        return await super().write(path, data, condition=condition)

    async def read(self, path: str) -> Stored | None:
        self.reads += 1
        return await super().read(path)

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        found = (await super().list(prefix, after=after))[:limit]
        self.lists += max(1, -(-len(found) // numbered.PAGE))
        self.names += len(found)
        return found

    async def list_versions(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> dict[str, Generation]:
        paths = await self.list(prefix, after=after, limit=limit)
        found = [(path, await super(PagedBucket, self).read(path)) for path in paths]
        return {path: one.generation for path, one in found if one}

    @property
    def lists_pages(self) -> bool:
        return True

    def clear(self) -> None:
        """Counts from here on."""
        self.lists = self.names = self.reads = self.writes = 0
