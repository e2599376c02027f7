"""Reads the header of a safetensors file, without I/O.

A file is 8 bytes with the length of the header (little-endian), the header, and the
elements. The header is a JSON object of name, dtype, shape and offsets; the offsets
count from the end of the header, and the tensors fill the rest of the file without
holes or overlaps. Source: ``safetensors/src/tensor.rs`` of huggingface/safetensors.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import shape_problem
from storesvc_client._foreign.bounded_json import integers, parse_object
from storesvc_client.errors import DataLossError, PreconditionError

MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum bytes of a header, by the format."""

LENGTH_BYTES: Final = 8
"""Bytes before the header."""

TENSOR_DTYPES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "BOOL": ("bool", 8),
        "F4": ("float4_e2m1fn", 4),
        "F6_E2M3": ("float6_e2m3fn", 6),
        "F6_E3M2": ("float6_e3m2fn", 6),
        "U8": ("uint8", 8),
        "I8": ("int8", 8),
        "F8_E5M2": ("float8_e5m2", 8),
        "F8_E4M3": ("float8_e4m3fn", 8),
        "F8_E8M0": ("float8_e8m0fnu", 8),
        "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
        "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
        "I16": ("int16", 16),
        "U16": ("uint16", 16),
        "F16": ("float16", 16),
        "BF16": ("bfloat16", 16),
        "I32": ("int32", 32),
        "U32": ("uint32", 32),
        "F32": ("float32", 32),
        "C64": ("complex64", 64),
        "F64": ("float64", 64),
        "I64": ("int64", 64),
        "U64": ("uint64", 64),
    }
)
"""Our name of each dtype, and its bits. F8_E4M3 is torch's float8_e4m3fn."""

_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_METADATA: Final = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str
    """By our name."""
    bits: int
    """Bits of a stored element."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Contents of a header."""

    tensors: Mapping[str, Tensor]
    """By name, in the order of their bytes."""
    metadata: Mapping[str, str]


def header_bytes(length: bytes, *, size: int, what: str) -> int:
    """Returns the bytes of a header.

    Args:
        length: The first 8 bytes of the file.
        size: Bytes of the file.
        what: Name of the file for messages.

    Raises:
        DataLossError: The header would be larger than the format, or the file, allows.
    """
    count = int.from_bytes(length, "little")
    most = min(MAX_HEADER_BYTES, size - LENGTH_BYTES)
    if not 2 <= count <= most:
        raise DataLossError(
            f"{what}: expected a header of 2 to {most} bytes, got {count}; it is no "
            "whole safetensors file"
        )
    return count


def parse_header(header: bytes, *, size: int, what: str) -> Header:
    """Returns the contents of a header.

    Args:
        header: Its bytes.
        size: Bytes of the file.
        what: Name of the file for messages.

    Raises:
        DataLossError: It breaks a rule of the format, or the file is shorter or longer
            than its tensors.
        PreconditionError: It has a dtype that is not known.
    """
    if not header.startswith(b"{"):
        raise DataLossError(f"{what}: expected a header that begins with '{{'")
    fields = parse_object(header, what=what)
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise DataLossError(f"{what}: expected texts in {_METADATA}, got other values")
    begin = LENGTH_BYTES + len(header)
    tensors = [_tensor(name, entry, begin, what) for name, entry in fields.items()]
    tensors.sort(key=lambda each: (each.start, each.stop))
    _check_tiling(tensors, begin=begin, size=size, what=what)
    return Header(tensors={each.name: each for each in tensors}, metadata=metadata)


def _tensor(name: str, entry: Any, begin: int, what: str) -> Tensor:
    place = f"{what}, tensor {name[:200]!r}"
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise DataLossError(f"{place}: expected dtype, shape and data_offsets")
    shape = integers(entry["shape"], what=f"{place}, shape")
    offsets = integers(entry["data_offsets"], what=f"{place}, data_offsets")
    form = (
        TENSOR_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    )
    if form is None:
        raise PreconditionError(
            f"{place}: expected one of the dtypes {', '.join(TENSOR_DTYPES)}, got "
            f"{ascii(entry['dtype'])[:40]}"
        )
    dtype, bits = form
    if dtype not in DTYPES:
        raise PreconditionError(
            f"{place}: the installed ml_dtypes has no {dtype}; install a newer one"
        )
    if problem := shape_problem(shape):
        raise DataLossError(f"{place}: {problem}")
    # Elements smaller than a byte fill whole bytes together.
    if len(offsets) != 2 or math.prod(shape) * bits != (offsets[1] - offsets[0]) * 8:
        raise DataLossError(
            f"{place}: expected offsets of the bytes of {shape} {entry['dtype']}, got "
            f"{list(offsets)[:3]}"
        )
    return Tensor(
        name=name,
        dtype=dtype,
        bits=bits,
        shape=shape,
        start=begin + offsets[0],
        stop=begin + offsets[1],
    )


def _check_tiling(
    tensors: Iterable[Tensor], *, begin: int, size: int, what: str
) -> None:
    """Rejects holes, overlaps, and a file of another size."""
    at = begin
    for each in tensors:
        if each.start != at:
            raise DataLossError(
                f"{what}, tensor {each.name[:200]!r}: expected its bytes at {at}, "
                f"after the tensor before, got {each.start}"
            )
        at = each.stop
    if at != size:
        raise DataLossError(
            f"{what}: expected {at} bytes, as its header says, got {size}"
        )
