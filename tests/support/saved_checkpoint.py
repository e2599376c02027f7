"""A checkpoint, its files, and the damages that a verification finds."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tensorstore as ts

import storesvc_client as store
from storesvc.format.checksums import digest
from storesvc.format.layout import RunPaths
from storesvc.format.manifests import Manifest, unpack_manifest
from storesvc.format.names import RunName
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support import stored_records

CHUNKS = 5
"""Chunks of the leaf "x", all in one data file, in the order of their ordinals."""

Found = list[tuple[str, tuple[int, ...], str]]


@dataclass
class Saved:
    """A checkpoint, and its files."""

    root: Path
    name: RunName

    @property
    def places(self) -> RunPaths:
        return RunPaths(self.name)

    @property
    def folder(self) -> Path:
        return self.root / self.places.root

    @property
    def record(self) -> pb.CheckpointRecord:
        place = self.slot.relative_to(self.root).as_posix()
        return stored_records.read(self.root, place, pb.CheckpointRecord)

    def put(self, record: pb.CheckpointRecord) -> None:
        """Replaces the record in the slot."""
        place = self.slot.relative_to(self.root).as_posix()
        stored_records.write(self.root, place, record)

    @property
    def slot(self) -> Path:
        (slot,) = (self.folder / "checkpoints").iterdir()
        return slot

    @property
    def manifest(self) -> Manifest:
        (file,) = (self.folder / "manifests").iterdir()
        data = file.read_bytes()
        return unpack_manifest(data, size_bytes=len(data), expected=digest(data))

    @property
    def tree(self) -> Path:
        """Path of the root of the key space."""
        record = self.record
        return self.root / self.places.key_space(record.upload, record.attempt)

    def file(self, chunk: int) -> Path:
        places = self.manifest.places
        return self.root / self.places.pool / places.files[int(places.file[chunk])]

    def range(self, chunk: int) -> slice:
        places = self.manifest.places
        start = int(places.offset[chunk])
        return slice(start, start + int(places.length[chunk]))

    def change(self, chunk: int, change: Callable[[bytearray], object]) -> None:
        """Changes the stored bytes of a chunk, in place."""
        file = self.file(chunk)
        data = bytearray(file.read_bytes())
        stored = data[self.range(chunk)]
        change(stored)
        data[self.range(chunk)] = stored
        file.write_bytes(data)

    def show(self, key: str, value: bytes | None) -> None:
        """Changes the content of the key space, as another tool would."""

        async def change() -> None:
            bucket = await TensorStoreBucket.open(self.root.as_uri())
            record, places = self.record, self.places
            space = bucket.key_space(
                path=places.key_space(record.upload, record.attempt), pool=places.pool
            )
            await asyncio.to_thread(lambda: space.opened().write(key, value).result())

        asyncio.run(change())


def found_in(found: store.Verification) -> Found:
    return [(damage.key, damage.index, damage.kind) for damage in found.damages]


def of_chunks(kind: str, *chunks: int) -> Found:
    return [("x", (chunk,), kind) for chunk in chunks]


def node_ranges(saved: Saved) -> list[tuple[Path, slice]]:
    """Returns the files and byte ranges of the nodes of the key space."""
    context = ts.Context()
    pool = saved.root / saved.places.pool

    def opened(path: Path) -> ts.KvStore:
        return ts.KvStore.open(
            {"driver": "file", "path": f"{path}/"}, context=context
        ).result()

    root = ts.ocdbt.dump(opened(saved.tree), context=context).result()
    locations = [root["versions"][-1]["root"]["location"]]
    found = []
    for location in locations:
        _, _, file, offset, length = location.split(":")
        found.append((pool / file, slice(int(offset), int(offset) + int(length))))
        node = ts.ocdbt.dump(opened(pool), location, context=context).result()
        locations += [x["location"] for x in node["entries"] if "location" in x]
    return found


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)
