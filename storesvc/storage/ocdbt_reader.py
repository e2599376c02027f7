"""Reads the OCDBT key space of a checkpoint: where the value of each key is stored.

``storesvc.format.ocdbt`` writes it; TensorStore decodes it here. TensorStore is given
bytes that the bucket has read, and opens no file itself.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import tensorstore as ts

from storesvc.errors import CorruptDataError
from storesvc.format.layout import ROOT
from storesvc.storage.bucket import translate_errors
from storesvc.storage.location import MEMORY_DRIVER
from storesvc.storage.remote import endpoint_in_environment
from storesvc.storage.requests import await_future

if TYPE_CHECKING:
    from storesvc.storage.object_bucket import TensorStoreBucket

_NODE: Final = "node"
"""Name of a node's object in the memory that TensorStore decodes it from."""


class ValueLocation(NamedTuple):
    """The range of a data file that holds a value."""

    file: str
    """Relative to the pool."""
    offset: int
    length: int


class KeySpace:
    """An OCDBT database whose data files are in a pool."""

    def __init__(self, bucket: "TensorStoreBucket", *, path: str, pool: str) -> None:
        self._bucket = bucket
        self._storage = bucket.opened.storage
        self._path = path
        self._pool = pool

    async def places(self) -> dict[str, ValueLocation] | None:
        """Returns the range of each key's value; None if there is no key space.

        Raises:
            CorruptDataError: A node is damaged or missing.
        """
        stored = await self._bucket.read(self._path + ROOT)
        if stored is None:
            return None
        manifest = await self._decode_node(ROOT, stored.data, None)
        root = manifest["versions"][-1]["root"].get("location")
        found: dict[str, ValueLocation] = {}
        nodes = [] if root is None else [(root, b"")]
        seen: set[str] = set()
        while nodes:  # of the B-tree, depth first
            location, prefix = nodes.pop()
            if location in seen:
                raise CorruptDataError(
                    f"{self._path}: expected a tree of nodes, got one that refers to "
                    f"the node {location} twice"
                )
            seen.add(location)
            node = await self._node(location)
            with translate_errors(self._storage, self._path):
                below = await asyncio.to_thread(_add_values, node, prefix, found)
            nodes += reversed(below)
        return found

    async def _node(self, location: str) -> Any:
        with translate_errors(self._storage, self._path):
            file, offset, length = _parse_location(location)
        path = f"{self._pool}{file}"
        data = await self._bucket.read_range(path, offset, offset + length)
        return await self._decode_node(_NODE, data, f"btreenode::{_NODE}:0:{length}")

    async def _decode_node(self, name: str, data: bytes, location: str | None) -> Any:
        """Decodes the bytes of the manifest or of a node."""
        context = ts.Context()
        with translate_errors(self._storage, self._path):
            opening = ts.KvStore.open({"driver": MEMORY_DRIVER}, context=context)
            memory = await await_future(opening)
            await await_future(memory.write(name, data))
            return await await_future(ts.ocdbt.dump(memory, location, context=context))

    def opened(self) -> ts.KvStore:
        """Opens the key space with TensorStore's own driver."""
        _, root, context, _ = self._bucket.opened
        spec = {
            "driver": "ocdbt",
            "base": (root / self._pool).spec().to_json(),
            "manifest": (root / self._path).spec().to_json(),
        }
        with endpoint_in_environment(self._storage):
            return ts.KvStore.open(spec, context=context).result()


def _add_values(
    node: Any, prefix: bytes, found: dict[str, ValueLocation]
) -> list[tuple[str, bytes]]:
    """Adds the values of a node to `found`; returns its child nodes, with the prefix of
    their keys."""
    below = []
    for entry in node["entries"]:
        if "location" in entry:
            shared = prefix + entry.get("subtree_common_prefix", b"")
            below.append((entry["location"], shared))
        else:
            key = (prefix + entry["key"]).decode()
            found[key] = _parse_location(entry["indirect_value"])
    return below


def _parse_location(value: str) -> ValueLocation:
    """Parses ``<kind>:<base>:<file>:<offset>:<length>``."""
    _, _, file, offset, length = value.split(":")
    return ValueLocation(file, int(offset), int(length))
