"""Reads the rows of a foreign step into memory, for comparisons."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, whole
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._items.values import decode


def read_region(step: ForeignStep, key: str, region: Region) -> NDArray[Any]:
    """Returns a region of a leaf."""
    row = step.tree.by_key[key]
    shape = tuple(stop - start for start, stop in region)
    into = np.empty(shape, DTYPES[step.tree.leaves[row].dtype])
    step.arrays[row].read(region, into).result(60)
    return into


def read_leaf(step: ForeignStep, key: str) -> NDArray[Any]:
    """Returns a whole leaf."""
    row = step.tree.leaves[step.tree.by_key[key]]
    return read_region(step, key, whole(row.shape))


def read_tree(step: ForeignStep) -> dict[str, NDArray[Any]]:
    """Returns the leaves of a step by key, without items."""
    rows = step.tree.leaves[: step.tree.tree_count]
    return {row.key: read_leaf(step, row.key) for row in rows}


def read_items(step: ForeignStep) -> dict[str, Any]:
    """Returns the items of a step by name."""
    rows = step.tree.leaves[step.tree.tree_count :]
    return {
        row.key.removeprefix("%item/"): decode(
            row.kind, read_leaf(step, row.key).tobytes()
        )
        for row in rows
    }


def as_bytes(tree: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Returns dtype, shape and bytes of each array, which compare exactly."""
    arrays = {key: np.asarray(value) for key, value in tree.items()}
    return {k: (a.dtype.name, a.shape, a.tobytes()) for k, a in arrays.items()}
