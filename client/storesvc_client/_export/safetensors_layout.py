"""Decides the files of a safetensors export: shards, headers and the index.

Source of the format: safetensors/src/tensor.rs of huggingface/safetensors 0.8. A file
is the length of the header, 8 bytes little-endian; the header, JSON, padded with spaces
to a multiple of 8; and the elements, in the order of their offsets, without gaps. The
index, ``model.safetensors.index.json``, is that of Hugging Face's transformers.

>>> shard_names(2)
['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
"""

import json
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from storesvc_client._export.tensors import Tensor
from storesvc_client.errors import PreconditionError

DTYPE_NAMES: Final = MappingProxyType(
    {
        "bool": "BOOL",
        "int8": "I8",
        "int16": "I16",
        "int32": "I32",
        "int64": "I64",
        "uint8": "U8",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
    }
)
"""Names of dtypes in safetensors 0.8. F4 and F6 are left out: safetensors packs them,
so that the bytes of a leaf would differ from the saved ones."""

MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum length of a header; readers of safetensors reject a longer one."""

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_RESERVED: Final = "__metadata__"


def shard_names(count: int) -> list[str]:
    """Returns the names of the files of an export of `count` shards."""
    if count == 1:
        return [SINGLE]
    return [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]


def cut_into_shards(
    tensors: Sequence[Tensor], max_shard_bytes: int
) -> list[list[Tensor]]:
    """Returns the tensors of each shard, in their order; a tensor that is larger than
    the maximum has a shard of its own."""
    shards: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.size_bytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.size_bytes
    return shards


def in_file_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of a file in the order of their elements: widest elements
    first, so that each begins at a multiple of its itemsize."""
    return sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.name))


def header_bytes(
    ordered: Sequence[Tensor], metadata: Mapping[str, str], place: str
) -> bytes:
    """Returns the length of the header and the header.

    Args:
        ordered: Tensors in the order of their elements.
        metadata: Texts for ``__metadata__``.
        place: Name of the file, for messages.

    Raises:
        PreconditionError: A name is reserved, or the header is too long.
    """
    header: dict[str, object] = {_RESERVED: dict(metadata)}
    end = 0
    for tensor in ordered:
        if tensor.name == _RESERVED:
            raise PreconditionError(
                f"{place}: expected other names than {_RESERVED!r}, which safetensors "
                "keeps for itself; rename the leaf with rename="
            )
        start, end = end, end + tensor.size_bytes
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise PreconditionError(
            f"{place}: expected a header of at most {MAX_HEADER_BYTES} bytes, got "
            f"{len(text)}; write smaller files with max_shard_bytes="
        )
    return struct.pack("<Q", len(text)) + text


def index_bytes(shards: Mapping[str, Sequence[Tensor]]) -> bytes:
    """Returns the index of an export of several files.

    Args:
        shards: Tensors of each file.
    """
    weight_map = {
        tensor.name: file for file, tensors in shards.items() for tensor in tensors
    }
    total = sum(t.size_bytes for tensors in shards.values() for t in tensors)
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2).encode() + b"\n"
