"""Writes a checkpoint as safetensors files that Hugging Face's libraries open.

Order, so that no reader takes a part for the whole:

1. Shards, one after the other; each appears under its name when it is complete, and is
   then entered in ``.storesvc-export.json`` with its size and digest.
2. The index, if there are several shards.
3. ``.storesvc-export.json`` is removed.

A retry after a failure reads that file: shards of the same export whose size and digest
are right are kept.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from storesvc.format.checksums import Hasher, digest
from storesvc_client._export.report import Written
from storesvc_client._export.safetensors_layout import (
    DTYPE_NAMES,
    INDEX,
    SINGLE,
    cut_into_shards,
    header_bytes,
    in_file_order,
    index_bytes,
    shard_names,
)
from storesvc_client._export.source import ExportCall, Source
from storesvc_client._export.target import COPY_BYTES, OpenTarget, Target, split_file
from storesvc_client._export.tensor_reads import read_tensors
from storesvc_client._export.tensors import Tensor, plan_tensors
from storesvc_client._values.progress import Meter
from storesvc_client.errors import InvalidRequestError, PreconditionError

MAX_SHARD_BYTES: Final = 5_000_000_000
"""Default maximum of the bytes of elements in a file: that of Hugging Face's hub."""

SUFFIX: Final = ".safetensors"

PROGRESS_FILE: Final = ".storesvc-export.json"
"""File that records the complete shards of an unfinished export."""

_MAX_PROGRESS_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """A file of the export."""

    name: str
    tensors: Sequence[Tensor]
    """In the order of their elements."""
    header: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors)


def write_safetensors(call: ExportCall, *, max_shard_bytes: int | None) -> Written:
    """Writes the selected leaves to a folder, or to a file if the target ends in
    ".safetensors".

    Args:
        call: The export.
        max_shard_bytes: Maximum bytes of the elements in a file; None for the default.

    Raises:
        InvalidRequestError: The target is one file, and the leaves are larger.
        PreconditionError: The format would lose a leaf, or the target exists.
        StoreError: The checkpoint could not be read, or the target not be written.
    """
    source, meter = call.source, call.meter
    tensors = plan_tensors(
        source,
        cast=call.cast,
        table=call.table,
        separator=".",
        dtypes=DTYPE_NAMES,
        target="safetensors",
    )
    target, single = _target(call.where, call.opened)
    limit = max_shard_bytes or MAX_SHARD_BYTES
    parts = [tensors] if single else cut_into_shards(tensors, limit)
    _check_single(source, single, tensors, max_shard_bytes)
    shards = _shards(source, [single] if single else shard_names(len(parts)), parts)
    final = single or (SINGLE if len(shards) == 1 else INDEX)
    for name in (final,) if single else (SINGLE, INDEX):
        if target.size(name) is not None:
            raise PreconditionError(
                f"{target.url}/{name} exists; remove it, or choose another target"
            )
    meter.total_bytes = sum(shard.size_bytes for shard in shards)
    if len(shards) == 1:
        _write(source, target, shards[0], meter)
    else:
        _write_all(source, target, shards, meter)
    files = [shard.name for shard in shards] + ([INDEX] if len(shards) > 1 else [])
    size = sum(tensor.size_bytes for tensor in tensors)
    renamed = sum(tensor.is_renamed for tensor in tensors)
    return Written(files=tuple(files), size_bytes=size, renamed_count=renamed)


def _target(url: str, opened: OpenTarget) -> tuple[Target, str]:
    """Returns the folder of a URL, and the name of the file if the URL names one."""
    folder, name = split_file(url)
    if not name.endswith(SUFFIX):
        return opened(url), ""
    return opened(folder), name


def _check_single(
    source: Source, single: str, tensors: Sequence[Tensor], limit: int | None
) -> None:
    size = sum(tensor.size_bytes for tensor in tensors)
    if single and limit is not None and size > limit:
        raise InvalidRequestError(
            f"export of {source.name}: expected at most {limit} bytes, the maximum of "
            f"a shard, for one file, got {size}; give a folder as the target"
        )


def _shards(
    source: Source, names: Sequence[str], parts: Sequence[Sequence[Tensor]]
) -> list[_Shard]:
    metadata = {"format": "pt", "storesvc.checkpoint": source.name}
    metadata["storesvc.uid"] = source.info.uid
    found = []
    for name, tensors in zip(names, parts, strict=True):
        ordered = in_file_order(tensors)
        header = header_bytes(ordered, metadata, f"export of {source.name}: {name}")
        found.append(_Shard(name=name, tensors=ordered, header=header))
    return found


def _write_all(
    source: Source, target: Target, shards: Sequence[_Shard], meter: Meter
) -> None:
    """Writes shards that are not complete, then the index."""
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
    with target.create(INDEX) as file:
        file.write(index_bytes({shard.name: shard.tensors for shard in shards}))
    target.remove(PROGRESS_FILE)


def _write(source: Source, target: Target, shard: _Shard, meter: Meter) -> str:
    """Writes a shard; returns the digest of its bytes, in hexadecimal."""
    hasher = Hasher()
    with target.create(shard.name) as file:

        def append(data: bytes | memoryview) -> None:
            with meter.phase("write"):
                file.write(data)
            hasher.add(data)
            meter.add(len(data))

        append(shard.header)
        for _, pieces in read_tensors(source, shard.tensors, meter):
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


def _is_complete(target: Target, shard: _Shard, expected: str | None) -> bool:
    """Returns whether the target has a shard with the expected digest."""
    if expected is None or target.size(shard.name) != shard.size_bytes:
        return False
    hasher = Hasher()
    for start in range(0, shard.size_bytes, COPY_BYTES):
        stop = min(start + COPY_BYTES, shard.size_bytes)
        hasher.add(target.read(shard.name, start, stop))
    return hasher.digest.hex() == expected
