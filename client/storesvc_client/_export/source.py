"""An export as values: the checkpoint, the place, and what is done to the leaves."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from storesvc.format.chunks import ChunkLocations
from storesvc.format.grids import Region
from storesvc.format.keys import describe
from storesvc.format.trees import Leaf, Tree
from storesvc.storage.location import Storage
from storesvc_client._chunks.buffer_layout import Buffer
from storesvc_client._export.renames import Renames
from storesvc_client._export.target import OpenTarget
from storesvc_client._values.item_values import Container
from storesvc_client._values.progress import Meter
from storesvc_client._values.values import KINDS, UNKNOWN, Checkpoint
from storesvc_client.errors import PreconditionError

MAX_NAMED: Final = 20
"""Maximum of leaves that an error names besides its first one."""

_KIND_TEXTS: Final = {"python_scalar": "Python scalar", "prng_key": "PRNG key"}

ReadRegions: TypeAlias = Callable[
    [Iterable[tuple[int, Sequence[Region]]], Callable[[Buffer], None], Meter], None
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
    items: Mapping[str, Any]
    containers: Sequence[Container]
    """The selected containers that no leaf shows."""
    read: ReadRegions
    places: ChunkLocations
    """Location of each chunk of ``tree``."""
    pool: Path | None
    """Directory of the data files; None if this process cannot link them."""
    bucket_pool: BucketPool | None
    """The data files in a bucket; None if they are elsewhere, or out of reach."""

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
        """Raises one error for all leaves that a format cannot hold; nothing for none.

        Args:
            rejected: Rows, each with what was expected, what it is, and what to do.

        Raises:
            PreconditionError: There are such leaves; the message has the text of the
                first, and the names of the others.
        """
        if not rejected:
            return
        (row, text), *others = rejected
        names = [repr(self.tree.leaves[row].key) for row, _ in others[:MAX_NAMED]]
        if len(others) > MAX_NAMED:
            names.append(f"{len(others) - MAX_NAMED} more")
        also = f"; these cannot be exported either: {', '.join(names)}" if names else ""
        raise PreconditionError(f"{self.describe(row)}: {text}{also}")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExportCall:
    """The arguments that all formats share."""

    source: Source
    where: str
    """URL or path of the target, without the name of the format."""
    cast: str | None
    """Name of the dtype that floating-point arrays are cast to; None for no cast."""
    table: Renames
    opened: OpenTarget
    """Opens the target."""
    meter: Meter
    """Gets the progress."""
