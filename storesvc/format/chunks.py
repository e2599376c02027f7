"""Chunk tables as columns: checksums, digests and locations of stored chunks.

Columns are NumPy arrays, because a tree may have a million chunks. `plan_reads` plans
the ranges of data files that hold some chunks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import DIGEST_BYTES
from storesvc.format.names import InvalidNameError, check_data_file
from storesvc_proto.v1 import tree_pb2 as pb

MAX_PART_ROWS: Final = 32768
"""Rows of one part of a chunk table: below 2 MiB with all columns."""

MAX_VALUE: Final = 2**62
"""Maximum ordinal, offset and length."""

I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]

N = TypeVar("N", np.uint32, np.uint64)


class InvalidChunksError(ValueError):
    """A chunk table contradicts itself."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """Checksums and digests of chunks."""

    ordinal: I64
    """Ascending."""
    crc32c: NDArray[np.uint32]
    digests: U8
    """Shape (rows, 16)."""

    def __len__(self) -> int:
        return len(self.ordinal)

    @property
    def nbytes(self) -> int:
        """Bytes of the columns in memory."""
        return self.ordinal.nbytes + self.crc32c.nbytes + self.digests.nbytes

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[int, int, bytes]]) -> Self:
        """Returns the sums of ``(ordinal, crc32c, digest)`` rows, ascending."""
        raw = np.frombuffer(b"".join(digest for _, _, digest in rows), np.uint8)
        return cls(
            ordinal=np.array([ordinal for ordinal, _, _ in rows], np.int64),
            crc32c=np.array([crc32c for _, crc32c, _ in rows], np.uint32),
            digests=raw.reshape(-1, DIGEST_BYTES),
        )

    def take(self, rows: "I64 | slice") -> "Sums":
        return Sums(
            ordinal=self.ordinal[rows],
            crc32c=self.crc32c[rows],
            digests=self.digests[rows],
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChunkLocations:
    """Locations of chunks; each row belongs to the same row of a ``Sums``."""

    files: tuple[str, ...]
    """Data files, relative to the pool."""
    file: I64
    """Index into ``files``."""
    offset: I64
    """In bytes."""
    length: I64
    """In bytes, checksum included."""

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[str, int, int]]) -> Self:
        """Returns the locations of ``(file, offset, length)`` rows."""
        numbers: dict[str, int] = {}
        file = [numbers.setdefault(name, len(numbers)) for name, _, _ in rows]
        return cls(
            files=tuple(numbers),
            file=np.array(file, np.int64),
            offset=np.array([offset for _, offset, _ in rows], np.int64),
            length=np.array([length for _, _, length in rows], np.int64),
        )

    def take(self, rows: I64) -> "ChunkLocations":
        return ChunkLocations(
            files=self.files,
            file=self.file[rows],
            offset=self.offset[rows],
            length=self.length[rows],
        )

    @property
    def nbytes(self) -> int:
        """Approximate bytes of the columns in memory."""
        names = sum(map(len, self.files))
        return self.file.nbytes + self.offset.nbytes + self.length.nbytes + names

    @property
    def ends(self) -> I64:
        """End of the last chunk in each file, in bytes; 0 for a file without chunks."""
        ends = np.zeros(len(self.files), np.int64)
        np.maximum.at(ends, self.file, self.offset + self.length)
        return ends

    def rows(self) -> Iterator[tuple[str, int, int]]:
        """Yields ``(file, offset, length)`` of each row."""
        columns = (self.file, self.offset, self.length)
        for file, offset, length in zip(*(c.tolist() for c in columns), strict=True):
            yield self.files[file], offset, length


def same_sums(a: Sums, b: Sums, rows: I64) -> NDArray[np.bool_]:
    """Compares each row of `a` with a row of `b`; returns a mask of the equal ones."""
    same: NDArray[np.bool_] = (a.crc32c == b.crc32c[rows]) & (
        a.digests == b.digests[rows]
    ).all(axis=1)
    return same


def pack_sums(sums: Sums) -> Iterator[pb.ChunkTable]:
    """Yields the table of a receipt in parts, at least one."""
    for part in map(sums.take, _parts(len(sums))):
        yield pb.ChunkTable(
            ordinal=part.ordinal.tolist(),
            crc32c=part.crc32c.tolist(),
            digests=[part.digests.tobytes()],
        )


def pack_placed(
    sums: Sums, places: ChunkLocations, *, with_ordinals: bool
) -> Iterator[pb.ChunkTable]:
    """Yields the table of stored chunks in parts, at least one."""
    for rows in _parts(len(sums)):
        yield pb.ChunkTable(
            ordinal=sums.ordinal[rows].tolist() if with_ordinals else (),
            crc32c=sums.crc32c[rows].tolist(),
            digests=[sums.digests[rows].tobytes()],
            file=places.file[rows].tolist(),
            offset=places.offset[rows].tolist(),
            length=places.length[rows].tolist(),
            files=places.files if rows.start == 0 else (),
        )


def unpack_sums(table: pb.ChunkTable, *, count: int | None = None) -> Sums:
    """Returns the checksums of a table.

    Args:
        count: Number of chunks of a manifest, whose rows have no ordinals.
    """
    rows = len(table.crc32c)
    if count is not None and count != rows:
        raise InvalidChunksError(f"expected {count} rows, got {rows} checksums")
    # Before any conversion, which takes a multiple of the table's memory.
    expected = len(table.ordinal) if count is None else count
    raw = np.frombuffer(b"".join(table.digests), np.uint8)
    if rows != expected or len(raw) != DIGEST_BYTES * expected:
        raise InvalidChunksError(
            f"expected {expected} rows, got {rows} checksums and {len(raw)} bytes of "
            "digests"
        )
    ordinal = _column(table.ordinal, "ordinal") if count is None else np.arange(rows)
    crc32c = _convert_numbers(table.crc32c, np.uint32)
    if np.any(np.diff(ordinal) <= 0):
        raise InvalidChunksError("expected strictly ascending ordinals")
    return Sums(ordinal=ordinal, crc32c=crc32c, digests=raw.reshape(-1, DIGEST_BYTES))


def unpack_places(table: pb.ChunkTable) -> ChunkLocations:
    """Returns the locations of a table's chunks."""
    columns = (table.file, table.offset, table.length)
    if any(len(column) != len(table.crc32c) for column in columns):
        raise InvalidChunksError("the columns of locations differ in length")
    file = _column(table.file, "file")
    offset = _column(table.offset, "offset")
    length = _column(table.length, "length")
    if len(file) and file.max() >= len(table.files):
        raise InvalidChunksError("a location names a file that is not listed")
    try:
        for name in table.files:
            check_data_file(name)
    except InvalidNameError as e:
        raise InvalidChunksError(str(e)) from e
    return ChunkLocations(
        files=tuple(table.files), file=file, offset=offset, length=length
    )


def merge(parts: Sequence[tuple[Sums, ChunkLocations]]) -> tuple[Sums, ChunkLocations]:
    """Merges chunks in the order of their ordinals; omits files without chunks."""
    parts = parts or [_EMPTY]
    files: dict[str, int] = {}
    renumbered = []
    for _, places in parts:
        new = np.zeros(len(places.files), np.int64)
        for number in np.unique(places.file).tolist():
            new[number] = files.setdefault(places.files[number], len(files))
        renumbered.append(new[places.file])
    ordinal = np.concatenate([s.ordinal for s, _ in parts])
    order = np.argsort(ordinal, kind="stable")
    sums = Sums(
        ordinal=ordinal[order],
        crc32c=np.concatenate([s.crc32c for s, _ in parts])[order],
        digests=np.concatenate([s.digests for s, _ in parts])[order],
    )
    places = ChunkLocations(
        files=tuple(files),
        file=np.concatenate(renumbered)[order],
        offset=np.concatenate([p.offset for _, p in parts])[order],
        length=np.concatenate([p.length for _, p in parts])[order],
    )
    return sums, places


_EMPTY: Final = (Sums.of_rows([]), ChunkLocations.of_rows([]))


def _column(values: Sequence[int], name: str) -> I64:
    """Converts a column of unsigned numbers; rejects those whose sums could
    overflow."""
    column = _convert_numbers(values, np.uint64)
    if len(column) and column.max() > MAX_VALUE:
        raise InvalidChunksError(f"column {name}: {column.max()} is too large")
    return column.astype(np.int64)


def _convert_numbers(values: Sequence[int], dtype: type[N]) -> NDArray[N]:
    """Converts numbers to an array, a part at a time: NumPy first makes a Python object
    of each number, and holds the interpreter lock while it does so."""
    array = np.empty(len(values), dtype)
    for at in range(0, len(values), MAX_PART_ROWS):
        array[at : at + MAX_PART_ROWS] = values[at : at + MAX_PART_ROWS]
    return array


def _parts(rows: int) -> Iterator[slice]:
    for at in range(0, max(1, rows), MAX_PART_ROWS):
        yield slice(at, at + MAX_PART_ROWS)


READ_BYTES: Final = 16 << 20
"""Maximum bytes of neighbouring chunks that are read together."""


@dataclass(frozen=True, slots=True)
class Read:
    """A range of a data file that holds whole chunks, in the order of their offsets."""

    file: str
    start: int
    stop: int
    chunks: tuple[int, ...]
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset of each chunk in the file. Consecutive, unless gaps were requested."""


def plan_reads(
    places: ChunkLocations,
    chunks: I64,
    *,
    at_most: int | None = None,
    gap_bytes: int = 0,
) -> Iterator[Read]:
    """Yields the reads that fetch chunks, ordered by file and offset.

    Args:
        at_most: Maximum bytes of a read of more than one chunk; None for READ_BYTES.
        gap_bytes: Maximum bytes between two chunks that are read together.
    """
    columns = (column[chunks] for column in (places.file, places.offset, places.length))
    file, offset, length = columns
    order = np.lexsort((offset, file))
    chunks, file, offset, length = (x[order] for x in (chunks, file, offset, length))
    gaps = offset[1:] - (offset[:-1] + length[:-1])
    apart = (file[1:] != file[:-1]) | (gaps < 0) | (gaps > gap_bytes)
    ends = [*(np.flatnonzero(apart) + 1).tolist(), len(order)]
    stops, at = offset + length, 0
    for end in ends if len(order) else ():
        while at < end:
            # The last neighbour that still fits; the first one always does.
            limit = int(offset[at]) + (at_most or READ_BYTES)
            to = at + int(np.searchsorted(stops[at:end], limit, side="right"))
            to = max(to, at + 1)
            yield Read(
                places.files[file[at]],
                int(offset[at]),
                int(stops[to - 1]),
                tuple(chunks[at:to].tolist()),
                tuple(length[at:to].tolist()),
                tuple(offset[at:to].tolist()),
            )
            at = to
