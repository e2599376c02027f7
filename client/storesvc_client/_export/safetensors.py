"""Writes a checkpoint in a flat format: safetensors files, or one ``.npz`` file.

A flat format is a list of named arrays. What it would lose is rejected, with the name
of the leaf: a Python number would come back as an array, a PRNG key as numbers; texts
and bytes have no dtype. Tensors are read in pieces of bounded size.

The files of safetensors are those that Hugging Face's libraries open. They are written
in an order in which no reader takes a part for the whole:

1. Files of the model other than weights.
2. Shards, one after the other; each appears under its name when it is complete, and is
   then entered in ``.storesvc-export.json`` with its size and digest.
3. The index, if there are several shards.
4. ``.storesvc-export.json`` is removed.

A retry after a failure reads that file: shards of the same export whose size and digest
are right are kept.

Source of the format: safetensors/src/tensor.rs of huggingface/safetensors 0.8. A file
is the length of the header, 8 bytes little-endian; the header, JSON, padded with spaces
to a multiple of 8; and the elements, in the order of their offsets, without gaps. The
index, ``model.safetensors.index.json``, is that of Hugging Face's transformers.

>>> shard_names(2)
['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']

An ``.npz`` file is written member by member, without compression. A member is named by
the key of its leaf, as ``storectl get -o FILE.npz`` names it. The format holds the
dtypes of NumPy itself: a leaf of bfloat16 is rejected unless it is cast, because
``numpy.load`` would return raw bytes.
"""

import json
import math
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from numpy.lib import format as npy
from numpy.typing import NDArray

from storesvc.format.checksums import Hasher, digest
from storesvc.format.dtypes import DTYPES, is_floating
from storesvc.format.keys import split_key
from storesvc.format.trees import Leaf
from storesvc_client._chunks.memory import cut_batches
from storesvc_client._export.elements import (
    ExportCall,
    Piece,
    Source,
    Written,
    cast_array,
    raw_bytes,
    read_in_order,
    windows,
)
from storesvc_client._export.target import COPY_BYTES, NewFile, Target, split_file
from storesvc_client._telemetry.progress import Meter
from storesvc_client.errors import InvalidRequestError, PreconditionError
from storesvc_proto.v1 import tree_pb2 as pb

if TYPE_CHECKING:
    from storesvc_client._export.model_files import ModelFile

ARRAYS: Final = frozenset(
    {pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR}
)
"""Kinds of leaves that every format holds, and that a cast applies to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An array of an exported file."""

    row: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    """Shape of the stored chunks, in the order of the exported dimensions."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        itemsize: int = DTYPES[self.dtype].itemsize
        return itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, eq=False, kw_only=True)
class TensorFile:
    """A file: a header, then the elements of tensors."""

    name: str
    header: bytes = b""
    """Bytes before the first tensor."""
    tensors: Sequence[Tensor] = ()
    """In the order of their elements."""

    @cached_property
    def offsets(self) -> Sequence[int]:
        """Offset of each tensor, and of the end."""
        sizes = (tensor.size_bytes for tensor in self.tensors)
        return [*accumulate(sizes, initial=len(self.header))]

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.offsets[-1]


def exported_dtype(leaf: Leaf, cast: str | None) -> str:
    """Returns the dtype of an exported leaf: the cast's, for floating-point arrays."""
    if cast is not None and leaf.kind in ARRAYS and is_floating(leaf.dtype):
        return cast
    return leaf.dtype


def make_tensor(row: int, leaf: Leaf, *, name: str, dtype: str) -> Tensor:
    """Returns the tensor of a leaf or an item."""
    return Tensor(
        row=row,
        name=name,
        dtype=dtype,
        shape=leaf.shape,
        chunk_shape=leaf.chunk_shape,
    )


def plan_tensors(
    source: Source,
    *,
    cast: str | None,
    separator: str,
    dtypes: Collection[str],
    target: str,
) -> list[Tensor]:
    """Returns the tensors of the selected leaves, in the order of their names.

    Args:
        source: The checkpoint.
        cast: Name of the dtype to cast to, or None.
        separator: Joins the parts of a path; "/" keeps the key.
        dtypes: Names of the dtypes that the format holds.
        target: Name of the format, for messages.
    """
    faults = (
        (row, _find_fault(source, row, cast, dtypes, target)) for row in source.rows
    )
    source.check_rejected([(row, text) for row, text in faults if text])
    tensors = [
        make_tensor(
            row,
            leaf,
            name=leaf.key if separator == "/" else separator.join(split_key(leaf.key)),
            dtype=exported_dtype(leaf, cast),
        )
        for row, leaf in ((row, source.leaf(row)) for row in source.rows)
    ]
    source.check_names((each.row, each.name) for each in tensors)
    return sorted(tensors, key=lambda each: each.name)


def _find_fault(
    source: Source, row: int, cast: str | None, dtypes: Collection[str], target: str
) -> str | None:
    """Returns why the format would lose a leaf; None if it holds it."""
    leaf = source.leaf(row)
    remedy = "leave it out with select= (--select)"
    if leaf.kind not in ARRAYS:
        return (
            f"expected an array, got the kind {source.kind(row)}, which {target} would "
            f"not give back; {remedy}"
        )
    dtype = exported_dtype(leaf, cast)
    if dtype in dtypes:
        return None
    if is_floating(dtype):
        remedy = f"cast it (cast='float32', --dtype float32), or {remedy}"
    return f"expected a dtype that {target} holds, got {dtype}; {remedy}"


def read_tensors(
    source: Source, tensors: Sequence[Tensor], meter: Meter
) -> Iterator[tuple[Tensor, Iterator[memoryview]]]:
    """Yields each tensor with its bytes in C order, in pieces; all pieces of a tensor
    must be taken before the next one."""
    plans = [
        [
            Piece(tensor.row, region)
            for region in windows(
                tensor.shape,
                tensor.chunk_shape,
                itemsize=source.tree.grids[tensor.row].itemsize,
            )
        ]
        for tensor in tensors
    ]
    arrays = read_in_order(source, (p for plan in plans for p in plan), meter)
    for tensor, plan in zip(tensors, plans, strict=True):
        place = source.describe(tensor.row)
        yield tensor, _cast_pieces(arrays, len(plan), tensor.dtype, place)


def _cast_pieces(
    arrays: Iterator[NDArray[Any]], count: int, dtype: str, place: str
) -> Iterator[memoryview]:
    for _ in range(count):
        # no variable holds an array while the next one is read
        yield raw_bytes(cast_array(next(arrays), dtype, place))


NPZ_SUFFIX: Final = ".npz"

HELD: Final = frozenset(name for name, dtype in DTYPES.items() if dtype.isbuiltin == 1)
"""Names of the dtypes that NumPy's file format has."""

_MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""Time of each member: equal checkpoints make equal files."""


def write_npz(call: ExportCall) -> Written:
    """Writes the selected leaves to a file whose name ends in ".npz"."""
    source, meter = call.source, call.meter
    folder, name = split_file(call.where)
    if not name.endswith(NPZ_SUFFIX):
        raise InvalidRequestError(
            f"target {call.where!r}: expected a file whose name ends in {NPZ_SUFFIX}"
        )
    tensors = plan_tensors(
        source, cast=call.cast, separator="/", dtypes=HELD, target="npz"
    )
    for tensor in tensors:
        if not is_member_name(tensor.name):
            raise PreconditionError(
                f"{source.describe(tensor.row)}: expected a name for a member of a zip "
                f"file, got {tensor.name!r}; rename it with mapping="
            )
    target = call.open(folder)
    if target.size(name) is not None:
        raise PreconditionError(
            f"{call.where} exists; remove it, or choose another target"
        )
    meter.total_bytes = sum(tensor.size_bytes for tensor in tensors)
    with target.create(name) as file:
        _write_npz(source, file, tensors, meter)
    return Written(files=(name,), size_bytes=meter.total_bytes)


def is_member_name(name: str) -> bool:
    """Returns whether a zip file can have a member of a name that no program which
    unpacks the file takes for a path out of its folder."""
    parts = re.split(r"[/\\]", name)
    return {"", ".", ".."}.isdisjoint(parts) and not re.match(r"[A-Za-z]:|.*\0", name)


def _write_npz(
    source: Source, file: NewFile, tensors: Sequence[Tensor], meter: Meter
) -> None:
    # ZipFile writes to a stream, too: it needs no seek
    with zipfile.ZipFile(_Stream(file), "w", allowZip64=True) as archive:
        for tensor, pieces in read_tensors(source, tensors, meter):
            member = zipfile.ZipInfo(f"{tensor.name}.npy", _MOMENT)
            with archive.open(member, "w", force_zip64=True) as opened:
                opened.write(_header(tensor))
                for piece in pieces:
                    with meter.phase("write"):
                        opened.write(piece)
                    meter.add(len(piece))
                    del piece  # before the next one takes memory


def _header(tensor: Tensor) -> bytes:
    header = BytesIO()
    npy.write_array_header_2_0(
        header,
        {
            "descr": npy.dtype_to_descr(DTYPES[tensor.dtype]),
            "fortran_order": False,
            "shape": tensor.shape,
        },
    )
    return header.getvalue()


class _Stream:
    """A file that can only be written from its beginning to its end."""

    def __init__(self, file: NewFile) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Appends bytes."""
        return self._file.write(data)

    def flush(self) -> None:
        """Does nothing: the file is complete when its owner closes it."""

    def close(self) -> None:
        """Does nothing, as ``flush``."""


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


MAX_SHARD_BYTES: Final = 5_000_000_000
"""Default maximum of the bytes of elements in a file: that of Hugging Face's hub."""

SUFFIX: Final = ".safetensors"

PROGRESS_FILE: Final = ".storesvc-export.json"
"""File that records the complete shards of an unfinished export."""

_MAX_PROGRESS_BYTES: Final = 64 << 20


def is_file_target(where: str) -> bool:
    """Returns whether a target is one file of safetensors, not a folder."""
    return split_file(where)[1].endswith(SUFFIX)


def write_safetensors(call: ExportCall, files: Sequence["ModelFile"]) -> Written:
    """Writes the selected leaves to a folder, or to a file if the target ends in
    ".safetensors"; and other files to the folder."""
    source, meter, most = call.source, call.meter, call.request.max_shard_bytes
    tensors = plan_safetensors(source, cast=call.cast)
    folder, single = call.where, ""
    if is_file_target(folder):
        folder, single = split_file(folder)
    target = call.open(folder)
    size = sum(tensor.size_bytes for tensor in tensors)
    if single and most is not None and size > most:
        raise InvalidRequestError(
            f"export of {source.name}: expected at most {most} bytes, the maximum of "
            f"a shard, for one file, got {size}; give a folder as the target"
        )
    if single:
        written = [make_shard(source, single, tensors)]
    else:
        written = cut_shards(source, tensors, most or MAX_SHARD_BYTES)
    for name in (single,) if single else (SINGLE, INDEX):
        if target.size(name) is not None:
            raise PreconditionError(
                f"{target.url}/{name} exists; remove it, or choose another target"
            )
    for file in [file for file in files if not file.is_written(target)]:
        file.write(target)
    meter.total_bytes = sum(each.size_bytes for each in written)
    if len(written) == 1:
        _write(source, target, written[0], meter)
    else:
        _write_all(source, target, written, meter)
    names = [each.name for each in written] + [each.name for each in files]
    return Written(files=tuple(names), size_bytes=size)


def plan_safetensors(source: Source, *, cast: str | None = None) -> list[Tensor]:
    """Returns the tensors of the selected leaves, as ``plan_tensors`` does."""
    return plan_tensors(
        source, cast=cast, separator=".", dtypes=DTYPE_NAMES, target="safetensors"
    )


def cut_shards(
    source: Source, tensors: Sequence[Tensor], limit_bytes: int
) -> list[TensorFile]:
    """Returns the files of a folder: shards, and then their index if there are several.
    Each has at most ``limit_bytes`` of elements, unless one tensor has more."""
    parts = [*cut_batches(tensors, lambda tensor: tensor.size_bytes, limit_bytes)]
    parts = parts or [[]]
    names = shard_names(len(parts))
    shards = [
        make_shard(source, name, part) for name, part in zip(names, parts, strict=True)
    ]
    if len(shards) == 1:
        return shards
    files = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": dict(sorted(files.items())),
    }
    text = json.dumps(index, indent=2).encode() + b"\n"
    return [*shards, TensorFile(name=INDEX, header=text)]


def make_shard(source: Source, name: str, tensors: Sequence[Tensor]) -> TensorFile:
    """Returns a file; reads nothing."""
    place = f"export of {source.name}: {name}"
    metadata = {"format": "pt", "storesvc.checkpoint": source.name}
    metadata["storesvc.uid"] = source.info.uid
    if source.mapping_digest:
        metadata["storesvc.mapping"] = source.mapping_digest
    # widest elements first, so that each tensor begins at a multiple of its itemsize
    ordered = sorted(tensors, key=lambda tensor: (-tensor.itemsize, tensor.name))
    header: dict[str, object] = {_RESERVED: metadata}
    end = 0
    for tensor in ordered:
        if tensor.name == _RESERVED:
            raise PreconditionError(
                f"{place}: expected other names than {_RESERVED!r}, which safetensors "
                "keeps for itself; rename the leaf with mapping="
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
    data = struct.pack("<Q", len(text)) + text
    return TensorFile(name=name, tensors=ordered, header=data)


def _write_all(
    source: Source, target: Target, files: Sequence[TensorFile], meter: Meter
) -> None:
    """Writes shards that are not complete, then the index."""
    *shards, index = files
    plan = digest(b"".join(shard.header for shard in shards)).hex()
    complete = _complete(target, plan)
    for shard in shards:
        if _is_complete(target, shard, complete.get(shard.name)):
            meter.add(shard.size_bytes)
            continue
        complete[shard.name] = _write(source, target, shard, meter)
        record = {"plan": plan, "complete": complete}
        with target.create(PROGRESS_FILE) as file:
            file.write(json.dumps(record).encode())
    _write(source, target, index, meter)
    target.remove(PROGRESS_FILE)


def _write(source: Source, target: Target, file: TensorFile, meter: Meter) -> str:
    """Writes a file; returns the digest of its bytes, in hexadecimal."""
    hasher = Hasher()
    with target.create(file.name) as opened:

        def append(data: bytes | memoryview) -> None:
            with meter.phase("write"):
                opened.write(data)
            hasher.add(data)
            meter.add(len(data))

        append(file.header)
        for _, pieces in read_tensors(source, file.tensors, meter):
            for piece in pieces:
                append(piece)
                del piece  # before the next one takes memory
    return hasher.digest.hex()


def _complete(target: Target, plan: str) -> dict[str, str]:
    """Returns the digests of the shards that an unfinished export of this plan has
    completed."""
    size = target.size(PROGRESS_FILE)
    if size is None or size > _MAX_PROGRESS_BYTES:
        return {}
    try:
        record = json.loads(target.read(PROGRESS_FILE, 0, size))
        if record["plan"] == plan:
            return {str(k): str(v) for k, v in record["complete"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # of another program, or damaged: every shard is written
    return {}


def _is_complete(target: Target, shard: TensorFile, expected: str | None) -> bool:
    """Returns whether the target has a shard with the expected digest."""
    if expected is None or target.size(shard.name) != shard.size_bytes:
        return False
    hasher = Hasher()
    for start in range(0, shard.size_bytes, COPY_BYTES):
        stop = min(start + COPY_BYTES, shard.size_bytes)
        hasher.add(target.read(shard.name, start, stop))
    return hasher.digest.hex() == expected
