"""The standard view of a checkpoint: zarr3 arrays in one OCDBT key space.

Source of the format: the Zarr v3 core specification, its codecs ``bytes`` and
``crc32c`` (a chunk is followed by its CRC-32C, 4 bytes little-endian), and
TensorStore's ``zarr3`` and ``ocdbt`` drivers.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from storesvc.format.dtypes import zarr_data_type

CHECKSUM_BYTES: Final = 4
"""Bytes that the ``crc32c`` codec appends to a chunk."""


def metadata_key(leaf_key: str) -> str:
    """Returns the key of a leaf's metadata in the key space."""
    return _below(leaf_key, "zarr.json")


def chunk_key(leaf_key: str, index: Sequence[int]) -> str:
    """Returns the key of a chunk in the key space."""
    return _below(leaf_key, _chunk_name(tuple(index)))


@lru_cache(maxsize=4096)
def _chunk_name(index: tuple[int, ...]) -> str:
    return "/".join(("c", *map(str, index)))


def metadata(
    shape: Sequence[int], chunk_shape: Sequence[int], dtype: str, data_type: str = ""
) -> dict[str, Any]:
    """Returns a leaf's ``zarr.json``, with another ``data_type`` if it is given."""
    stored = data_type or zarr_data_type(dtype)
    fill: Any = 0
    if stored == "bool":
        fill = False
    elif stored.startswith("complex"):
        fill = [0, 0]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": stored,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape)},
        },
        "chunk_key_encoding": {
            "name": "default",
            "configuration": {"separator": "/"},
        },
        "fill_value": fill,
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "attributes": {"storesvc": {"dtype": dtype}},
    }


@lru_cache(maxsize=1024)  # a tree has many leaves, and few shapes
def metadata_bytes(
    shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    dtype: str,
    data_type: str = "",
) -> bytes:
    """Returns a leaf's ``zarr.json``, serialised."""
    found = metadata(shape, chunk_shape, dtype, data_type)
    return json.dumps(found, sort_keys=True).encode()


def _below(leaf_key: str, name: str) -> str:
    return f"{leaf_key}/{name}" if leaf_key else name
