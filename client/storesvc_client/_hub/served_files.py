"""Files of a checkpoint that exist only while they are read.

A file is a header, computed from the manifest, and the elements of tensors that follow
each other. An item is a file without a header. A range of a file is read in these
steps:

1. The tensors that it overlaps are found by their offsets.
2. Each is cut into windows in C order, and the first and the last one are narrowed to
   the rows that the range needs.
3. Windows are read together up to ``WINDOW_BYTES``, and verified by chunk.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple

from storesvc.format.checksums import digest
from storesvc_client._chunks.memory import cut_batches
from storesvc_client._export.elements import (
    Piece,
    Source,
    raw_bytes,
    read_pieces,
    windows,
)
from storesvc_client._export.model_files import find_item_files
from storesvc_client._export.safetensors import (
    Tensor,
    TensorFile,
    cut_shards,
    plan_safetensors,
)
from storesvc_client._telemetry.progress import Meter

WINDOW_BYTES: Final = 32 << 20
"""Maximum bytes that are read together, unless one row of chunks has more."""

MOST_BYTES: Final = 96 << 20
"""Maximum bytes of a window of a tensor whose rows of chunks are larger than
``WINDOW_BYTES``, as of an array that was sharded over its columns: smaller windows
would read each chunk several times."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedFile(TensorFile):
    """A file of a repository."""

    tag: str
    """Digest of what the bytes depend on, in hexadecimal: the ETag without quotes."""


def make_files(
    source: Source, *, commit: str, shard_bytes: int
) -> Mapping[str, ServedFile]:
    """Returns the files of a checkpoint by name; reads nothing.

    Args:
        source: The checkpoint, mapped.
        commit: Commit id of the revision: differs if any of the bytes do.
        shard_bytes: Maximum bytes of the elements of a safetensors file.

    Raises:
        PreconditionError: A leaf is none that safetensors holds, or two have one name.
    """
    shards = cut_shards(source, plan_safetensors(source), shard_bytes)
    found = [*shards, *find_item_files(source)]
    return {
        file.name: ServedFile(
            name=file.name,
            header=file.header,
            tensors=file.tensors,
            tag=digest(f"{commit} {file.name} ".encode() + file.header).hex(),
        )
        for file in sorted(found, key=lambda each: each.name)
    }


class _Cut(NamedTuple):
    """Bytes of a piece."""

    piece: Piece
    size_bytes: int
    """Bytes of the piece."""
    start: int
    stop: int


def read_range(
    source: Source, file: ServedFile, start: int, stop: int
) -> Iterator[memoryview]:
    """Yields the bytes of a file from ``start`` to ``stop``, without its header.

    Raises:
        DataLossError: Stored bytes are damaged; what was yielded before is right.
    """
    meter = Meter("export", source.name)
    cuts = _cut_range(file, start, stop)
    # alone: the client waits for it, and the next ones are read while it is sent
    first = [*islice(cuts, 1)]
    others = cut_batches(cuts, lambda cut: cut.size_bytes, WINDOW_BYTES)
    for batch in chain([first], others):
        arrays = read_pieces(source, [cut.piece for cut in batch], meter)
        for cut in batch:
            # no variable holds an array while the next one is read
            yield raw_bytes(arrays.pop(cut.piece))[cut.start : cut.stop]


def _cut_range(file: ServedFile, start: int, stop: int) -> Iterator[_Cut]:
    first = max(bisect_right(file.offsets, start) - 1, 0)
    for at in range(first, len(file.tensors)):
        offset = file.offsets[at]
        if offset >= stop:
            return
        yield from _cut_tensor(
            file.tensors[at],
            max(start - offset, 0),
            min(stop, file.offsets[at + 1]) - offset,
        )


def _cut_tensor(tensor: Tensor, start: int, stop: int) -> Iterator[_Cut]:
    end = 0
    regions = windows(
        tensor.shape,
        tensor.chunk_shape,
        itemsize=tensor.itemsize,
        limit=_choose_limit(tensor),
    )
    for region in regions:
        piece = Piece(tensor.row, region)
        begin, end = end, end + piece.size_bytes(tensor.itemsize)
        if begin >= stop:
            return
        if start < end:
            yield _narrow(
                piece, tensor.itemsize, max(start - begin, 0), min(stop, end) - begin
            )


def _choose_limit(tensor: Tensor) -> int:
    """Returns the maximum bytes of a window: a row of chunks fits, if possible."""
    inner = tensor.size_bytes
    for size, chunk in zip(tensor.shape, tensor.chunk_shape, strict=True):
        inner //= max(size, 1)
        if chunk * inner <= MOST_BYTES:
            return max(WINDOW_BYTES, chunk * inner)
    return WINDOW_BYTES


def _narrow(piece: Piece, itemsize: int, start: int, stop: int) -> _Cut:
    """Returns the bytes of a piece of which only the rows that they need are read."""
    size = piece.size_bytes(itemsize)
    region = list(piece.region)
    for axis, (low, high) in enumerate(region):
        if high - low == 1:
            continue
        # all axes before are of one index, all after it are whole: rows follow each
        # other
        row = size // (high - low)
        before, after = start // row, -(-stop // row)
        region[axis] = (low + before, low + after)
        start, stop = start - before * row, stop - before * row
        if after - before > 1:
            break
        size = row
    narrowed = Piece(piece.row, tuple(region))
    return _Cut(narrowed, narrowed.size_bytes(itemsize), start, stop)
