"""Leaf tables of uploads: validated on arrival, stored in the bucket, cached in memory.

Next to the leaf table of an upload are the leaf digests of writer 0. The digests of the
other writers are compared with them.

A leaf table or a receipt arrives in parts. Rows are counted before they are parsed. A
part with more rows than the stream announced is rejected, so memory stays in proportion
to the announced size, and the announced size is bounded by the limits of the server.
"""

from operator import attrgetter
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from storesvc.catalog import slots
from storesvc.concurrency import TREES_BYTES, ByteCache, offload, rows_in
from storesvc.errors import (
    CorruptDataError,
    InvalidChunkError,
    InvalidItemError,
    InvalidTreeError,
    LimitExceededError,
)
from storesvc.format.checksums import DIGEST_BYTES, digest
from storesvc.format.chunks import InvalidChunksError, Sums, unpack_sums
from storesvc.format.grids import MAX_RANK
from storesvc.format.keys import InvalidItemError as InvalidItemRowError
from storesvc.format.layout import RunPaths
from storesvc.format.names import UploadName
from storesvc.format.trees import MAX_STRUCTURE_BYTES, Tree, unpack_leaves
from storesvc.format.trees import InvalidTreeError as InvalidTableError
from storesvc.storage.bucket import Bucket
from storesvc_proto.v1 import tree_pb2

MAX_LEAVES: Final = 1_000_000
"""Maximum leaves of a checkpoint."""

MAX_VALUES: Final = 4096
"""Maximum distinct dtypes, shardings or PRNG implementations of a checkpoint."""

MAX_PIECES: Final = 4096
"""Maximum pieces of the structure document, each of 4 KiB in the largest document."""

MAX_CHUNKS: Final = 4_000_000
"""Maximum chunks of a checkpoint."""


class LeafTables:
    """Reads and writes the leaf tables of uploads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # Keyed by digest, so every process can fill its own cache.
        self._trees: ByteCache[bytes, Tree] = ByteCache(
            TREES_BYTES, size_of=attrgetter("memory_bytes")
        )

    async def parse_table(
        self, name: UploadName, tree_digest: bytes, table: bytes
    ) -> Tree:
        return await self._trees.get(
            tree_digest, lambda: offload(rows_in(table), _parse_table, name, table)
        )

    async def write(self, name: UploadName, tree_digest: bytes, table: bytes) -> None:
        place = RunPaths(name.run).tree(name.upload, tree_digest)
        await self._bucket.write(place, table)

    async def tree(self, name: UploadName, tree_digest: bytes) -> Tree:
        """Returns the parsed leaf table of an upload.

        Raises:
            UploadNotFoundError: The upload was aborted.
            CorruptDataError: The leaf table is damaged.
        """

        async def read() -> Tree:
            place = RunPaths(name.run).tree(name.upload, tree_digest)
            table = await self._read(name, place, tree_digest, "leaf table is")
            return await offload(rows_in(table), _parse_table, name, table)

        return await self._trees.get(tree_digest, read)

    async def write_values(self, name: UploadName, digests: bytes) -> None:
        """Writes the leaf digests of writer 0, unless there are none."""
        if not digests:
            return
        await self._bucket.write(
            RunPaths(name.run).values(name.upload, digest(digests)), digests
        )

    async def values(self, name: UploadName, values_digest: bytes) -> bytes:
        """Returns the leaf digests of writer 0.

        Raises:
            UploadNotFoundError: The upload was aborted.
            CorruptDataError: The leaf digests are damaged.
        """
        place = RunPaths(name.run).values(name.upload, values_digest)
        return await self._read(name, place, values_digest, "leaf digests are")

    async def _read(
        self, name: UploadName, place: str, expected: bytes, noun: str
    ) -> bytes:
        """Returns an object of an upload that is named by its digest."""
        stored = await self._bucket.read(place)
        if stored is None:
            raise slots.absent(name)
        if digest(stored.data) != expected:
            raise CorruptDataError(f"{name}: its {noun} damaged")
        return stored.data


def _parse_table(name: UploadName, table: bytes) -> Tree:
    try:
        columns = tree_pb2.LeafTable.FromString(table)
        check_limits(name, columns)
        tree = unpack_leaves(columns)
    except (InvalidTableError, DecodeError) as e:
        raise InvalidTreeError(f"{name}: {e}") from e
    except InvalidItemRowError as e:
        raise InvalidItemError(f"{name}: {e}", item=e.item) from e
    if tree.chunk_count > MAX_CHUNKS:
        raise LimitExceededError(
            f"{name}: expected at most {MAX_CHUNKS} chunks, got {tree.chunk_count}"
        )
    return tree


def check_digests(
    name: UploadName, digests: bytes | bytearray, leaf_count: int
) -> None:
    """Rejects leaf digests whose number is neither zero nor that of the leaves."""
    if digests and len(digests) != leaf_count * DIGEST_BYTES:
        raise InvalidTreeError(
            f"{name}: expected {DIGEST_BYTES} bytes of leaf_digests for each of "
            f"{leaf_count} leaves, got {len(digests)} bytes; send them with all parts "
            "of the leaf table, or with none"
        )


def check_limits(name: UploadName, table: tree_pb2.LeafTable) -> None:
    """Rejects a leaf table with more rows or values than a server accepts."""
    for column, limit in (
        ("key", MAX_LEAVES),
        ("dtypes", MAX_VALUES),
        ("shardings", MAX_VALUES),
        ("prng_impls", MAX_VALUES),
    ):
        rows = len(getattr(table, column))
        if rows > limit:
            raise LimitExceededError(
                f"{name}: column {column}: expected at most {limit} rows, got {rows}"
            )


MAX_TREE_BYTES: Final = 128 << 20
"""Maximum bytes of a leaf table, and of a receipt."""

LEAF_BYTES: Final = 500
"""Estimated memory per leaf while a leaf table is parsed, in addition to the table."""

CHUNK_BYTES: Final = 200
"""Estimated memory per row while a receipt is checked."""

_ROW_COLUMNS: Final = (
    "key",
    "path_kinds",
    "kind",
    "dtype",
    "rank",
    "sharding",
    "prng_impl",
)
_SIZE_COLUMNS: Final = ("shape", "chunk_shape")
_VALUE_COLUMNS: Final = ("dtypes", "shardings", "prng_impls")


class LeafParts:
    """Collects the parts of one leaf table."""

    def __init__(self, name: UploadName, leaf_count: int) -> None:
        """Creates a collector without parts."""
        self._name = name
        self._leaf_count = leaf_count
        leaves = min(leaf_count, MAX_LEAVES)
        self._limits = {
            **dict.fromkeys(_ROW_COLUMNS, leaves),
            **dict.fromkeys(_SIZE_COLUMNS, leaves * MAX_RANK),
            **dict.fromkeys(_VALUE_COLUMNS, MAX_VALUES),
            "structure": MAX_PIECES,
        }
        self._counts = dict.fromkeys(self._limits, 0)
        self._structure_bytes = 0
        self._parts: list[bytes] = []
        self._digests = bytearray()
        self.size_bytes = 0
        """Bytes of the serialised leaf table."""

    @property
    def weight_bytes(self) -> int:
        """Estimated memory of the leaf table while it is parsed."""
        return 3 * self.size_bytes + LEAF_BYTES * self._counts["key"]

    def add(self, part: tree_pb2.LeafTable, digests: bytes = b"") -> int:
        """Adds the next part, and returns its size in bytes.

        Args:
            digests: Digests of the leaves of the part; empty: none.

        Raises:
            InvalidTreeError: The part has more rows than announced, an incomplete
                row, or digests whose number is not that of its leaves.
            LimitExceededError: The leaf table exceeds a limit of the server.
        """
        self._check_rows(part)
        for column, limit in self._limits.items():
            self._counts[column] += len(getattr(part, column))
            if self._counts[column] > limit:
                raise self._too_many(column, limit)
        self._structure_bytes += sum(map(len, part.structure))
        if self._structure_bytes > MAX_STRUCTURE_BYTES:
            raise InvalidTreeError(
                f"{self._name}: structure: expected at most {MAX_STRUCTURE_BYTES} "
                f"bytes, got {self._structure_bytes}"
            )
        check_digests(self._name, digests, len(part.key))
        self._digests += digests
        data = part.SerializeToString(deterministic=True)
        self.size_bytes += len(data)
        check_size("leaf table", self.size_bytes)
        self._parts.append(data)
        return len(data) + len(digests)

    @property
    def digests(self) -> bytes:
        """The digests of all leaves, after the last part; empty: none were sent.

        Raises:
            InvalidTreeError: Only some of the parts had digests.
        """
        digests = bytes(self._digests)
        check_digests(self._name, digests, self._leaf_count)
        return digests

    def _check_rows(self, part: tree_pb2.LeafTable) -> None:
        """Rejects a part of which a column has more entries than it has rows."""
        rows = len(part.key)
        for column in _ROW_COLUMNS:
            if len(getattr(part, column)) != rows:
                raise InvalidTreeError(
                    f"{self._name}: column {column}: expected {rows} rows, got "
                    f"{len(getattr(part, column))}"
                )
        for column in _SIZE_COLUMNS:
            if len(getattr(part, column)) > rows * MAX_RANK:
                raise InvalidTreeError(
                    f"{self._name}: column {column}: expected at most "
                    f"{rows * MAX_RANK} entries for {rows} leaves, got "
                    f"{len(getattr(part, column))}"
                )

    def join(self) -> bytes:
        """Returns the serialised leaf table, after the last part."""
        leaves = self._counts["key"]
        if leaves != self._leaf_count:  # a dropped connection ends the stream alike
            raise InvalidTreeError(
                f"{self._name}: expected {self._leaf_count} leaves as leaf_count says, "
                f"got {leaves}; send all parts of the leaf table"
            )
        parts, self._parts = self._parts, []
        return b"".join(parts)

    def _too_many(
        self, column: str, limit: int
    ) -> InvalidTreeError | LimitExceededError:
        got = self._counts[column]
        is_counted = column in _ROW_COLUMNS or column in _SIZE_COLUMNS
        if is_counted and self._leaf_count <= MAX_LEAVES:
            return InvalidTreeError(
                f"{self._name}: column {column}: expected at most {limit} entries for "
                f"{self._leaf_count} leaves as leaf_count says, got {got}"
            )
        return LimitExceededError(
            f"{self._name}: column {column}: expected at most {limit} entries, got "
            f"{got}"
        )


class SumParts:
    """Collects the parts of one receipt."""

    def __init__(self, tree: Tree, chunk_count: int) -> None:
        """Creates a collector without parts."""
        if chunk_count > tree.chunk_count:
            raise InvalidChunkError(
                f"receipt: chunk_count: the tree has {tree.chunk_count} chunks, got "
                f"{chunk_count}"
            )
        self._chunk_count = chunk_count
        self._parts: list[Sums] = []
        self._rows = 0

    @property
    def weight_bytes(self) -> int:
        """Estimated memory of the receipt while it is checked."""
        return CHUNK_BYTES * self._rows

    def add(self, part: tree_pb2.ChunkTable) -> int:
        """Adds the next part, and returns its size in bytes.

        Raises:
            InvalidChunkError: The part has more rows than announced, or contradicts
                itself.
        """
        self._rows += len(part.crc32c)
        if self._rows > self._chunk_count:
            raise self._count_error()
        sums = unpack_client_sums(part)
        self._parts.append(sums)
        return sums.nbytes

    def join(self) -> Sums:
        """Returns the checksums of all rows, after the last part."""
        if self._rows != self._chunk_count:  # see LeafParts.joined
            raise self._count_error()
        parts, self._parts = self._parts, []
        empty = Sums.of_rows([])
        sums = Sums(
            ordinal=np.concatenate([empty.ordinal, *(p.ordinal for p in parts)]),
            crc32c=np.concatenate([empty.crc32c, *(p.crc32c for p in parts)]),
            digests=np.concatenate([empty.digests, *(p.digests for p in parts)]),
        )
        if np.any(sums.ordinal[1:] <= sums.ordinal[:-1]):
            raise InvalidChunkError("receipt: expected strictly ascending ordinals")
        return sums

    def _count_error(self) -> InvalidChunkError:
        return InvalidChunkError(
            f"receipt: expected {self._chunk_count} rows as chunk_count says, got "
            f"{self._rows}; send all parts of the receipt"
        )


def unpack_client_sums(table: tree_pb2.ChunkTable) -> Sums:
    try:
        return unpack_sums(table)
    except InvalidChunksError as e:
        raise InvalidChunkError(f"receipt: {e}") from e


def check_size(what: str, size: int) -> None:
    """Rejects a table that is larger than the limit."""
    if size > MAX_TREE_BYTES:
        raise LimitExceededError(
            f"{what}: expected at most {MAX_TREE_BYTES} bytes, got more"
        )
