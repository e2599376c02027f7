"""Parts of tables: a leaf table, and a receipt, as they come over a stream.

The rows of all parts are counted before anything is made of them, and a part that has
more than the stream announced is rejected: what is kept is in proportion to what was
announced, and what was announced to what a server takes.
"""

from typing import Final

import numpy as np

from storesvc.errors import InvalidChunkError, InvalidTreeError, LimitExceededError
from storesvc.format.chunks import InvalidChunksError, Sums, unpack_sums
from storesvc.format.grids import MAX_RANK
from storesvc.format.names import UploadName
from storesvc.format.trees import MAX_STRUCTURE_BYTES, Tree
from storesvc.save import leaf_tables
from storesvc.save.leaf_tables import MAX_LEAVES, MAX_PIECES, MAX_VALUES
from storesvc_proto.v1 import tree_pb2

MAX_TREE_BYTES: Final = 128 << 20
"""Bytes of a leaf table, and of a receipt."""

LEAF_BYTES: Final = 500
"""What a leaf takes in memory while its table is unpacked, beside the table."""

CHUNK_BYTES: Final = 200
"""What a row of a receipt takes in memory while it is checked."""

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
    """The parts of one leaf table."""

    def __init__(self, name: UploadName, leaf_count: int) -> None:
        """Begins without any.

        Args:
            name: The upload.
            leaf_count: How many leaves the stream announces.
        """
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
        """Bytes of the serialised table."""

    @property
    def weight_bytes(self) -> int:
        """What the table takes in memory while it is unpacked, about."""
        return 3 * self.size_bytes + LEAF_BYTES * self._counts["key"]

    def add(self, part: tree_pb2.LeafTable, digests: bytes = b"") -> int:
        """Adds the next part, and returns how many bytes it takes.

        Args:
            part: Of the table.
            digests: Those of its leaves; empty: it has none.

        Raises:
            InvalidTreeError: It has more rows than were announced, not each row whole,
                or other digests than those of its leaves.
            LimitExceededError: The table exceeds a limit of the server.
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
        leaf_tables.check_digests(self._name, digests, len(part.key))
        self._digests += digests
        data = part.SerializeToString(deterministic=True)
        self.size_bytes += len(data)
        check_size("leaf table", self.size_bytes)
        self._parts.append(data)
        return len(data) + len(digests)

    @property
    def digests(self) -> bytes:
        """The digests of all leaves, once all parts came; empty: there are none.

        Raises:
            InvalidTreeError: Some parts had them, and some had not.
        """
        digests = bytes(self._digests)
        leaf_tables.check_digests(self._name, digests, self._leaf_count)
        return digests

    def _check_rows(self, part: tree_pb2.LeafTable) -> None:
        """Rejects a part without all columns of its rows: columns alone may have many
        more entries than a part has rows."""
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

    def joined(self) -> bytes:
        """Returns the serialised table, once all parts came.

        Raises:
            InvalidTreeError: Leaves are missing.
        """
        leaves = self._counts["key"]
        if leaves != self._leaf_count:  # or its connection was cut: that ends it alike
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
    """The parts of one receipt."""

    def __init__(self, tree: Tree, chunk_count: int) -> None:
        """Begins without any.

        Args:
            tree: Whose chunks they are.
            chunk_count: How many rows the stream announces.

        Raises:
            InvalidChunkError: They are more than the tree has chunks.
        """
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
        """What the receipt takes in memory while it is checked, about."""
        return CHUNK_BYTES * self._rows

    def add(self, part: tree_pb2.ChunkTable) -> int:
        """Adds the next part, and returns how many bytes it takes.

        Raises:
            InvalidChunkError: It has more rows than were announced, or contradicts
                itself.
        """
        self._rows += len(part.crc32c)
        if self._rows > self._chunk_count:
            raise self._miscounted()
        sums = unpacked(part)
        self._parts.append(sums)
        return sums.nbytes

    def joined(self) -> Sums:
        """Returns all rows, once all parts came.

        Raises:
            InvalidChunkError: Rows are missing, or they are not ascending.
        """
        if self._rows != self._chunk_count:  # as for leaves
            raise self._miscounted()
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

    def _miscounted(self) -> InvalidChunkError:
        return InvalidChunkError(
            f"receipt: expected {self._chunk_count} rows as chunk_count says, got "
            f"{self._rows}; send all parts of the receipt"
        )


def unpacked(table: tree_pb2.ChunkTable) -> Sums:
    """Returns the sums that a client sent.

    Raises:
        InvalidChunkError: They contradict themselves.
    """
    try:
        return unpack_sums(table)
    except InvalidChunksError as e:
        raise InvalidChunkError(f"receipt: {e}") from e


def check_size(what: str, size: int) -> None:
    """Rejects a table that grows past the limit.

    Raises:
        LimitExceededError: It does.
    """
    if size > MAX_TREE_BYTES:
        raise LimitExceededError(
            f"{what}: expected at most {MAX_TREE_BYTES} bytes, got more"
        )
