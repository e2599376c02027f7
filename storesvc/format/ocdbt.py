"""Encodes an OCDBT key space whose values are ranges of existing files.

TensorStore's own writer copies values into files of its own, and cannot refer to ranges
of others. It reads the key spaces that are encoded here, and copies from them, like any
OCDBT database. Source of the format:
https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format ; (*) marks
what TensorStore writes differently, or that page omits. Numbers are varints (LEB128)
unless another type is given. A manifest and a node have the same frame:

    magic_value uint32be, length uint64le of all of it, version 0,
    compression_format 0 (none), body, crc32c_checksum uint32le of all before it

The body of the manifest:

    config:           uuid byte[16], manifest_kind uint8 0 (one manifest) (*),
                      max_inline_value_bytes, max_decoded_node_bytes,
                      version_tree_arity_log2 uint8, compression_method 0
    data_file_table
    inline_versions:  num_versions 1, generation_number, root_height uint8,
                      data_file_id, data_file_offset, data_file_length, num_keys,
                      num_tree_bytes, num_indirect_value_bytes, commit_time uint64le
                      in nanoseconds (*); without a key: the path "", offset and
                      length 2**64 - 1 (*), and zeros
    version_nodes:    num_children 0

The body of a node, column by column; "leaf_" and "interior_" mark columns of only one
kind of node:

    height uint8, data_file_table, num_entries,
    key_prefix_length (none for the first key), key_suffix_length,
    interior_: subtree_common_prefix_length,
    key_suffix bytes,
    leaf_:     value_length, value_kind uint8 1 (in a data file),
               data_file_id, data_file_offset
    interior_: data_file_id, data_file_offset, data_file_length, num_keys,
               num_tree_bytes, num_indirect_value_bytes

A key's prefix is shared with the previous key. The subtree_common_prefix, with which
all keys below a child begin, is stored in the parent and in no node below. A
data_file_table:

    num_files, path_prefix_length (none for the first), path_suffix_length,
    base_path_length 0, path_suffix bytes

Nodes are built level by level from the leaves to the root. A node may have 100,000
entries, so NumPy processes its columns, not a Python loop.

The key space of a checkpoint shows stored chunks as Zarr arrays, where they are stored.
The ``zarr.json`` of the arrays are stored in the node file, before the nodes; arrays
with the same shape, dtype and chunk shape share one.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format import dtypes
from storesvc.format.checksums import crc32c
from storesvc.format.chunks import I64, MAX_VALUE, ChunkLocations

U64: TypeAlias = NDArray[np.uint64]


class ValueLocation(NamedTuple):
    """The range of a data file that holds a value."""

    file: str
    """Relative to the pool."""
    offset: int
    length: int


def varints(values: "Sequence[int] | I64") -> bytes:
    """Encodes a column of unsigned numbers as varints (LEB128): seven bits per byte,
    lowest first; the top bit is set on all bytes but the last."""
    column: U64 = np.asarray(values, np.uint64)
    if not len(column):
        return b""
    width = max(1, -(-int(column.max()).bit_length() // 7))
    rest = column[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    more = rest > 0x7F
    written = (rest & 0x7F).astype(np.uint8) | (more.astype(np.uint8) << 7)
    here = rest > 0
    here[:, 0] = True
    return written[here].tobytes()


def shared_lengths(names: list[bytes]) -> I64:
    """Returns the number of bytes that each name shares with the previous one."""
    shared = np.zeros(len(names), np.int64)
    if len(names) < 2:
        return shared
    sizes = lengths(names)
    start = np.cumsum(sizes) - sizes
    text = b"".join((*names, bytes(8)))
    # Eight bytes at any offset are one word, so most pairs take a few steps.
    words = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))
    least = np.minimum(sizes[:-1], sizes[1:])
    pairs = np.flatnonzero(least)
    while len(pairs):
        at = shared[pairs + 1]
        differ = words[start[pairs] + at] ^ words[start[pairs + 1] + at]
        lowest = (differ & -differ).astype(np.float64)
        same = np.where(differ == 0, 8, (np.frexp(lowest)[1] - 1) >> 3)
        shared[pairs + 1] = np.minimum(at + same, least[pairs])
        pairs = pairs[(same == 8) & (at + 8 < least[pairs])]
    octets = np.frombuffer(text, np.uint8)
    before, after = octets[start[:-1] + shared[1:]], octets[start[1:] + shared[1:]]
    inside = shared[1:] < least
    ascending = np.where(inside, before < after, sizes[:-1] < sizes[1:])
    if not ascending.all():
        row = int(np.argmin(ascending))
        raise ValueError(
            f"expected strictly ascending names, got {names[row + 1][:40]!r} "
            f"after {names[row][:40]!r}"
        )
    return shared


def lengths(names: list[bytes]) -> I64:
    """Returns the number of bytes of each name."""
    return np.fromiter(map(len, names), np.int64, len(names))


NODE_BYTES: Final = 1 << 20
"""Maximum decoded size of a node, as TensorStore counts it.

A reader without a cache decodes a whole node for each key: among 100,000 keys in 0.4
ms, and in 2 ms with TensorStore's own 8 MiB.
"""

_MAGIC: Final = 0x0CDB20DE
_FRAME_BYTES: Final = 4 + 8 + 4  # magic_value, length, crc32c_checksum
_MAX_STATISTIC: Final = 2**64 - 1  # larger statistics are clipped

# Memory that TensorStore counts for an entry, without its name.
_LEAF_ENTRY_BYTES: Final = 32
_INTERIOR_ENTRY_BYTES: Final = 56


class Statistics(NamedTuple):
    """Statistics of a node and its descendants."""

    num_keys: int
    num_tree_bytes: int
    num_indirect_value_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A reference from a parent to a node."""

    first_key: bytes
    common: int
    """Number of leading bytes that all keys below share; no node below repeats them."""
    offset: int
    """Offset in the file of the nodes."""
    length: int
    statistics: Statistics


class NodeFile:
    """The growing file of the nodes."""

    def __init__(self, name: str, offset: int) -> None:
        self.path = name.encode()
        self.written: list[bytes] = []
        self._end = offset

    def add(
        self, body: Sequence[bytes], keys: list[bytes], common: int, below: Statistics
    ) -> Node:
        """Appends a node, and returns a reference to it.

        Args:
            common: Number of leading bytes that the keys share and the node omits.
        """
        framed_node = frame_node(_MAGIC, body)
        offset, length = self._end, len(framed_node)
        self.written.append(framed_node)
        self._end += length
        return Node(
            first_key=keys[0],
            common=common,
            offset=offset,
            length=length,
            statistics=Statistics(
                below.num_keys,
                below.num_tree_bytes + length,
                min(below.num_indirect_value_bytes, _MAX_STATISTIC),
            ),
        )


def leaves(file: NodeFile, names: list[bytes], places: ChunkLocations) -> list[Node]:
    """Writes the leaf nodes, which hold the location of each key's value."""
    shared = shared_lengths(names)
    # Files are numbered in the order of their paths, which keeps file tables short.
    paths = sorted({path.encode() for path in places.files})
    numbers = {path: number for number, path in enumerate(paths)}
    renumbered = [numbers[path.encode()] for path in places.files]
    path = np.array(renumbered, np.int64)[places.file]
    parts = _parts(_LEAF_ENTRY_BYTES + lengths(paths)[path] + lengths(names), least=1)
    level = []
    for part in parts:
        keys, value_length = names[part], places.length[part]
        # The root omits nothing: it has no parent to hold the common bytes.
        common = _common(keys, shared[part]) if len(parts) > 1 else 0
        used, ids = np.unique(path[part], return_inverse=True)
        body = (
            b"\0",  # height
            file_table([paths[number] for number in used.tolist()]),
            varints([len(keys)]),
            *_key_columns(keys, shared[part], common),
            varints(value_length),
            b"\1" * len(keys),  # value_kind
            varints(ids),
            varints(places.offset[part]),
        )
        below = Statistics(len(keys), 0, sum(value_length.tolist()))
        level.append(file.add(body, keys, common, below))
    return level


def interior(file: NodeFile, level: list[Node], height: int) -> list[Node]:
    """Writes the level above a level."""
    names = [node.first_key for node in level]
    shared = shared_lengths(names)
    sizes = _INTERIOR_ENTRY_BYTES + len(file.path) + lengths(names)
    parts = _parts(sizes, least=2)
    above = []
    for part in parts:
        keys, children = names[part], level[part]
        commons = [child.common for child in children]
        common = min(_common(keys, shared[part]), *commons) if len(parts) > 1 else 0
        columns = list(zip(*(child.statistics for child in children), strict=True))
        body = (
            bytes([height]),
            file_table([file.path]),
            varints([len(keys)]),
            *_key_columns(
                keys, shared[part], common, varints([c - common for c in commons])
            ),
            b"\0" * len(keys),  # data_file_id
            varints([child.offset for child in children]),
            varints([child.length for child in children]),
            *map(varints, columns),
        )
        below = Statistics(*map(sum, columns))
        above.append(file.add(body, keys, common, below))
    return above


def _common(keys: list[bytes], shared: I64) -> int:
    """Number of leading bytes that all keys of a node share."""
    return int(shared[1:].min()) if len(keys) > 1 else len(keys[0])


def _key_columns(
    keys: list[bytes], shared: I64, common: int, subtree_commons: bytes = b""
) -> tuple[bytes, ...]:
    """The columns of the keys, without the bytes that all of them share."""
    kept_from = [common, *shared[1:].tolist()]
    suffixes = [key[start:] for key, start in zip(keys, kept_from, strict=True)]
    return (
        varints(shared[1:] - common),
        varints(lengths(suffixes)),
        subtree_commons,
        b"".join(suffixes),
    )


def file_table(paths: list[bytes]) -> bytes:
    """Encodes a table of files, in the order of their paths."""
    shared = shared_lengths(paths)
    suffixes = [path[at:] for path, at in zip(paths, shared.tolist(), strict=True)]
    columns = (
        varints([len(paths)]),
        varints(shared[1:]),
        varints(lengths(suffixes)),
        b"\0" * len(paths),  # base_path_length
        *suffixes,
    )
    return b"".join(columns)


def frame_node(magic: int, body: Sequence[bytes]) -> bytes:
    """Encodes a node or a manifest: a header, its body, a checksum."""
    content = b"".join((b"\0\0", *body))  # version, compression_format
    length = _FRAME_BYTES + len(content)
    data = struct.pack(">I", magic) + struct.pack("<Q", length) + content
    return data + struct.pack("<I", crc32c(data))


def _parts(sizes: I64, *, least: int) -> list[slice]:
    """Divides entries into nodes; only a node of `least` entries may be too large."""
    ends = np.cumsum(sizes)
    parts: list[slice] = []
    start = 0
    while start < len(sizes):
        limit = ends[start] - sizes[start] + NODE_BYTES
        stop = int(np.searchsorted(ends, limit, side="right"))
        parts.append(slice(start, min(max(stop, start + least), len(sizes))))
        start = parts[-1].stop
    return parts


MAX_DECODED_NODE_BYTES: Final = 8 << 20
"""Maximum size of nodes that TensorStore adds: its default."""

MAX_NAME_BYTES: Final = 65535
"""Maximum bytes of a key, and of the path of a data file."""

_MANIFEST: Final = 0x0CDB3A2A
_ARITY_LOG2: Final = 4  # of the version tree: TensorStore's default
_ABSENT: Final = 2**64 - 1  # offset and length of an absent root


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """An encoded key space, to be written as two files; the manifest last."""

    nodes: bytes
    """All nodes of its tree, concatenated."""
    manifest: bytes
    """Contents of ``manifest.ocdbt``."""


def encode(
    keys: Sequence[str],
    places: ChunkLocations,
    *,
    node_file: str,
    commit_time_ns: int,
    uuid: bytes,
    node_offset: int = 0,
) -> Encoded:
    """Encodes the key space of some keys.

    Args:
        keys: The keys, in strictly ascending order of their UTF-8.
        places: Location of each key's value, relative to the base of the database.
        node_file: Path of the file for the nodes, relative to the base.
        commit_time_ns: Nanoseconds since the Unix epoch.
        uuid: Id of the database; 16 bytes.

    Raises:
        ValueError: The keys are not ascending, or a value exceeds the format's limits.
    """
    names = [key.encode() for key in keys]
    _check(names, places, node_file, uuid)
    file = NodeFile(node_file, node_offset)
    level = leaves(file, names, places)
    height = 0
    while len(level) > 1:
        height += 1
        level = interior(file, level, height)
    root = level[0] if level else None
    return Encoded(
        nodes=b"".join(file.written),
        manifest=frame_node(
            _MANIFEST,
            [
                uuid + b"\0",  # manifest_kind
                # max_inline_value_bytes 0: data files hold all values
                varints([0, MAX_DECODED_NODE_BYTES]),
                bytes([_ARITY_LOG2]) + b"\0",
                file_table([file.path if root else b""]),
                _version(root, height, commit_time_ns),
                varints([0]),  # version_nodes: num_children
            ],
        ),
    )


def _version(root: Node | None, height: int, commit_time_ns: int) -> bytes:
    """The only version of the database, with generation number 1."""
    where = [_ABSENT, _ABSENT, 0, 0, 0]
    if root:
        where = [root.offset, root.length, *root.statistics]
    head = varints([1, 1]) + bytes([height]) + b"\0"  # data_file_id
    return head + varints(where) + struct.pack("<Q", commit_time_ns)


def _check(
    names: list[bytes], places: ChunkLocations, node_file: str, uuid: bytes
) -> None:
    """Rejects values beyond the limits of the format."""
    rows = [places.file, places.offset, places.length]
    if [len(names)] * 3 != list(map(len, rows)):
        raise ValueError(
            f"locations: expected {len(names)} rows, one per key, "
            f"got {len(places.file)}"
        )
    if len(uuid) != 16:
        raise ValueError(f"uuid: expected 16 bytes, got {len(uuid)}")
    for name in (*names, node_file.encode(), *(f.encode() for f in places.files)):
        if len(name) > MAX_NAME_BYTES:
            raise ValueError(
                f"{name[:40]!r}...: expected at most {MAX_NAME_BYTES} bytes, "
                f"got {len(name)}"
            )
    # TensorStore rejects a range whose end, offset + length, exceeds int64.
    limits = (len(places.files) - 1, MAX_VALUE - 1, MAX_VALUE - 1)
    for column, limit in zip(rows, limits, strict=True):
        if len(column) and not 0 <= column.min() <= column.max() <= limit:
            raise ValueError(
                f"locations: expected numbers from 0 to {limit}, got "
                f"{column.min()} to {column.max()}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The objects of an OCDBT key space."""

    nodes: list[bytes]
    """Contents of the node file, in order, from `node_offset`."""
    root: bytes
    """The OCDBT manifest that references the root node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrArray:
    """An array of a key space."""

    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: str
    data_type: str = ""
    """Its name in ``zarr.json``; "": that of the format."""


def view_arrays(
    arrays: Sequence[ZarrArray],
    chunk_keys: Sequence[str],
    places: ChunkLocations,
    *,
    node_file: str,
    uuid: bytes,
    commit_time_ns: int,
    node_offset: int = 0,
) -> View:
    """Returns the key space of some arrays.

    Args:
        places: Location of each of these chunks, relative to the base of the database.
        node_file: Name of the node file, relative to the base.
        uuid: Identity of the key space; 16 bytes.
        commit_time_ns: Nanoseconds since the epoch.
        node_offset: Offset of the contents in the node file, which may hold chunks.

    Raises:
        ValueError: A value exceeds the limits of the format.
    """
    values: dict[bytes, int] = {}
    """Offset of each distinct ``zarr.json`` in the node file."""
    at = node_offset
    rows = []
    for array in arrays:
        value = dtypes.metadata_bytes(
            array.shape, array.chunk_shape, array.dtype, array.data_type
        )
        if value not in values:
            values[value] = at
            at += len(value)
        rows.append((node_file, values[value], len(value)))
    keys = [dtypes.metadata_key(array.name) for array in arrays]
    keys += chunk_keys
    metadata = ChunkLocations.of_rows(rows)
    both = ChunkLocations(
        files=(node_file, *places.files),
        file=np.concatenate([metadata.file, places.file + 1]),
        offset=np.concatenate([metadata.offset, places.offset]),
        length=np.concatenate([metadata.length, places.length]),
    )
    order = sorted(range(len(keys)), key=[key.encode() for key in keys].__getitem__)
    encoded = encode(
        [keys[row] for row in order],
        both.take(np.array(order, np.int64)),
        node_file=node_file,
        node_offset=at,
        uuid=uuid,
        commit_time_ns=commit_time_ns,
    )
    return View(nodes=[*values, encoded.nodes], root=encoded.manifest)
