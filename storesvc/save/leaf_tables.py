"""Leaf tables of uploads: validated on arrival, stored in the bucket, cached in memory.

Next to the leaf table of an upload are the leaf digests of writer 0. The digests of the
other writers are compared with them.
"""

from operator import attrgetter
from typing import Final

from google.protobuf.message import DecodeError

from storesvc.byte_cache import TREES_BYTES, ByteCache
from storesvc.catalog import slots
from storesvc.errors import (
    CorruptDataError,
    InvalidItemError,
    InvalidTreeError,
    LimitExceededError,
)
from storesvc.format.checksums import DIGEST_BYTES, digest
from storesvc.format.keys import InvalidItemError as InvalidItemRowError
from storesvc.format.layout import RunPaths
from storesvc.format.names import UploadName
from storesvc.format.trees import InvalidTreeError as InvalidTableError
from storesvc.format.trees import Tree, unpack_leaves
from storesvc.offload import offload, rows_in
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

    async def parsed(self, name: UploadName, tree_digest: bytes, table: bytes) -> Tree:
        """Returns the parsed form of a serialised leaf table.

        Raises:
            InvalidTreeError: The table contradicts itself.
        InvalidItemError: An item breaks a rule.
            LimitExceededError: The table has too many leaves or chunks.
        """
        return await self._trees.get(
            tree_digest, lambda: offload(rows_in(table), _parsed, name, table)
        )

    async def write(self, name: UploadName, tree_digest: bytes, table: bytes) -> None:
        """Writes a validated leaf table into the bucket."""
        place = RunPaths(name.run).tree(name.upload, tree_digest)
        await self._bucket.write(place, table)

    async def tree(self, name: UploadName, tree_digest: bytes) -> Tree:
        """Returns the parsed leaf table of an upload.

        Raises:
            UploadNotFoundError: The upload was aborted.
            CorruptDataError: The leaf table is damaged.
        """
        return await self._trees.get(
            tree_digest, lambda: self._stored(name, tree_digest)
        )

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
        stored = await self._bucket.read(place)
        if stored is None:
            raise slots.absent(name)
        if digest(stored.data) != values_digest:
            raise CorruptDataError(f"{name}: its leaf digests are damaged")
        return stored.data

    async def _stored(self, name: UploadName, tree_digest: bytes) -> Tree:
        stored = await self._bucket.read(
            RunPaths(name.run).tree(name.upload, tree_digest)
        )
        if stored is None:
            raise slots.absent(name)
        if digest(stored.data) != tree_digest:
            raise CorruptDataError(f"{name}: its leaf table is damaged")
        return await offload(rows_in(stored.data), _parsed, name, stored.data)


def _parsed(name: UploadName, table: bytes) -> Tree:
    """Returns the parsed form of a serialised leaf table.

    Raises:
        InvalidTreeError: The table contradicts itself.
        InvalidItemError: An item breaks a rule.
        LimitExceededError: The table has too many leaves or chunks.
    """
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
    """Rejects leaf digests whose number is neither zero nor that of the leaves.

    Raises:
        InvalidTreeError: They have another number of bytes.
    """
    if digests and len(digests) != leaf_count * DIGEST_BYTES:
        raise InvalidTreeError(
            f"{name}: expected {DIGEST_BYTES} bytes of leaf_digests for each of "
            f"{leaf_count} leaves, got {len(digests)} bytes; send them with all parts "
            "of the leaf table, or with none"
        )


def check_limits(name: UploadName, table: tree_pb2.LeafTable) -> None:
    """Rejects a leaf table with more rows or values than a server accepts.

    Raises:
        LimitExceededError: A column is too long; the error names it.
    """
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
