"""Builds the nodes of an OCDBT tree, level by level from the leaves to the root.

``storesvc.format.ocdbt`` describes their fields.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import I64, ChunkLocations
from storesvc.format.ocdbt_columns import lengths, shared_lengths, varints

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
            body: Columns of the node.
            keys: Keys of its entries.
            common: Number of leading bytes that the keys share and the node omits.
            below: Statistics of its descendants.
        """
        framed_node = framed(_MAGIC, body)
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


def framed(magic: int, body: Sequence[bytes]) -> bytes:
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
