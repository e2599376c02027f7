"""Decides what is damaged in a checkpoint, and how two checkpoints differ.

A damage is a difference between what was read from the bucket and the manifest. A
damaged chunk is reported once, with the first cause that was found. `Tally` cuts the
damages into reports; its memory is bounded, however much is damaged: damages beyond a
maximum are only counted.

Two checkpoints are compared by their manifests alone. Leaves are matched by key. If
shape and dtype agree, the digests of the chunks decide whether the bytes agree. This
requires the same chunk grid on both sides; with different grids the result is UNKNOWN.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from storesvc.format import dtypes
from storesvc.format.checksums import crc32c, digest
from storesvc.format.chunks import I64
from storesvc.format.keys import ENCODED_KINDS, describe, is_item, kind_text
from storesvc.format.manifests import Manifest
from storesvc.format.ocdbt import ValueLocation
from storesvc.format.trees import Leaf, Tree
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import checkpoint_service_pb2
from storesvc_proto.v1 import maintenance_service_pb2 as api

Kind: TypeAlias = "checkpoint_service_pb2.LeafDifference.Kind.ValueType"

ADDED = checkpoint_service_pb2.LeafDifference.KIND_ADDED
REMOVED = checkpoint_service_pb2.LeafDifference.KIND_REMOVED
SHAPE = checkpoint_service_pb2.LeafDifference.KIND_SHAPE
DTYPE = checkpoint_service_pb2.LeafDifference.KIND_DTYPE
CONTENT = checkpoint_service_pb2.LeafDifference.KIND_CONTENT
UNKNOWN = checkpoint_service_pb2.LeafDifference.KIND_UNKNOWN


@dataclass(frozen=True, slots=True)
class Difference:
    """One leaf that differs."""

    kind: Kind
    before: Leaf | None
    after: Leaf | None
    """At least one of the two is set."""
    changed_chunks: int = 0
    """Number of chunks whose bytes differ, if they can be compared."""

    @property
    def is_item(self) -> bool:
        """True if it is a difference of an item, not of a leaf of the tree."""
        return is_item(self.leaf.key)

    @property
    def leaf(self) -> Leaf:
        """The leaf in the second checkpoint; a removed leaf in the first."""
        leaf = self.after or self.before
        assert leaf is not None
        return leaf


def differences(before: Manifest, after: Manifest) -> list[Difference]:
    """Returns the leaves and items of two checkpoints that differ, ascending by key."""
    found: dict[str, Difference] = {}
    comparable: list[tuple[int, int]] = []
    old, new = before.tree, after.tree
    for leaf in old.leaves:
        if leaf.key not in new.by_key:
            found[leaf.key] = Difference(REMOVED, leaf, None)
    for row, leaf in enumerate(new.leaves):
        at = old.by_key.get(leaf.key)
        if at is None:
            found[leaf.key] = Difference(ADDED, None, leaf)
        elif kind := _outer_kind(old.leaves[at], leaf):
            count = leaf.grid.count if kind == CONTENT else 0
            found[leaf.key] = Difference(kind, old.leaves[at], leaf, count)
        else:
            comparable.append((at, row))
    changed = changed_chunks(before, after, comparable).tolist()
    for (at, row), count in zip(comparable, changed, strict=True):
        if count:
            leaf = new.leaves[row]
            found[leaf.key] = Difference(CONTENT, old.leaves[at], leaf, count)
    return [found[key] for key in sorted(found)]


def changed_chunks(
    before: Manifest, after: Manifest, rows: Sequence[tuple[int, int]]
) -> I64:
    """Returns the number of different chunks for pairs of leaves with the same grid.

    Args:
        rows: For each pair the row of the leaf in each manifest.

    Returns:
        One count (int64) for each pair.
    """
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    counts = np.diff(after.tree.first_chunk)[pairs[:, 1]]
    of_pair = np.repeat(np.arange(len(pairs)), counts)
    ends = np.cumsum(counts)
    within = np.arange(len(of_pair)) - np.repeat(ends - counts, counts)
    one = before.sums.digests[_first(before.tree, pairs[:, 0])[of_pair] + within]
    other = after.sums.digests[_first(after.tree, pairs[:, 1])[of_pair] + within]
    differ = (one != other).any(axis=1)
    return np.bincount(of_pair[differ], minlength=len(pairs)).astype(np.int64)


def dtype_text(leaf: Leaf) -> str:
    """Returns the dtype of a leaf; for PRNG keys with their implementation; for encoded
    values their kind."""
    if leaf.kind in ENCODED_KINDS:
        return kind_text(leaf.kind)
    return f"key<{leaf.prng_impl}>" if leaf.prng_impl else leaf.dtype


def logical_shape(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of a leaf; for PRNG keys without the words of their data."""
    return leaf.shape[:-1] if leaf.prng_impl else leaf.shape


def _outer_kind(before: Leaf, after: Leaf) -> "Kind | None":
    """Returns the first difference of two leaves apart from their bytes, or None."""
    if logical_shape(before) != logical_shape(after):
        # The number of bytes of an encoded value is part of its content.
        if {before.kind, after.kind} <= ENCODED_KINDS:
            return CONTENT if before.kind == after.kind else DTYPE
        return SHAPE
    if dtype_text(before) != dtype_text(after):
        return DTYPE
    if before.chunk_shape != after.chunk_shape and 0 not in after.shape:
        return UNKNOWN
    return None


def _first(tree: Tree, rows: I64) -> I64:
    first: I64 = tree.first_chunk[rows]
    return first


DamageKind: TypeAlias = "api.Damage.Kind.ValueType"

MISSING = api.Damage.KIND_MISSING
CHECKSUM = api.Damage.KIND_CHECKSUM
DIGEST = api.Damage.KIND_DIGEST
KEY_SPACE = api.Damage.KIND_KEY_SPACE
FILE_TABLE = api.Damage.KIND_FILE_TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One difference between a stored checkpoint and its manifest."""

    key: str
    """Key of the leaf; "": the checkpoint as a whole."""
    index: tuple[int, ...] = ()
    """Index of the chunk in the grid of the leaf."""
    kind: DamageKind
    message: str
    chunk: int | None = None
    """Ordinal of the chunk; None: the leaf or the checkpoint as a whole."""


def chunk_damage(tree: Tree, chunk: int, kind: DamageKind, what: str) -> Damage:
    row, within = tree.locate(chunk)
    return Damage(
        key=tree.leaves[row].key,
        index=tree.grids[row].index(within),
        kind=kind,
        message=f"{tree.describe_chunk(chunk)}: {what}",
        chunk=chunk,
    )


def leaf_damage(leaf: Leaf, what: str) -> Damage:
    return Damage(key=leaf.key, kind=KEY_SPACE, message=f"{describe(leaf.key)}: {what}")


def chunk_damages(
    manifest: Manifest, chunks: Sequence[int], data: bytes
) -> Iterator[Damage]:
    """Yields the damages of chunks, at most one for each.

    Each chunk carries its CRC-32C in its last 4 bytes; the manifest has the CRC-32C and
    the digest of the bytes before them.

    Args:
        data: Their stored bytes, back to back.
    """
    view, at = memoryview(data), 0
    for chunk in chunks:
        stored = view[at : at + int(manifest.places.length[chunk])]
        at += len(stored)
        elements = stored[: -dtypes.CHECKSUM_BYTES]
        carried = int.from_bytes(stored[-dtypes.CHECKSUM_BYTES :], "little")
        expected, got = int(manifest.sums.crc32c[chunk]), crc32c(elements)
        if got != expected:
            what = f"expected bytes with the checksum {expected:08x}, got {got:08x}"
            yield chunk_damage(manifest.tree, chunk, CHECKSUM, what)
        elif carried != expected:
            what = f"expected it to carry the checksum {expected:08x}, got "
            yield chunk_damage(manifest.tree, chunk, CHECKSUM, what + f"{carried:08x}")
        elif digest(elements) != manifest.sums.digests[chunk].tobytes():
            wanted = manifest.sums.digests[chunk].tobytes().hex()
            what = f"expected bytes with the digest {wanted}, got "
            what += digest(elements).hex()
            yield chunk_damage(manifest.tree, chunk, DIGEST, what)


def key_space_damages(
    manifest: Manifest, shown: Mapping[str, ValueLocation], known: NDArray[np.bool_]
) -> Iterator[Damage]:
    """Yields the differences between a key space and the manifest.

    Args:
        shown: Location of the value of each key, according to the key space.
        known: For each ordinal whether its chunk has a damage already; such a chunk is
            not reported again.
    """
    tree, places = manifest.tree, manifest.places
    rows = zip(
        places.file.tolist(),
        places.offset.tolist(),
        places.length.tolist(),
        strict=True,
    )
    keys = (  # in the order of the ordinals
        dtypes.chunk_key(leaf.key, grid.index(number))
        for leaf, grid in zip(tree.leaves, tree.grids, strict=True)
        for number in range(grid.count)
    )
    shown_keys = set(shown)
    for chunk, (key, (file, offset, length)) in enumerate(zip(keys, rows, strict=True)):
        shown_keys.discard(key)
        place = (places.files[file], offset, length)
        if shown.get(key) != place and not known[chunk]:
            what = f"expected the key space to show it at {_text(place)}, got "
            yield chunk_damage(tree, chunk, KEY_SPACE, what + _text(shown.get(key)))
    for leaf in tree.leaves:
        shown_keys.discard(dtypes.metadata_key(leaf.key))
    for key in sorted(shown_keys):
        yield Damage(
            key=_leaf_key(tree, key),
            kind=KEY_SPACE,
            message=f"the key space shows {key!r}, which the manifest does not hold",
        )


def file_table_damages(
    manifest: Manifest, data: bytes | None, *, expected: bytes
) -> list[Damage]:
    """Returns the damage of a file table: one, or none.

    Args:
        data: Stored bytes of the file table; None: it is missing.
    """
    problem = _table_problem(manifest, data, expected)
    if not problem:
        return []
    return [Damage(key="", kind=FILE_TABLE, message=f"the file table: {problem}")]


class LeafMetadata:
    """The ``zarr.json`` of the leaves in the key space, checked against the leaf
    table."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.keys = [dtypes.metadata_key(leaf.key) for leaf in tree.leaves]
        """Keys of the ``zarr.json`` in the key space, by row of the leaf."""
        self._known: dict[tuple[object, ...], bytes] = {}

    def expected(self, row: int) -> bytes:
        """Returns the ``zarr.json`` of a leaf; equal leaves share the bytes."""
        leaf = self._tree.leaves[row]
        parts = (leaf.shape, leaf.chunk_shape, leaf.dtype)
        if parts not in self._known:
            self._known[parts] = dtypes.metadata_bytes(*parts)
        return self._known[parts]

    def unshown(self, shown: Mapping[str, ValueLocation]) -> dict[int, Damage]:
        """Returns a damage for each leaf whose ``zarr.json`` cannot be read, by row."""
        found = {}
        for row, leaf in enumerate(self._tree.leaves):
            place = shown.get(self.keys[row])
            length = len(self.expected(row))
            if place is None:
                found[row] = leaf_damage(
                    leaf, "the key space does not show its zarr.json"
                )
            elif place.length != length:
                what = f"expected a zarr.json of {length} bytes, got {place.length}"
                found[row] = leaf_damage(leaf, what)
        return found

    def unread(self, row: int, why: str) -> Damage:
        """Returns the damage of a leaf whose ``zarr.json`` cannot be read."""
        return leaf_damage(self._tree.leaves[row], f"its zarr.json: {why}")

    def check(self, rows: Sequence[int], data: bytes) -> Iterator[Damage]:
        """Yields the damages of leaves that share a ``zarr.json`` with wrong bytes."""
        for row in rows:
            if data != self.expected(row):
                what = "its zarr.json does not describe what the manifest does"
                yield leaf_damage(self._tree.leaves[row], what)


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
    # Files that it names in addition hold nodes and metadata of the key space.
    needed = dict.fromkeys(named, 0)
    needed |= zip(places.files, bytes_in.astype(int).tolist(), strict=True)
    for file, count in needed.items():
        if named.get(file) != count:
            got = "nothing" if file not in named else f"{named[file]} bytes"
            return f"expected {count} bytes of chunks in {file}, got {got}"
    return ""


def _leaf_key(tree: Tree, key: str) -> str:
    """Returns the leaf that a key of the key space belongs to; none: the key itself."""
    leaf = key
    while leaf and leaf not in tree.by_key:
        leaf = leaf.rpartition("/")[0]
    return leaf if leaf in tree.by_key else key


def _text(place: tuple[str, int, int] | None) -> str:
    if place is None:
        return "nothing"
    file, offset, length = place
    return f"{length} bytes at {offset} of {file}"


MAX_DAMAGES: Final = 10_000
"""Maximum damages of a checkpoint that are reported one by one."""

DAMAGES_A_REPORT: Final = 100
"""Maximum damages of a report: it fits a message even with the longest keys."""


@dataclass(frozen=True, slots=True)
class Report:
    """The progress of a verification since it began."""

    chunk_count: int
    """Chunks read so far."""
    stored_bytes: int
    """Stored bytes of these chunks."""
    damages: tuple[Damage, ...]
    """Damages found since the last report."""


class Tally:
    """The result of a verification, as far as it has not been reported."""

    def __init__(self, chunk_count: int) -> None:
        self.damaged = np.zeros(chunk_count, np.bool_)
        """For each ordinal whether its chunk is damaged, reported or not."""
        self._chunk_count = 0
        self._stored_bytes = 0
        self._found: deque[Damage] = deque()
        self._reported_count = 0
        self._first_excess: list[Damage] = []
        self._excess_count = 0

    def add(self, found: Iterable[Damage]) -> None:
        """Adds damages; beyond ``MAX_DAMAGES`` only counts them."""
        for damage in found:
            if damage.chunk is not None:
                self.damaged[damage.chunk] = True
            if self._reported_count < MAX_DAMAGES:
                self._found.append(damage)
                self._reported_count += 1
            else:
                self._first_excess = self._first_excess or [damage]
                self._excess_count += 1

    def advance(self, chunk_count: int, stored_bytes: int) -> None:
        """Adds chunks that were read."""
        self._chunk_count += chunk_count
        self._stored_bytes += stored_bytes

    def close(self) -> None:
        """Adds one damage that stands for all beyond ``MAX_DAMAGES``."""
        for first in self._first_excess:
            message = (
                f"{self._excess_count} more damages, beginning with {first.message}"
            )
            summary = Damage(
                key=first.key, index=first.index, kind=first.kind, message=message
            )
            self._found.append(summary)

    def reports(self) -> Iterator[Report]:
        """Yields all that was not reported yet, in one report or more."""
        while True:
            count = min(len(self._found), DAMAGES_A_REPORT)
            damages = tuple(self._found.popleft() for _ in range(count))
            yield Report(self._chunk_count, self._stored_bytes, damages)
            if not self._found:
                return
