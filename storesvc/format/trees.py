"""Leaf tables as values: the leaves of a tree, the items next to it, and the ordinals
of their chunks.

``pack_leaves`` encodes leaves as the columns of ``LeafTable``; ``unpack_leaves``
decodes them and checks every rule of ``tree.proto``, so that no other code has to.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from sys import getsizeof
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from storesvc.format import dtypes as zarr
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Grid, shape_problem
from storesvc.format.keys import (
    ENCODED_KINDS,
    MAX_ENCODED_BYTES,
    InvalidKeyError,
    check_items,
    check_keys,
    count_tree_rows,
    describe,
    fits_key,
    is_item,
    parse_item_key,
)
from storesvc_proto.v1 import tree_pb2 as pb

MAX_PART_ROWS: Final = 4096
"""Rows of one part of a leaf table: below 2 MiB with keys of usual length."""

MAX_PART_BYTES: Final = 2 << 20
"""Maximum bytes of one part of a table on the wire."""

MAX_CHUNK_BYTES: Final = 64 << 20
"""Maximum bytes of a chunk's elements that any server accepts."""

MAX_STRUCTURE_BYTES: Final = 16 << 20
"""Maximum bytes of the client's document about a tree."""

PRNG_IMPLS: Final = MappingProxyType({"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4})
"""PRNG implementations of jax, and the words (uint32) of their keys."""

PYTHON_DTYPES: Final = frozenset({"bool", "int64", "float64", "complex128"})
"""Element types of stored Python numbers."""

_STRUCTURE_PIECE_BYTES: Final = 1 << 20

_COLUMNS: Final = ("path_kinds", "kind", "dtype", "rank", "sharding", "prng_impl")
"""Columns of a leaf table with one entry per row, besides ``key``."""

_LEAF_MEMORY_BYTES: Final = 250
_GRID_MEMORY_BYTES: Final = 100
_SIZE_MEMORY_BYTES: Final = 110
"""Measured memory of a leaf without its key, of a grid that no other leaf has, and of
each dimension of such a grid, in the grid and in the leaf."""

_COLUMN_MEMORY_BYTES: Final = 16
"""Memory of a leaf's first chunk and chunk length."""

_SCALARS: Final = frozenset({pb.LEAF_KIND_HOST_SCALAR, pb.LEAF_KIND_PYTHON_SCALAR})

I64: TypeAlias = NDArray[np.int64]

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


class InvalidTreeError(ValueError):
    """A leaf table contradicts itself."""


# A tree has many leaves, and few shapes.
_grid: Final = lru_cache(maxsize=1024)(Grid)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSharding:
    """The sharding of a leaf on its devices when it was saved."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...]
    """Mesh axes that split each leading dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One row of a leaf table."""

    key: str
    path_kinds: str
    kind: "pb.LeafKind.ValueType"
    dtype: str
    shape: tuple[int, ...]
    """Shape of the stored array: for PRNG keys, of their key data."""
    chunk_shape: tuple[int, ...]
    sharding: SavedSharding | None = None
    prng_impl: str | None = None

    @property
    def grid(self) -> Grid:
        return _grid(self.shape, self.chunk_shape, DTYPES[self.dtype].itemsize)

    def is_cut_as(self, other: "Leaf") -> bool:
        """Returns whether equally numbered chunks hold the same elements of both."""
        return (self.shape, self.chunk_shape, self.dtype) == (
            other.shape,
            other.chunk_shape,
            other.dtype,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StoredLengths:
    """Looks up the bytes of each chunk of a tree as stored.

    It takes memory for each leaf, not for each chunk: a request of a hundred bytes may
    describe a tree of millions of chunks.
    """

    _first_chunk: I64
    _lengths: I64
    """Stored bytes of each chunk, by leaf."""

    @overload
    def __getitem__(self, chunks: int) -> int: ...
    @overload
    def __getitem__(self, chunks: I64) -> I64: ...
    def __getitem__(self, chunks: int | I64) -> int | I64:
        """Returns the bytes of one chunk, or of an array of chunks, by ordinal."""
        rows = np.searchsorted(self._first_chunk, chunks, side="right") - 1
        lengths: I64 = self._lengths[rows]
        return int(lengths) if isinstance(chunks, int) else lengths

    def all(self) -> I64:
        """Returns the bytes of each chunk of the tree."""
        return np.repeat(self._lengths, np.diff(self._first_chunk))

    def sum(self) -> int:
        """Returns the bytes of all chunks."""
        return int((self._lengths * np.diff(self._first_chunk)).sum())


@dataclass(frozen=True)
class Tree:
    """The rows of a leaf table: the leaves of a tree, then the items next to it, both
    in the order of their keys."""

    leaves: tuple[Leaf, ...]
    structure: bytes = field(default=b"", repr=False)
    """The client's document about the tree; empty if there is none."""
    grids: tuple[Grid, ...] = field(init=False, repr=False)
    chunk_count: int = field(init=False)
    """Number of chunks of all leaves; exact, even beyond the size of any array."""

    def __post_init__(self) -> None:
        grids = tuple(leaf.grid for leaf in self.leaves)
        object.__setattr__(self, "grids", grids)
        object.__setattr__(self, "chunk_count", sum(g.count for g in grids))

    def is_cut_as(self, other: "Tree") -> bool:
        """Returns whether equal ordinals are chunks of the same elements in both
        trees."""
        return len(self.leaves) == len(other.leaves) and all(
            a.key == b.key and a.is_cut_as(b)
            for a, b in zip(self.leaves, other.leaves, strict=True)
        )

    @cached_property
    def tree_count(self) -> int:
        """Number of leaves of the tree itself; the rows after them are items."""
        return count_tree_rows([leaf.key for leaf in self.leaves])

    @property
    def item_count(self) -> int:
        """Number of distinct names of items."""
        rows = self.leaves[self.tree_count :]
        return len({parse_item_key(row.key).item for row in rows})

    @cached_property
    def first_chunk(self) -> I64:
        """Ordinal of each leaf's first chunk, followed by the number of chunks."""
        counts = accumulate((g.count for g in self.grids), initial=0)
        return np.fromiter(counts, np.int64, len(self.leaves) + 1)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(g.leaf_bytes for g in self.grids)

    @cached_property
    def by_key(self) -> dict[str, int]:
        """Row of each key."""
        return {leaf.key: row for row, leaf in enumerate(self.leaves)}

    @cached_property
    def lengths(self) -> "StoredLengths":
        """Stored bytes of each chunk, checksum included."""
        length = [g.chunk_bytes + zarr.CHECKSUM_BYTES for g in self.grids]
        return StoredLengths(self.first_chunk, np.array(length, np.int64))

    @cached_property
    def stored_lengths(self) -> I64:
        """The ``lengths`` as an array, for a client that needs all of them."""
        return self.lengths.all()

    @cached_property
    def memory_bytes(self) -> int:
        """Approximate memory of the tree and of its cached properties, if
        ``unpack_leaves`` made it, which shares equal values between leaves."""
        grids = {id(grid): len(grid.shape) for grid in self.grids}
        return (
            _LEAF_MEMORY_BYTES * len(self.leaves)
            + sum(getsizeof(leaf.key) for leaf in self.leaves)
            + _GRID_MEMORY_BYTES * len(grids)
            + _SIZE_MEMORY_BYTES * sum(grids.values())
            + _COLUMN_MEMORY_BYTES * len(self.leaves)
            + len(self.structure)
        )

    def locate(self, chunk: int) -> tuple[int, int]:
        """Returns the row of a chunk's leaf, and the chunk's number in the leaf."""
        # The method: for one number, np.searchsorted takes three times as long.
        row = int(self.first_chunk.searchsorted(chunk, side="right")) - 1
        return row, chunk - int(self.first_chunk[row])

    def chunk_key(self, chunk: int) -> str:
        row, within = self.locate(chunk)
        return zarr.chunk_key(self.leaves[row].key, self.grids[row].index(within))

    def locate_all(self, chunks: I64) -> tuple[I64, I64]:
        """Returns the results of ``locate`` for an array of chunks."""
        rows = np.searchsorted(self.first_chunk, chunks, side="right") - 1
        return rows, chunks - self.first_chunk[rows]

    def chunk_keys(self, chunks: I64) -> list[str]:
        rows, within = self.locate_all(chunks)
        return [
            zarr.chunk_key(self.leaves[row].key, self.grids[row].index(n))
            for row, n in zip(rows.tolist(), within.tolist(), strict=True)
        ]

    def describe_chunk(self, chunk: int) -> str:
        row, within = self.locate(chunk)
        return f"{describe(self.leaves[row].key)} chunk {within}"


def pack_leaves(tree: Tree) -> Iterator[bytes]:
    """Yields the serialised leaf table of a tree, in parts."""
    dtypes = {n: i for i, n in enumerate(sorted({x.dtype for x in tree.leaves}))}
    shardings = _number_values(x.sharding for x in tree.leaves)
    impls = _number_values(x.prng_impl for x in tree.leaves)
    for at in range(0, max(1, len(tree.leaves)), MAX_PART_ROWS):
        rows = tree.leaves[at : at + MAX_PART_ROWS]
        part = pb.LeafTable(
            key=[x.key for x in rows],
            path_kinds=[x.path_kinds for x in rows],
            kind=[x.kind for x in rows],
            dtype=[dtypes[x.dtype] for x in rows],
            rank=[len(x.shape) for x in rows],
            shape=[n for x in rows for n in x.shape],
            chunk_shape=[n for x in rows for n in x.chunk_shape],
            sharding=[shardings[x.sharding] for x in rows],
            prng_impl=[impls[x.prng_impl] for x in rows],
        )
        if at == 0:
            part.dtypes.extend(dtypes)
            part.shardings.extend(
                pb.Sharding(
                    axis_names=s.axis_names,
                    axis_sizes=s.axis_sizes,
                    spec=[pb.DimensionAxes(axes=axes) for axes in s.spec],
                )
                for s in shardings
                if s
            )
            part.prng_impls.extend(s for s in impls if s)
        yield part.SerializeToString(deterministic=True)
    for at in range(0, len(tree.structure), _STRUCTURE_PIECE_BYTES):
        piece = tree.structure[at : at + _STRUCTURE_PIECE_BYTES]
        yield pb.LeafTable(structure=[piece]).SerializeToString(deterministic=True)


def unpack_leaves(table: pb.LeafTable) -> Tree:
    """Returns the tree that a leaf table describes.

    Raises:
        InvalidTreeError: The table breaks a rule of ``tree.proto``.
        InvalidItemError: It breaks a rule of items.
    """
    _check_columns(table)
    unknown = set(table.dtypes) - set(DTYPES)
    if unknown:
        raise InvalidTreeError(
            f"column dtypes: expected dtypes of the format, got {min(unknown)[:40]!r}"
        )
    tree = Tree(tuple(_unpack_rows(table)), b"".join(table.structure))
    check_items(tree.leaves[tree.tree_count :])
    return tree


def _unpack_rows(table: pb.LeafTable) -> Iterator[Leaf]:
    shardings = [None, *map(_unpack_sharding, table.shardings)]
    impls = [None, *table.prng_impls]
    dtypes = list(table.dtypes)
    # Values that many leaves share are checked once, and kept once.
    checked: dict[tuple[object, ...], Leaf] = {}
    texts: dict[str, str] = {}
    sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes, chunk_shapes = tuple(table.shape), tuple(table.chunk_shape)
    at = 0
    for key, path_kinds, kind, dtype, rank, sharding, impl in zip(
        *(getattr(table, column) for column in ("key", *_COLUMNS)), strict=True
    ):
        shape, chunk_shape = shapes[at : at + rank], chunk_shapes[at : at + rank]
        at += rank
        form = (kind, dtype, shape, chunk_shape, sharding, impl)
        like = checked.get(form)
        leaf = Leaf(
            key=key,
            path_kinds=texts.setdefault(path_kinds, path_kinds),
            kind=kind,
            dtype=like.dtype if like else _entry(dtypes, dtype, "dtype"),
            shape=like.shape if like else sizes.setdefault(shape, shape),
            chunk_shape=(
                like.chunk_shape if like else sizes.setdefault(chunk_shape, chunk_shape)
            ),
            sharding=(
                like.sharding if like else _entry(shardings, sharding, "sharding")
            ),
            prng_impl=like.prng_impl if like else _entry(impls, impl, "prng_impl"),
        )
        if like is None or not _fits_key(leaf):
            _check_leaf(leaf)
        checked.setdefault(form, leaf)
        yield leaf


def _check_columns(table: pb.LeafTable) -> None:
    """Rejects columns that are too long, too short or out of order."""
    rows = len(table.key)
    for name in _COLUMNS:
        if len(getattr(table, name)) != rows:
            raise InvalidTreeError(
                f"column {name}: expected {rows} rows, got {len(getattr(table, name))}"
            )
    tree_rows = count_tree_rows(table.key)
    early = next(filter(is_item, table.key[:tree_rows]), None)
    if early is not None:
        raise InvalidTreeError(f"{describe(early)}: expected items after all leaves")
    try:
        check_keys(table.key[:tree_rows])
        check_keys(table.key[tree_rows:])
    except InvalidKeyError as e:
        raise InvalidTreeError(str(e)) from e
    if sum(table.rank) != len(table.shape) or len(table.shape) != len(
        table.chunk_shape
    ):
        raise InvalidTreeError(
            f"columns shape and chunk_shape: expected {sum(table.rank)} entries each, "
            f"got {len(table.shape)} and {len(table.chunk_shape)}"
        )
    structure_bytes = sum(map(len, table.structure))
    if structure_bytes > MAX_STRUCTURE_BYTES:
        raise InvalidTreeError(
            f"structure: expected at most {MAX_STRUCTURE_BYTES} bytes, "
            f"got {structure_bytes}"
        )


def _check_leaf(leaf: Leaf) -> None:
    """Rejects a row that breaks a rule, with the name of its leaf."""
    problem = _form_problem(leaf)
    if not _fits_key(leaf):
        problem = f"path_kinds {leaf.path_kinds!r} do not fit its key"
    if problem:
        raise InvalidTreeError(f"{describe(leaf.key)}: {problem}")


def _fits_key(leaf: Leaf) -> bool:
    if is_item(leaf.key):  # check_items checks it
        return True
    try:
        return fits_key(leaf.path_kinds, leaf.key)
    except InvalidKeyError as e:
        raise InvalidTreeError(f"leaf {leaf.key!r}: {e}") from e


def _form_problem(leaf: Leaf) -> str | None:
    if leaf.kind not in pb.LeafKind.values() or not leaf.kind:
        return f"expected a known kind, got {leaf.kind}"
    if problem := shape_problem(leaf.shape):
        return problem
    if any(n < 0 for n in leaf.shape) or any(n < 1 for n in leaf.chunk_shape):
        return f"shape {leaf.shape} or chunk shape {leaf.chunk_shape} is negative or 0"
    if leaf.grid.chunk_bytes > MAX_CHUNK_BYTES:
        return (
            f"expected chunks of at most {MAX_CHUNK_BYTES} bytes, "
            f"got {leaf.grid.chunk_bytes}"
        )
    return _kind_problem(leaf)


def _kind_problem(leaf: Leaf) -> str | None:
    if leaf.sharding is not None and len(leaf.sharding.spec) > len(leaf.shape):
        return f"its sharding splits {len(leaf.sharding.spec)} dimensions"
    if (leaf.kind == pb.LEAF_KIND_PRNG_KEY) != (leaf.prng_impl is not None):
        return "expected a PRNG implementation for PRNG keys, and for nothing else"
    if leaf.prng_impl is not None:
        words = PRNG_IMPLS.get(leaf.prng_impl)
        if words is None:
            return f"expected one of {', '.join(PRNG_IMPLS)}, got {leaf.prng_impl!r}"
        if leaf.dtype != "uint32" or leaf.shape[-1:] != (words,):
            return (
                f"expected key data of {leaf.prng_impl}, (..., {words}) uint32, got "
                f"{leaf.shape} {leaf.dtype}"
            )
    if leaf.kind in _SCALARS and leaf.shape:
        return f"expected a scalar, got the shape {leaf.shape}"
    if leaf.kind == pb.LEAF_KIND_PYTHON_SCALAR and leaf.dtype not in PYTHON_DTYPES:
        return f"expected the dtype of a Python number, got {leaf.dtype}"
    return _encoding_problem(leaf) if leaf.kind in ENCODED_KINDS else None


def _encoding_problem(leaf: Leaf) -> str | None:
    if leaf.dtype != "uint8" or len(leaf.shape) != 1 or leaf.sharding is not None:
        return (
            "expected the bytes of an encoded value, one dimension of uint8 without a "
            f"sharding, got {leaf.shape} {leaf.dtype}"
        )
    if leaf.shape[0] > MAX_ENCODED_BYTES:
        return f"expected at most {MAX_ENCODED_BYTES} bytes, got {leaf.shape[0]}"
    return None


def _entry(values: Sequence[T], index: int, column: str) -> T:
    if index >= len(values):
        raise InvalidTreeError(f"column {column}: index {index} has no entry")
    return values[index]


def _number_values(values: Iterable[H | None]) -> dict[H | None, int]:
    """Numbers distinct values from 1 in order of first appearance; None is 0."""
    numbers: dict[H | None, int] = {None: 0}
    for value in values:
        numbers.setdefault(value, len(numbers))
    return numbers


def _unpack_sharding(sharding: pb.Sharding) -> SavedSharding:
    names = sharding.axis_names
    used = [axis for dimension in sharding.spec for axis in dimension.axes]
    if (
        len(set(names)) != len(names)
        or len(sharding.axis_sizes) != len(names)
        or any(size < 1 for size in sharding.axis_sizes)
        or len(set(used)) != len(used)
        or not set(used) <= set(names)
    ):
        raise InvalidTreeError(
            "column shardings: expected a size for each axis, and each axis once"
        )
    return SavedSharding(
        axis_names=tuple(sharding.axis_names),
        axis_sizes=tuple(sharding.axis_sizes),
        spec=tuple(tuple(d.axes) for d in sharding.spec),
    )
