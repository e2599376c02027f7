"""Damage: how a stored checkpoint differs from what was saved.

These functions take what was read and return what is wrong with it. Damage of a
chunk is told once, by the first cause that shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from storesvc.format import zarr
from storesvc.format.checksums import crc32c, digest
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import maintenance_service_pb2 as api

Kind: TypeAlias = "api.Damage.Kind.ValueType"

MISSING = api.Damage.KIND_MISSING
CHECKSUM = api.Damage.KIND_CHECKSUM
DIGEST = api.Damage.KIND_DIGEST
KEY_SPACE = api.Damage.KIND_KEY_SPACE
FILE_TABLE = api.Damage.KIND_FILE_TABLE

Place: TypeAlias = tuple[str, int, int]
"""Data file, relative to the pool; offset; length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Something that is not what was saved."""

    key: str
    """Of the leaf; "": the checkpoint as a whole."""
    index: tuple[int, ...] = ()
    """Of the chunk in the leaf's grid."""
    kind: Kind
    message: str
    chunk: int | None = None
    """The ordinal of the chunk; None: it is of the leaf, or of the checkpoint, as a
    whole."""


def of_chunk(tree: Tree, chunk: int, kind: Kind, what: str) -> Damage:
    """Returns the damage of a chunk."""
    row, within = tree.locate(chunk)
    return Damage(
        key=tree.leaves[row].key,
        index=tree.grids[row].index(within),
        kind=kind,
        message=f"{tree.describe_chunk(chunk)}: {what}",
        chunk=chunk,
    )


def of_leaf(leaf: Leaf, what: str) -> Damage:
    """Returns the damage of a leaf in the key space."""
    return Damage(key=leaf.key, kind=KEY_SPACE, message=f"leaf {leaf.key!r}: {what}")


def of_chunks(
    manifest: Manifest, chunks: Sequence[int], data: bytes
) -> Iterator[Damage]:
    """Yields what is wrong with chunks.

    Args:
        manifest: The checkpoint's.
        chunks: Their ordinals.
        data: As they are stored, back to back.
    """
    view, at = memoryview(data), 0
    for chunk in chunks:
        stored = view[at : at + int(manifest.places.length[chunk])]
        at += len(stored)
        elements = stored[: -zarr.CHECKSUM_BYTES]
        carried = int.from_bytes(stored[-zarr.CHECKSUM_BYTES :], "little")
        expected, got = int(manifest.sums.crc32c[chunk]), crc32c(elements)
        if got != expected:
            what = f"expected bytes with the checksum {expected:08x}, got {got:08x}"
            yield of_chunk(manifest.tree, chunk, CHECKSUM, what)
        elif carried != expected:
            what = f"expected it to carry the checksum {expected:08x}, got "
            yield of_chunk(manifest.tree, chunk, CHECKSUM, what + f"{carried:08x}")
        elif digest(elements) != manifest.sums.digests[chunk].tobytes():
            wanted = manifest.sums.digests[chunk].tobytes().hex()
            what = f"expected bytes with the digest {wanted}, got "
            yield of_chunk(manifest.tree, chunk, DIGEST, what + digest(elements).hex())


def of_key_space(
    manifest: Manifest, shown: Mapping[str, Place], known: NDArray[np.bool_]
) -> Iterator[Damage]:
    """Yields how a key space differs from the manifest.

    Args:
        manifest: The checkpoint's.
        shown: Where the key space says that the value of each key lies.
        known: Which chunks are damaged otherwise, and are not told again.
    """
    tree, places = manifest.tree, manifest.places
    rows = zip(
        places.file.tolist(),
        places.offset.tolist(),
        places.length.tolist(),
        strict=True,
    )
    shown_keys = set(shown)
    for chunk, (key, (file, offset, length)) in enumerate(
        zip(_chunk_keys(tree), rows, strict=True)
    ):
        shown_keys.discard(key)
        place = (places.files[file], offset, length)
        if shown.get(key) != place and not known[chunk]:
            what = f"expected the key space to show it at {_text(place)}, got "
            yield of_chunk(tree, chunk, KEY_SPACE, what + _text(shown.get(key)))
    for leaf in tree.leaves:
        shown_keys.discard(zarr.metadata_key(leaf.key))
    for key in sorted(shown_keys):
        yield Damage(
            key=_leaf_key(tree, key),
            kind=KEY_SPACE,
            message=f"the key space shows {key!r}, which the manifest does not hold",
        )


def of_file_table(
    manifest: Manifest, data: bytes | None, *, expected: bytes
) -> list[Damage]:
    """Returns what is wrong with a file table: one damage, or none.

    Args:
        manifest: The checkpoint's.
        data: The file table as it lies; None: it is missing.
        expected: Its digest.
    """
    problem = _table_problem(manifest, data, expected)
    if not problem:
        return []
    return [Damage(key="", kind=FILE_TABLE, message=f"the file table: {problem}")]


class Metadata:
    """What the key space holds of the leaves of a tree beside their chunks."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.keys = [zarr.metadata_key(leaf.key) for leaf in tree.leaves]
        """Where the key space holds it, by row."""
        self._known: dict[tuple[object, ...], bytes] = {}

    def expected(self, row: int) -> bytes:
        """Returns the metadata of a leaf; leaves of one kind share it."""
        leaf = self._tree.leaves[row]
        parts = (leaf.shape, leaf.chunk_shape, leaf.dtype)
        if parts not in self._known:
            self._known[parts] = zarr.metadata_bytes(*parts)
        return self._known[parts]

    def unshown(self, shown: Mapping[str, Place]) -> dict[int, Damage]:
        """Returns, by row, the leaves of which no metadata can be read."""
        found = {}
        for row, leaf in enumerate(self._tree.leaves):
            place = shown.get(self.keys[row])
            length = len(self.expected(row))
            if place is None:
                found[row] = of_leaf(leaf, "the key space does not show its zarr.json")
            elif place[2] != length:
                what = f"expected a zarr.json of {length} bytes, got {place[2]}"
                found[row] = of_leaf(leaf, what)
        return found

    def unread(self, row: int, why: str) -> Damage:
        """Returns the damage of a leaf whose metadata cannot be read."""
        return of_leaf(self._tree.leaves[row], f"its zarr.json: {why}")

    def of_value(self, rows: Sequence[int], data: bytes) -> Iterator[Damage]:
        """Yields those of some leaves whose metadata, which they share, is not what it
        must be."""
        for row in rows:
            if data != self.expected(row):
                what = "its zarr.json does not describe what the manifest does"
                yield of_leaf(self._tree.leaves[row], what)


def _table_problem(manifest: Manifest, data: bytes | None, expected: bytes) -> str:
    if data is None:
        return "it is missing"
    if digest(data) != expected:
        wanted = expected.hex()
        return f"expected bytes with the digest {wanted}, got {digest(data).hex()}"
    try:
        table = pb.FileTable.FromString(data)
        named = dict(zip(table.file, table.chunk_bytes, strict=True))
    except (DecodeError, ValueError) as e:
        return f"it cannot be read: {e}"
    places = manifest.places
    bytes_in = np.bincount(places.file, places.length, len(places.files))
    # files that it names besides hold nodes and metadata of the key space
    needed = dict.fromkeys(named, 0)
    needed |= zip(places.files, bytes_in.astype(int).tolist(), strict=True)
    for file, count in needed.items():
        if named.get(file) != count:
            got = "nothing" if file not in named else f"{named[file]} bytes"
            return f"expected {count} bytes of chunks in {file}, got {got}"
    return ""


def _chunk_keys(tree: Tree) -> Iterator[str]:
    """The keys of all chunks, in the order of their ordinals."""
    for leaf, grid in zip(tree.leaves, tree.grids, strict=True):
        for index in product(*map(range, grid.counts)):
            yield zarr.chunk_key(leaf.key, index)


def _leaf_key(tree: Tree, key: str) -> str:
    """The leaf that a key of the key space seems to belong to; else itself."""
    leaf = key
    while leaf and leaf not in tree.by_key:
        leaf = leaf.rpartition("/")[0]
    return leaf if leaf in tree.by_key else key


def _text(place: Place | None) -> str:
    if place is None:
        return "nothing"
    file, offset, length = place
    return f"{length} bytes at {offset} of {file}"
