"""Element types: their names, and their ``data_type`` in zarr3 metadata.

Names come from NumPy or ml_dtypes. Elements of a type that zarr3 lacks are stored as
raw bytes of the same size, and the array's attributes name the type; the manifest
always has the true name.
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
"""Names that zarr3 of TensorStore 0.1.86, or of older releases, lacks."""


def zarr_data_type(name: str) -> str:
    """Returns the ``data_type`` of zarr3 metadata for an element type; it always has
    the same number of bytes."""
    return "uint8" if name in _RAW else name
