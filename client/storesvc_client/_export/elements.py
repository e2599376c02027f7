"""Arguments and outcome of an export, and elements of leaves in the order of a format.

The elements of a tensor are cut into windows: regions that follow each other in C
order. A window ends where a row of chunks ends, so that each chunk is read once, unless
a row of chunks is larger than ``WINDOW_BYTES``: then its chunks are read again for each
part of it. The windows of small tensors are read together, and the next batch is read
while the previous one is written.

>>> list(windows((4, 6), (2, 3), itemsize=1, limit=12))
[((0, 2), (0, 6)), ((2, 4), (0, 6))]
>>> list(windows((4, 6), (4, 3), itemsize=1, limit=12))
[((0, 2), (0, 6)), ((2, 4), (0, 6))]
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import ChunkLocations
from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc.format.keys import describe
from storesvc.format.trees import Leaf, Tree
from storesvc.storage.location import Storage
from storesvc.storage.threads import Threads
from storesvc_client._chunks.buffers import RegionArrays, TakeBuffers
from storesvc_client._chunks.memory import cut_batches
from storesvc_client._export.target import Target, open_target
from storesvc_client._items.values import Container
from storesvc_client._telemetry.progress import Meter, ProgressCallback
from storesvc_client._values.key_patterns import Patterns
from storesvc_client._values.messages import UNKNOWN
from storesvc_client._values.models import KINDS, Checkpoint
from storesvc_client._values.options import MappingRules
from storesvc_client.errors import InvalidRequestError, PreconditionError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

OrbaxLayout: TypeAlias = Literal["v0", "v1"]
"""Layout of an Orbax checkpoint: of ``CheckpointManager``, or of ``Checkpointer`` in
``orbax.checkpoint.experimental.v1``."""

MAX_NAMED: Final = 20
"""Maximum of leaves that an error names besides its first one."""

_KIND_TEXTS: Final = {"python_scalar": "Python scalar", "prng_key": "PRNG key"}

ReadRegions: TypeAlias = Callable[
    [Iterable[tuple[int, Sequence[Region]]], TakeBuffers, Meter], None
]
"""Reads distinct regions of rows, each row once, and passes on their buffers, in any
thread; times are added to the meter, bytes are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPool:
    """The data files of a run in a bucket that this process reaches."""

    storage: Storage
    """The root of the store."""
    path: str
    """Folder of the data files, relative to the root; it ends in "/"."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """An open checkpoint, and the leaves of it that are exported."""

    name: str
    """Name of the checkpoint, for messages."""
    info: Checkpoint
    tree: Tree
    rows: Sequence[int]
    """Rows of the selected leaves, ascending."""
    is_whole: bool
    """True if all leaves are selected; items are exported with them."""
    containers: Sequence[Container]
    """The selected containers that no leaf shows."""
    read: ReadRegions
    places: ChunkLocations
    """Location of each chunk of ``tree``."""
    pool: Path | None
    """Directory of the data files; None if this process cannot link them."""
    bucket_pool: BucketPool | None
    """The data files in a bucket; None if they are elsewhere, or out of reach."""
    mapping_digest: str = ""
    """Digest of the rules by which the tree is mapped; "" for the stored tree."""

    def leaf(self, row: int) -> Leaf:
        """Returns a row of the leaf table."""
        return self.tree.leaves[row]

    def ordinals(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """Returns the ordinals of the chunks of some rows, in their order."""
        first = self.tree.first_chunk
        parts = [np.arange(first[row], first[row + 1]) for row in rows]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def describe(self, row: int) -> str:
        """Returns the name of a leaf or an item in messages."""
        return f"export of {self.name}: {describe(self.tree.leaves[row].key)}"

    def kind(self, row: int) -> str:
        """Returns the kind of a leaf in messages, such as "Python scalar"."""
        kind = KINDS.get(self.tree.leaves[row].kind, UNKNOWN)
        return _KIND_TEXTS.get(kind, kind.replace("_", " "))

    def check_rejected(self, rejected: Sequence[tuple[int, str]]) -> None:
        """Raises one error for all leaves that a format cannot hold, if any."""
        if not rejected:
            return
        (row, text), *others = rejected
        names = [repr(self.tree.leaves[row].key) for row, _ in others[:MAX_NAMED]]
        if len(others) > MAX_NAMED:
            names.append(f"{len(others) - MAX_NAMED} more")
        also = f"; these cannot be exported either: {', '.join(names)}" if names else ""
        raise PreconditionError(f"{self.describe(row)}: {text}{also}")

    def check_names(self, names: Iterable[tuple[int, str]], where: str = "") -> None:
        """Rejects two leaves of one name.

        Args:
            names: Rows, and their names.
            where: Remark about the names, for the message.
        """
        first = dict[str, int]()
        for row, name in names:
            if (other := first.setdefault(name, row)) != row:
                raise PreconditionError(
                    f"{self.describe(row)}: expected a name of its own{where}, got "
                    f"{name!r}, which leaf {self.leaf(other).key!r} has; rename one of "
                    "them with mapping= (--map), or leave one out with select= "
                    "(--select)"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Arguments of an export; see ``OpenCheckpoint.export``."""

    select: Patterns | None = None
    cast: "DTypeLike | None" = None
    mapping: MappingRules | None = None
    layout: OrbaxLayout | None = None
    item: str | None = None
    max_shard_bytes: int | None = None
    config: str | Path | None = None
    drop_items: bool = False
    storage_options: Mapping[str, Any] | None = None
    progress: ProgressCallback | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExportCall:
    """Arguments that all formats share."""

    source: Source
    where: str
    """URL or path of the target, without the name of the format."""
    cast: str | None
    """Name of the dtype that floating-point arrays are cast to; None for no cast."""
    request: ExportRequest
    meter: Meter
    """Gets the progress."""

    def open(self, url: str) -> Target:
        """Returns a target."""
        return open_target(url, self.request.storage_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files that a format wrote."""

    files: tuple[str, ...]
    """Paths relative to the target."""
    size_bytes: int
    """Bytes of the elements, as exported."""
    linked_bytes: int = 0
    """Bytes of the data files that are hard links."""
    copied_bytes: int = 0
    """Bytes of the data files that the bucket copied itself."""
    dropped_items: tuple[str, ...] = ()
    """Items that were left out."""


WINDOW_BYTES: Final = 64 << 20
"""Maximum bytes of a window, and of windows that are read together. An export holds two
batches in memory: one that is read, and one that is written."""


class Piece(NamedTuple):
    """A region of a leaf."""

    row: int
    region: Region

    def size_bytes(self, itemsize: int) -> int:
        """Returns the bytes of its elements."""
        return math.prod(stop - start for start, stop in self.region) * itemsize


def windows(
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    *,
    itemsize: int,
    limit: int = WINDOW_BYTES,
) -> Iterator[Region]:
    """Yields regions that follow each other in C order and cover an array once."""
    if 0 in shape:
        return
    # 1. Lead with as few single indices as make the rest of a row fit.
    dim, inner = 0, math.prod(shape[1:]) * itemsize
    while dim + 1 < len(shape) and inner > limit:
        dim += 1
        inner //= shape[dim]
    if not shape:
        yield ()
        return
    # 2. Take as many rows as fit: whole chunks, if a row of chunks fits.
    step = max(1, limit // max(1, inner))
    if step >= chunk_shape[dim]:
        step -= step % chunk_shape[dim]
    rest = tuple((0, n) for n in shape[dim + 1 :])
    for lead in product(*map(range, shape[:dim])):
        before = tuple((at, at + 1) for at in lead)
        for start in range(0, shape[dim], step):
            yield (*before, (start, min(start + step, shape[dim])), *rest)


def read_in_order(
    source: Source, pieces: Iterable[Piece], meter: Meter
) -> Iterator[NDArray[Any]]:
    """Yields the elements of distinct pieces, none empty; reads ahead by one batch."""

    def size_bytes(piece: Piece) -> int:
        return piece.size_bytes(source.tree.grids[piece.row].itemsize)

    with Threads(1, "storesvc-export") as reader:
        batches = cut_batches(pieces, size_bytes, WINDOW_BYTES)
        batch = next(batches, None)
        reading = reader.submit(read_pieces, source, batch, meter) if batch else None
        while reading is not None:
            pieces_read, arrays = batch, reading.result()
            batch = next(batches, None)
            reading = (
                reader.submit(read_pieces, source, batch, meter) if batch else None
            )
            for piece in pieces_read or ():
                yield arrays.pop(piece)


def read_pieces(source: Source, batch: Sequence[Piece], meter: Meter) -> RegionArrays:
    """Returns the elements of distinct pieces, none empty."""
    arrays = RegionArrays(batch)
    source.read(arrays.wanted, arrays.place, meter)
    return arrays


def cast_array(array: NDArray[Any], dtype: str, place: str) -> NDArray[Any]:
    """Returns an array of another floating-point dtype."""
    if array.dtype == DTYPES[dtype]:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(DTYPES[dtype])
    if not np.array_equal(np.isfinite(array), np.isfinite(cast)):
        raise InvalidRequestError(
            f"{place}: expected elements in the range of {dtype}, got larger ones of "
            f"{array.dtype}; leave the cast out, or choose a dtype of a larger range"
        )
    return cast


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """Returns the bytes of an array in C order; arrays of ml_dtypes export no buffer,
    views of their bytes do."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
