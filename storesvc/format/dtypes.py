"""Element types: their names, and what zarr3 calls what lies on storage.

A name is that of NumPy or ml_dtypes. What zarr3 has no word for is stored as
raw bytes of the same size, and named in the array's attributes; the manifest
always holds the true name.
"""

from types import MappingProxyType
from typing import Final

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

_RAW: Final = frozenset(
    {
        *("int1", "int2", "int4", "uint1", "uint2", "uint4"),
        *("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"),
        *("float8_e4m3", "float8_e8m0fnu"),
    }
)
"""Names that zarr3 in TensorStore 0.1.86 lacks, or lacks in older releases."""


def zarr_data_type(name: str) -> str:
    """Returns the ``data_type`` of zarr3 metadata under which elements of that
    type are stored, always with the same number of bytes."""
    return "uint8" if name in _RAW else name
