"""Encodes an OCDBT key space whose values are ranges of existing files.

TensorStore's own writer copies values into files of its own, and cannot refer to ranges
of others. It reads the key spaces that are encoded here, and copies from them, like any
OCDBT database. Source of the format:
https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format ;
(*) marks what TensorStore writes differently, or that page omits. Numbers are varints
(LEB128) unless another type is given. A manifest and a node have the same frame:

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
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from storesvc.format.chunks import MAX_VALUE, ChunkLocations
from storesvc.format.ocdbt_columns import varints
from storesvc.format.ocdbt_nodes import (
    Node,
    NodeFile,
    file_table,
    framed,
    interior,
    leaves,
)

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
        node_offset: Offset of the nodes in their file.

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
        manifest=framed(
            _MANIFEST,
            [
                _config(uuid),
                file_table([file.path if root else b""]),
                _version(root, height, commit_time_ns),
                varints([0]),  # version_nodes: num_children
            ],
        ),
    )


def _config(uuid: bytes) -> bytes:
    # manifest_kind; max_inline_value_bytes 0: data files hold all values
    return (
        uuid
        + b"\0"
        + varints([0, MAX_DECODED_NODE_BYTES])
        + bytes([_ARITY_LOG2])
        + b"\0"
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
    """Rejects values beyond the limits of the format.

    Raises:
        ValueError: A value exceeds a limit.
    """
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
