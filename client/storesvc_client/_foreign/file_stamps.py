"""Describes the data files of a step by their stamps, for its digest.

The files that describe a step need not change when its elements do. So the digest of a
step covers the stamps of its data files too, unless a file with the checksums or the
names of all of them is part of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import xxhash

from storesvc.storage.threads import Threads
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.step_search import join, place
from storesvc_client.errors import PreconditionError

MAX_FILES: Final = 4_000_000
"""Maximum files and folders of a step."""

_THREADS: Final = 16
"""Folders that are listed at the same time."""

_BATCH: Final = 1024
"""Folders whose lists are held at the same time."""


def stamp_of_folders(location: Location, folder: str, paths: Iterable[str]) -> bytes:
    """Returns a digest of path and stamp of each file below some folders.

    Args:
        location: Location of the steps.
        folder: Folder of the step; the digest does not depend on its name.
        paths: Paths of the folders relative to that of the step, in an order that
            depends on the step alone; "": the folder of the step.

    Raises:
        PreconditionError: There are too many files.
        UnavailableError: The storage does not answer.
    """
    digest = xxhash.xxh3_128()
    count = 0
    left = list(paths)
    with Threads(_THREADS) as pool:
        while left:
            below: list[str] = []
            for path, stamp in _listed(location, folder, left, pool):
                count += 1
                if count > MAX_FILES:
                    raise PreconditionError(
                        f"{place(location, folder)}: expected a step of at most "
                        f"{MAX_FILES} files, got more; write it again in larger chunks"
                    )
                if path.endswith("/"):
                    below.append(path.removesuffix("/"))
                else:
                    row = f"{path}\0{stamp}\0"
                    digest.update(row.encode(errors="surrogateescape"))
            left = below
    return digest.digest()


def _listed(
    location: Location, folder: str, paths: Sequence[str], pool: Threads
) -> Iterator[tuple[str, str]]:
    """Yields path and stamp of all that is in some folders, in order."""
    for start in range(0, len(paths), _BATCH):
        some = paths[start : start + _BATCH]
        below = [join(folder, path) if path else folder for path in some]
        for path, found in zip(some, pool.map(location.stamps, below), strict=True):
            for name, stamp in found.items():
                yield join(path, name), stamp
