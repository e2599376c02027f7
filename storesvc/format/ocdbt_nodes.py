"""Nodes of an OCDBT tree: levels of them, from the leaves up to the root.

What their fields are is told by ``storesvc.format.ocdbt``.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import I64, Places
from storesvc.format.ocdbt_columns import lengths, shared_lengths, varints

NODE_BYTES: Final = 1 << 20
"""What a node is filled up to, decoded, as TensorStore counts it.

A reader without a cache decodes a whole node for each key that it looks for: among
100,000 keys in 0.4 ms; in 2 ms, were nodes of the 8 MiB that TensorStore fills.
"""

_MAGIC: Final = 0x0CDB20DE
_FRAME_BYTES: Final = 4 + 8 + 4  # magic_value, length, crc32c_checksum
_MOST: Final = 2**64 - 1  # where statistics stop to grow

# What TensorStore counts for an entry in memory, names apart.
_LEAF_ENTRY_BYTES: Final = 32
_INTERIOR_ENTRY_BYTES: Final = 56


class Statistics(NamedTuple):
    """Of a node and all below it."""

    num_keys: int
    num_tree_bytes: int
    num_indirect_value_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a parent says of a node."""

    first_key: bytes
    common: int
    """Bytes that all keys below begin with, and that no node below repeats."""
    offset: int
    """In the file of the nodes."""
    length: int
    statistics: Statistics


class NodeFile:
    """The file of the nodes as it grows."""

    def __init__(self, name: str, offset: int) -> None:
        self.path = name.encode()
        self.written: list[bytes] = []
        self._end = offset

    def add(
        self, body: Sequence[bytes], keys: list[bytes], common: int, below: Statistics
    ) -> Node:
        """Returns a node that is written.

        Args:
            body: Its columns.
            keys: Of its entries.
            common: Bytes that they begin with and that it leaves out.
            below: Of what hangs from it.
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
                min(below.num_indirect_value_bytes, _MOST),
            ),
        )


def leaves(file: NodeFile, names: list[bytes], places: Places) -> list[Node]:
    """Returns the leaves that say where the value of each key lies."""
    shared = shared_lengths(names)
    # Paths are numbered in their order, which makes tables of files short.
    paths = sorted({path.encode() for path in places.files})
    numbers = {path: number for number, path in enumerate(paths)}
    renumbered = [numbers[path.encode()] for path in places.files]
    path = np.array(renumbered, np.int64)[places.file]
    parts = _parts(_LEAF_ENTRY_BYTES + lengths(paths)[path] + lengths(names), least=1)
    level = []
    for part in parts:
        keys, value_length = names[part], places.length[part]
        # The root leaves nothing out: it has no parent to say it.
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
    """Returns the level above a level."""
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
    """How many bytes all keys of a node begin with."""
    return int(shared[1:].min()) if len(keys) > 1 else len(keys[0])


def _key_columns(
    keys: list[bytes], shared: I64, common: int, subtree_commons: bytes = b""
) -> tuple[bytes, ...]:
    """The columns of the keys, without the bytes that all of them begin with."""
    kept_from = [common, *shared[1:].tolist()]
    suffixes = [key[start:] for key, start in zip(keys, kept_from, strict=True)]
    return (
        varints(shared[1:] - common),
        varints(lengths(suffixes)),
        subtree_commons,
        b"".join(suffixes),
    )


def file_table(paths: list[bytes]) -> bytes:
    """Returns the table of some files, in the order of their paths."""
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
    """Returns a node or a manifest: its body between header and checksum."""
    content = b"".join((b"\0\0", *body))  # version, compression_format
    length = _FRAME_BYTES + len(content)
    data = struct.pack(">I", magic) + struct.pack("<Q", length) + content
    return data + struct.pack("<I", crc32c(data))


def _parts(sizes: I64, *, least: int) -> list[slice]:
    """Which entries each node gets. Only the first ``least`` may make it too large."""
    ends = np.cumsum(sizes)
    parts: list[slice] = []
    start = 0
    while start < len(sizes):
        limit = ends[start] - sizes[start] + NODE_BYTES
        stop = int(np.searchsorted(ends, limit, side="right"))
        parts.append(slice(start, min(max(stop, start + least), len(sizes))))
        start = parts[-1].stop
    return parts
