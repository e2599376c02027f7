"""Element types, and the standard view of a checkpoint: zarr3 in an OCDBT key space.

Names come from NumPy or ml_dtypes. Elements of a type that zarr3 lacks are stored as
raw bytes of the same size, and the array's attributes name the type; the manifest
always has the true name.

Source of the format: the Zarr v3 core specification, its codecs ``bytes`` and
``crc32c`` (a chunk is followed by its CRC-32C, 4 bytes little-endian), and
TensorStore's ``zarr3`` and ``ocdbt`` drivers.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import ml_dtypes
import numpy as np

_NUMPY: Final = (
    *("bool", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_DTYPES: Final = (
    *("bfloat16", "int1", "int2", "int4", "uint1", "uint2", "uint4"),
    *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

DTYPES: Final = MappingProxyType(
    {name: np.dtype(name) for name in _NUMPY}
    | {
        name: np.dtype(getattr(ml_dtypes, name))
        for name in _ML_DTYPES
        if hasattr(ml_dtypes, name)  # older releases lack some
    }
)
"""Every element type of the format, by name."""

_SHORT: Final = MappingProxyType(
    {f"{short}{bits}": f"float{bits}" for short in ("f", "fp") for bits in (16, 32, 64)}
    | {"bf16": "bfloat16"}
)
"""Short names of dtypes that users write."""

_RAW: Final = frozenset(
    {
        *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
        *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
        *("float8_e4m3", "float8_e8m0fnu"),
    }
)
"""Names that zarr3 of TensorStore 0.1.86, or of older releases, lacks."""


NEWER: Final = frozenset({"int2", "int4", "float4_e2m1fn", "float8_e8m0fnu"})
"""Dtypes that TensorStore has from 0.1.86 on: files for other projects name them."""


def is_floating(name: str) -> bool:
    """Returns whether a dtype has real floating-point numbers."""
    return "float" in name


def floating_name(dtype: object) -> str | None:
    """Returns the name of a floating-point dtype; None if it is something else.

    >>> floating_name("bf16"), floating_name(np.float32), floating_name("int8")
    ('bfloat16', 'float32', None)

    Args:
        dtype: A name, also a short one, or a dtype of NumPy or jax.
    """
    if isinstance(dtype, str):
        name = _SHORT.get(dtype, dtype)
    else:
        try:
            name = np.dtype(dtype).name  # type: ignore[call-overload] # it is checked
        except (TypeError, ValueError):
            return None
    return name if name in DTYPES and is_floating(name) else None


def zarr_data_type(name: str) -> str:
    """Returns the ``data_type`` of zarr3 metadata for an element type; it always has
    the same number of bytes."""
    return "uint8" if name in _RAW else name


CHECKSUM_BYTES: Final = 4
"""Bytes that the ``crc32c`` codec appends to a chunk."""


def metadata_key(leaf_key: str) -> str:
    return _below(leaf_key, "zarr.json")


def chunk_key(leaf_key: str, index: Sequence[int]) -> str:
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
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
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
