"""Finds and opens zarr v2 arrays of which each is a folder."""

from collections.abc import Sequence
from typing import Final

from storesvc_client._foreign.location import Location
from storesvc_client._foreign.step_search import join
from storesvc_client._foreign.tensorstore_array import TensorStoreArray, open_arrays
from storesvc_client.errors import PreconditionError

ZARR_METADATA: Final = ".zarray"

MAX_DEPTH: Final = 64
"""Maximum folders above an array."""


def find_arrays(location: Location, folder: str) -> list[str]:
    """Returns the paths of all zarr arrays below a folder, relative to it; lists each
    folder above them once.

    Raises:
        PreconditionError: Folders are nested too deeply.
    """
    found: list[str] = []
    left: list[tuple[str, int]] = [("", 0)]
    while left:
        path, depth = left.pop()
        names = location.names(join(folder, path) if path else folder)
        if ZARR_METADATA in names:
            found.append(path)
            continue
        if depth == MAX_DEPTH:
            raise PreconditionError(
                f"{location.url}/{folder}: expected at most {MAX_DEPTH} nested folders"
            )
        left += [
            (join(path, name.removesuffix("/")), depth + 1)
            for name in names
            if name.endswith("/")
        ]
    return sorted(found)


def open_folders(
    location: Location, folder: str, paths: Sequence[str]
) -> list[TensorStoreArray]:
    """Opens the arrays at paths below a folder.

    The writers store all chunks of an array, those of zeros too, so an absent one is
    damage; TensorStore would return zeros by itself.

    Raises:
        DataLossError: An array is missing or damaged.
        PreconditionError: A checkpoint cannot hold it.
        UnavailableError: The storage does not answer.
    """
    specs = [
        {
            "driver": "zarr",
            "kvstore": location.kvstore(join(folder, path) if path else folder),
            "fill_missing_data_reads": False,
        }
        for path in paths
    ]
    with location.opening():
        return open_arrays(specs, rows=[f"array {path!r}" for path in paths])
