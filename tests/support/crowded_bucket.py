"""A bucket whose uploads have more data files than are there: names are simulated."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pytest

from storesvc.gc.run_state import RunReader
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.collecting_process import PLACES
from tests.support.faulty_bucket import FaultyBucket


class CrowdedBucket(FaultyBucket):
    """A bucket whose uploads have more data files than are there."""

    files: int = 0
    """Additional data files of each upload."""
    deleted: int = 0
    pages: Iterator[str] = iter(())

    async def list(
        self, prefix: str, *, after: str = "", limit: int | None = None
    ) -> list[str]:
        if limit is None or not self.files:
            return await super().list(prefix, after=after, limit=limit)
        if not after:
            self.pages = self._names(await super().list(prefix))
        return list(itertools.islice(self.pages, limit))

    def _names(self, listed: Sequence[str]) -> Iterator[str]:
        yield from listed
        pooled = [path for path in listed if path.startswith(PLACES.pool)]
        for upload in sorted({PLACES.parse_upload(path) or "" for path in pooled}):
            yield from (f"{PLACES.pool}{file}" for file in _crowd(upload, self.files))

    async def delete(self, path: str, **kwargs: bytes | None) -> None:
        self.deleted += 1
        await super().delete(path, **kwargs)  # type: ignore[arg-type]  # a generation


def _crowd(upload: str, count: int) -> Iterator[str]:
    return (f"{upload}/f{number:031x}" for number in range(count))


def name_all(
    patch: pytest.MonkeyPatch, count: int, but: Mapping[str, int] | None = None
) -> None:
    """Lets each file table name the additional data files of its upload."""
    read = RunReader.file_table

    async def named(self: RunReader, place: str) -> pb.FileTable | None:
        table = await read(self, place)
        if table is not None:
            upload = PLACES.parse_upload(place) or ""
            table.file.extend(_crowd(upload, (but or {}).get(upload, count)))
        return table

    patch.setattr(RunReader, "file_table", named)
