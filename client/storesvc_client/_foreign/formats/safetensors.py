"""Reads safetensors: one file, shards with an index, or a folder of steps.

A location is a folder of one checkpoint, of folders that steps name (``100/``,
``checkpoint-100/``), or a repository in a cache of Hugging Face, of which the revision
``main`` is read. A checkpoint whose folder names no step is step 0.

The name of a tensor is split at each ".", and all parts are keys of mappings;
``keep_names`` keeps it whole.

A file is 8 bytes with the length of the header (little-endian), the header, and the
elements. The header is a JSON object of name, dtype, shape and offsets; the offsets
count from the end of the header, and the tensors fill the rest of the file without
holes or overlaps. Source: ``safetensors/src/tensor.rs`` of huggingface/safetensors.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import xxhash
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, choose_chunk_shape, shape_problem
from storesvc_client._export.safetensors import DTYPE_NAMES as WRITTEN
from storesvc_client._foreign.bounded_json import integers, parse_object
from storesvc_client._foreign.foreign_step import (
    ForeignArray,
    ForeignRoot,
    ForeignStep,
    Reading,
    UnreadItem,
)
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.raw_chunks import PlainArray
from storesvc_client._foreign.steps import (
    FolderRoot,
    Row,
    array_row,
    file_name,
    folders_in,
    item_row,
    join,
    make_step,
    named_steps,
    names_text,
    place,
    text_row,
    url_parts,
)
from storesvc_client.errors import DataLossError, NotFoundError, PreconditionError

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAIN: Final = "model"
"""Name without suffix that is preferred where there are several files."""

_SHARD: Final = re.compile(r".*-[0-9]{5}-of-[0-9]{5}\.safetensors")
_CACHED: Final = "models--"


def find_file(names: Sequence[str], *, what: str) -> str | None:
    """Returns the index or the file that is the checkpoint of a folder; None if there
    is none, as in a folder whose index is not written yet.
    """
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [
            name
            for name in names
            if name.endswith(suffix) and not _SHARD.fullmatch(name)
        ]
        if f"{_MAIN}{suffix}" in found:
            return f"{_MAIN}{suffix}"
        if len(found) > 1:
            raise PreconditionError(
                f"{what}: expected one file, or one of the name {_MAIN}{suffix}, "
                f"got {', '.join(found[:5])}; give the URL of one file"
            )
        if found:
            return found[0]
    return None


def parse_index(data: bytes, *, names: Sequence[str], what: str) -> dict[str, set[str]]:
    """Returns the names of the tensors in each file."""
    weight_map = parse_object(data, what=what).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataLossError(f"{what}: expected the file of each tensor in weight_map")
    tensors: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        place = f"{what}, weight_map[{tensor[:200]!r}]"
        tensors.setdefault(file_name(file, what=place), set()).add(tensor)
    for file in tensors:
        if file not in names:
            raise DataLossError(
                f"{what}: expected the file {file!r} in the same folder, got none; "
                "copy it there, or use another checkpoint"
            )
    return tensors


def cached_revision(url: str) -> tuple[str, str] | None:
    """Returns repository and revision of a folder in a cache of Hugging Face; None if
    it is none."""
    parts = url_parts(url)[-3:]
    if len(parts) < 3 or parts[1] != "snapshots" or not parts[0].startswith(_CACHED):
        return None
    return parts[0].removeprefix(_CACHED).replace("--", "/"), parts[2]


MAX_HEADER_BYTES: Final = 100_000_000
"""Maximum bytes of a header, by the format."""

LENGTH_BYTES: Final = 8
"""Bytes before the header."""

TENSOR_DTYPES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "F4": ("float4_e2m1fn", 4),
        "F6_E2M3": ("float6_e2m3fn", 6),
        "F6_E3M2": ("float6_e3m2fn", 6),
        **{
            name: (dtype, DTYPES[dtype].itemsize * 8) for dtype, name in WRITTEN.items()
        },
    }
)
"""Our name of each dtype, and its bits: those that an export writes, and packed ones.
F8_E4M3 is torch's float8_e4m3fn."""

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
    """Returns the bytes of a header."""
    count = int.from_bytes(length, "little")
    most = min(MAX_HEADER_BYTES, size - LENGTH_BYTES)
    if not 2 <= count <= most:
        raise DataLossError(
            f"{what}: expected a header of 2 to {most} bytes, got {count}; it is no "
            "whole safetensors file"
        )
    return count


def parse_header(header: bytes, *, size: int, what: str) -> Header:
    """Returns the contents of a header."""
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
    # The tensors fill the rest of the file, without holes and overlaps.
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
    return Header(tensors={each.name: each for each in tensors}, metadata=metadata)


def _tensor(name: str, entry: Any, begin: int, what: str) -> Tensor:
    place = f"{what}, tensor {name[:200]!r}"
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise DataLossError(f"{place}: expected dtype, shape and data_offsets")
    shape = integers(entry["shape"], what=f"{place}, shape")
    offsets = integers(entry["data_offsets"], what=f"{place}, data_offsets")
    is_text = isinstance(entry["dtype"], str)
    form = TENSOR_DTYPES.get(entry["dtype"]) if is_text else None
    if form is None:
        raise PreconditionError(
            f"{place}: expected one of the dtypes {', '.join(TENSOR_DTYPES)}, got "
            f"{ascii(entry['dtype'])[:40]}"
        )
    dtype, bits = form
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


MAX_INDEX_BYTES: Final = 64 << 20
MAX_CONFIG_BYTES: Final = 16 << 20
MAX_REF_BYTES: Final = 1024
MAX_LABEL_BYTES: Final = 256

_MAIN_REF: Final = "refs/main"
_SNAPSHOTS: Final = "snapshots"


def open_root(
    location: Location, *, file: str = "", keep_names: bool = False
) -> ForeignRoot:
    """Returns the checkpoints below a location.

    Args:
        location: A folder.
        file: Name of the one file in it that is the checkpoint, or "" to find it.
        keep_names: Whether the name of a tensor is one key, and not split at each ".".
    """
    return FolderRoot(
        location,
        "safetensors",
        find=partial(_find_folders, file=file),
        read=partial(read_step, file=file, keep_names=keep_names),
        absent="step {step} with finished safetensors files",
        file=file,
    )


def _find_folders(location: Location, *, file: str) -> dict[int, str]:
    """Returns the folder of each finished step."""
    if file:
        names = location.names()
        if file_name(file, what=f"safetensors:{location.url}/{file}") not in names:
            raise NotFoundError(
                f"{location.url}: expected a file {file}, got {names_text(names)}; "
                "check the location"
            )
        return {0: ""}
    if revisions := folders_in(location.names(_SNAPSHOTS)):
        return {0: _find_snapshot(location, revisions)}
    return named_steps(
        location,
        is_finished=lambda folder, names: (
            find_file(names, what=place(location, folder)) is not None
        ),
        expected="a file *.safetensors, an index of several, or folders such as "
        "checkpoint-100/ with them",
    )


def _find_snapshot(location: Location, revisions: Sequence[str]) -> str:
    """Returns the folder of the revision "main" in a cache of Hugging Face."""
    url = f"safetensors:{location.url}"
    if location.size(_MAIN_REF) is not None:
        text = location.read(_MAIN_REF, limit=MAX_REF_BYTES).decode(errors="replace")
        revision = file_name(text.strip(), what=f"{url}/{_MAIN_REF}")
        if revision in revisions:
            return f"{_SNAPSHOTS}/{revision}"
    if len(revisions) == 1:
        return f"{_SNAPSHOTS}/{revisions[0]}"
    raise PreconditionError(
        f"{url}: expected the revision main in the cache, got {len(revisions)} others; "
        f"give the URL of one, below {_SNAPSHOTS}/"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One file of a checkpoint."""

    path: str
    header: Header
    tensors: set[str] | None = None
    """Names that the index lists; None: there is no index."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedArray(ForeignArray):
    """An array whose elements are smaller than a byte; it cannot be read."""

    message: str

    def read(self, region: Region, into: NDArray[Any]) -> Reading:  # noqa: ARG002 - the protocol
        """Raises the error of the dtype."""
        raise PreconditionError(self.message)


def read_step(
    location: Location, folder: str, step: int, *, file: str, keep_names: bool
) -> ForeignStep:
    """Reads what describes a checkpoint in a folder, as ``tensor_rows`` takes it."""
    digest = xxhash.xxh3_128(b"keep_names" if keep_names else b"")  # other keys
    rows, unread = tensor_rows(
        location, folder, digest, file=file, keep_names=keep_names
    )
    path = join(folder, "config.json")
    if location.size(path) is not None:
        config = location.read(path, limit=MAX_CONFIG_BYTES)
        digest.update(config)
        rows.append(text_row("config", config, name=place(location, path)))
    labels = dict(not_read_label("safetensors", [each.name for each in unread]))
    if cached := cached_revision(place(location, folder)):
        labels["huggingface.repository"], labels["huggingface.revision"] = cached
    return make_step(
        location,
        folder,
        rows,
        step=step,
        format="safetensors",
        advice="keep the names whole (keep_names), or rename a tensor",
        labels=labels,
        digest=digest.hexdigest(),
        unread=unread,
    )


def tensor_rows(
    location: Location,
    folder: str,
    digest: xxhash.xxh3_128,
    *,
    file: str = "",
    keep_names: bool = False,
) -> tuple[list[Row], list[UnreadItem]]:
    """Returns the rows of the tensors in a folder, and of the metadata in the headers
    as the item "header-metadata": of all files if it differs; and the files that have
    tensors in addition, which no reader of the index would find.

    Args:
        location: Location of the folder.
        folder: Path of the folder; "": the location itself.
        digest: Receives what describes the tensors.
        file: Name of the file, or "" to find it.
        keep_names: As for ``open_root``.
    """
    files = list(_files(location, folder, file, digest))
    rows = [
        _row(location, each.path, tensor, keep_names=keep_names)
        for each in files
        for name, tensor in each.header.tensors.items()
        if each.tensors is None or name in each.tensors
    ]
    unread = [
        UnreadItem(
            name=each.path.rpartition("/")[2],
            is_tree=False,
            is_needed=False,
            reason=f"has tensors that the index lacks: {', '.join(extra)}",
        )
        for each in files
        if each.tensors and (extra := sorted(each.header.tensors.keys() - each.tensors))
    ]
    found = {
        each.path.rpartition("/")[2]: dict(each.header.metadata)
        for each in files
        if each.header.metadata
    }
    metadata = list(found.values())
    if metadata:
        is_same = all(each == metadata[0] for each in metadata)
        what = place(location, files[0].path)
        value = metadata[0] if is_same else found
        rows.append(item_row("header-metadata", value, name=what))
    return rows, unread


def not_read_label(kind: str, names: Sequence[str]) -> Mapping[str, str]:
    """Returns the label that names what is not read; none if everything is."""
    text = f"{len(names)}: {', '.join(names)}".encode()[:MAX_LABEL_BYTES]
    return {f"{kind}.not_read": text.decode(errors="ignore")} if names else {}


def _files(
    location: Location, folder: str, file: str, digest: xxhash.xxh3_128
) -> Iterator[_File]:
    """Yields the files of a checkpoint; adds what describes them to `digest`."""
    stamps = location.stamps(folder)
    names = list(stamps)
    found = file or find_file(names, what=place(location, folder))
    if found is None or found not in names:
        raise NotFoundError(
            f"{place(location, folder)}: expected safetensors files, got none"
        )
    if not found.endswith(INDEX_SUFFIX):
        digest.update(f"{found}\0{stamps[found]}\0".encode())
        path = join(folder, found)
        yield _File(path=path, header=_header(location, path, digest))
        return
    path = join(folder, found)
    index = location.read(path, limit=MAX_INDEX_BYTES)
    digest.update(index)
    what = f"{location.url}/{path}"
    for name, tensors in sorted(parse_index(index, names=names, what=what).items()):
        digest.update(f"{name}\0{stamps[name]}\0".encode())
        path = join(folder, name)
        header = _header(location, path, digest)
        if missing := sorted(tensors - header.tensors.keys()):
            raise DataLossError(
                f"{what}: expected the tensor {missing[0]!r} in {name}, got none; copy "
                "the file there once more, or use another checkpoint"
            )
        yield _File(path=path, header=header, tensors=tensors)


def _header(location: Location, path: str, digest: xxhash.xxh3_128) -> Header:
    what = f"{location.url}/{path}"
    size = location.size(path)
    if size is None:
        raise DataLossError(
            f"{what}: expected a file, got none; use another checkpoint"
        )
    if size < LENGTH_BYTES:
        raise DataLossError(f"{what}: expected a safetensors file, got {size} bytes")
    length = location.read_range(path, 0, LENGTH_BYTES)
    count = header_bytes(length, size=size, what=what)
    header = location.read_range(path, LENGTH_BYTES, LENGTH_BYTES + count)
    digest.update(header)
    return parse_header(header, size=size, what=what)


def _row(location: Location, path: str, tensor: Tensor, *, keep_names: bool) -> Row:
    array: ForeignArray
    if tensor.bits < 8:
        array = PackedArray(
            message=f"{location.url}/{path}, tensor {tensor.name!r}: expected elements "
            f"of whole bytes, got {tensor.bits} bits each ({tensor.dtype}); leave it "
            "out with select="
        )
    else:
        array = PlainArray(
            location=location,
            path=path,
            start=tensor.start,
            shape=tensor.shape,
            dtype=tensor.dtype,
            row=f"tensor {tensor.name!r}",
        )
    itemsize = DTYPES[tensor.dtype].itemsize
    return array_row(
        [tensor.name] if keep_names else tensor.name.split("."),
        array,
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        chunk_shape=choose_chunk_shape(tensor.shape, itemsize, tensor.shape),
    )
