"""Pictures of an open checkpoint, and the statistics of its leaves.

Pictures read nothing: they follow from the manifest. Statistics read chunks, at most
as many as a budget of bytes allows.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from storesvc.format.grids import Region
from storesvc_client._chunks.buffers import RegionArrays
from storesvc_client._pictures.layer_bars import (
    changed_shares,
    chunk_map,
    layer_bars,
    sharding_grid,
)
from storesvc_client._pictures.leaf_statistics import (
    LeafStatistics,
    leaf_statistics,
    sampled_chunks,
)
from storesvc_client._pictures.svg import Picture
from storesvc_client._pictures.treemap import treemap
from storesvc_client._restore.open_tree import OpenTree, TreeReader, get_reader
from storesvc_client._values.models import Diff, LeafInfo
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray

AT_ONCE_BYTES: Final = 64 << 20
"""Maximum bytes of chunks that statistics keep in memory."""


class Pictures:
    """Pictures of one checkpoint; ``OpenCheckpoint.pictures``. They read no data."""

    def __init__(self, reader: TreeReader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        return f"<Pictures of {self._reader.name}>"

    def treemap(self, diff: Diff | None = None) -> Picture:
        """Returns a treemap of the leaves by bytes, which a notebook shows.

        >>> run.open("best").pictures.treemap(run.diff(100, "best"))

        Args:
            diff: Differences from an earlier checkpoint: shares of changed chunks then
                give the colours; None: dtypes do.

        Raises:
            InvalidRequestError: The differences lead to another checkpoint.
        """
        shares = None if diff is None else changed_shares(self._check_diff(diff))
        drawing = treemap(self._reader.leaves.values(), changed=shares)
        return Picture(name=f"treemap of {self._reader.name}", drawing=drawing)

    def layers(self, diff: Diff) -> Picture:
        """Returns bars of the share of changed bytes in each layer.

        Args:
            diff: Differences from an earlier checkpoint.

        Raises:
            InvalidRequestError: The differences lead to another checkpoint.
        """
        shares = changed_shares(self._check_diff(diff))
        drawing = layer_bars(self._reader.leaves.values(), shares)
        return Picture(name=f"changes of {self._reader.name}", drawing=drawing)

    def chunks(self, key: str, *, base: OpenTree | None = None) -> Picture:
        """Returns a map of the chunks of a leaf.

        Args:
            key: Key of the leaf.
            base: An earlier checkpoint: chunks with another digest are filled.

        Raises:
            NotFoundError: A checkpoint has no such leaf.
            InvalidRequestError: The leaf has another dtype, shape or chunk shape in the
                earlier checkpoint, or a checkpoint is one of another project.
        """
        leaf = self._leaf(key)
        changed = (
            None
            if base is None
            else changed_chunks(self._reader, get_reader(base), key)
        )
        drawing = chunk_map(leaf.shape, leaf.chunk_shape, changed=changed)
        return Picture(name=f"chunks of {key} of {self._reader.name}", drawing=drawing)

    def sharding(self, key: str) -> Picture:
        """Returns the blocks of a leaf, and the devices of each when it was saved.

        Args:
            key: Key of the leaf.

        Raises:
            NotFoundError: The checkpoint has no such leaf.
        """
        leaf = self._leaf(key)
        drawing = sharding_grid(leaf.shape, leaf.sharding)
        name = f"sharding of {key} of {self._reader.name}"
        return Picture(name=name, drawing=drawing)

    def _leaf(self, key: str) -> LeafInfo:
        self._reader.find_row(key)  # raises if there is none
        return self._reader.leaves[key]

    def _check_diff(self, diff: Diff) -> Diff:
        found = f"{diff.checkpoint.run}@{diff.checkpoint.step}"
        if found != self._reader.name:
            raise InvalidRequestError(
                f"picture of {self._reader.name}: expected a diff whose later "
                f"checkpoint it is, got one of {found}"
            )
        return diff


def changed_chunks(later: TreeReader, base: TreeReader, key: str) -> list[int]:
    """Returns the numbers of the chunks of a leaf whose digests differ."""
    one, other = (each.find_digests(each.find_row(key)) for each in (later, base))
    if one is None or other is None:
        name = later.name if one is None else base.name
        raise InvalidRequestError(
            f"chunks of {key}: expected two checkpoints of a store, got {name}, which "
            "has no digests"
        )
    after, before = later.leaves[key], base.leaves[key]
    forms = [(leaf.dtype, leaf.shape, leaf.chunk_shape) for leaf in (after, before)]
    if forms[0] != forms[1]:
        texts = [f"{dtype} {shape} in chunks {cut}" for dtype, shape, cut in forms]
        raise InvalidRequestError(
            f"chunks of {key}: expected {texts[0]} in {base.name}, got {texts[1]}"
        )
    differ = (one != other).any(axis=1)
    return [int(number) for number in np.flatnonzero(differ)]


def compute_statistics(
    reader: TreeReader, key: str, *, budget_bytes: int
) -> LeafStatistics:
    """Returns the statistics of a leaf; see ``OpenTree.statistics``."""
    row = reader.find_row(key)
    leaf, grid = reader.leaves[key], reader.tree.grids[row]
    chunks = sampled_chunks(leaf, grid.chunk_bytes, budget_bytes)
    at_once = max(AT_ONCE_BYTES // max(grid.chunk_bytes, 1), 1)

    def blocks() -> "Iterator[tuple[Region, NDArray[Any]]]":
        with reader.hold():
            for start in range(0, len(chunks), at_once):
                regions = [*map(grid.region, chunks[start : start + at_once])]
                arrays = RegionArrays((row, region) for region in regions)
                reader.read_regions(arrays.wanted, arrays.place)
                yield from ((region, arrays[row, region]) for region in regions)

    return leaf_statistics(leaf, blocks())
