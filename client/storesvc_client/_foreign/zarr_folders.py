"""Finds and opens zarr v2 arrays of which each is a folder."""

from collections.abc import Sequence
from typing import Final

from storesvc_client._foreign.location import Location
from storesvc_client._foreign.step_search import join, place
from storesvc_client._foreign.tensorstore_array import TensorStoreArray
from storesvc_client._foreign.zarr_arrays import ArrayPlace, open_arrays
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
                f"{place(location, folder)}: expected at most {MAX_DEPTH} nested "
                "folders"
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

    The writers store all chunks of an array, also of zeros too, so an absent one is
    damage; TensorStore would return zeros by itself.

    Raises:
        DataLossError: An array is missing or damaged.
        PreconditionError: A checkpoint cannot hold it.
        UnavailableError: The storage does not answer.
    """
    below = [join(folder, path) if path else folder for path in paths]
    places = [
        ArrayPlace(
            name=f"array {path!r}",
            driver="zarr",
            kvstore=location.kvstore(each),
            is_whole=True,
        )
        for path, each in zip(paths, below, strict=True)
    ]
    return list(open_arrays(location, places))
