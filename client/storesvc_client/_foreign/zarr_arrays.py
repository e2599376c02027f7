"""Opens arrays that TensorStore reads, many at a time: zarr 2 and 3, in OCDBT or as
files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from storesvc_client._foreign.location import Location
from storesvc_client._foreign.ocdbt_places import FolderPlaces, OcdbtPlaces
from storesvc_client._foreign.step_search import join
from storesvc_client._foreign.tensorstore_array import (
    StoredIn,
    TensorStoreArray,
    context,
    translated,
)
from storesvc_client.errors import DataLossError

MAX_METADATA_BYTES: Final = 256 << 10
"""Maximum bytes of the metadata of an array, which real ones are far below."""

_METADATA_KEYS: Final = {"zarr": ".zarray", "zarr3": "zarr.json"}
"""Name of the metadata of an array of each driver."""

_OPENING_AT_ONCE: Final = 512
"""Arrays that are being opened at a time."""

_ASKED_AT_ONCE: Final = 32
"""Maximum requests in flight for sizes of metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """The place of an array in storage."""

    name: str
    """Its name in messages."""
    driver: str
    """"zarr" or "zarr3"."""
    kvstore: dict[str, Any]
    folder: str | None
    """Its folder in the location; None: it is in a database."""
    is_whole: bool
    """True if each chunk must be stored; else an absent one has the fill value."""


def open_arrays(
    location: Location, places: Iterable[ArrayPlace]
) -> Iterator[TensorStoreArray]:
    """Yields the arrays of places, in order; their metadata is read, no elements.

    Raises:
        DataLossError: There is no such array, or its metadata is damaged.
        InvalidRequestError: TensorStore is missing.
        PreconditionError: A checkpoint cannot hold an array, or the storage denies
            access.
        UnavailableError: The storage does not answer.
    """
    shared = context()
    import tensorstore as ts

    stored, sizes = _Stored(location), _MetadataSizes(location)
    left = iter(places)
    while batch := list(islice(left, _OPENING_AT_ONCE)):
        sizes.check(batch)
        waiting: list[tuple[Any, str, StoredIn | None]] = []
        for place in batch:
            with location.opening(), translated(place.name):
                spec = {
                    "driver": place.driver,
                    "kvstore": place.kvstore,
                    "fill_missing_data_reads": not place.is_whole,
                }
                opening = ts.open(spec, open=True, read=True, context=shared)
            waiting.append((opening, place.name, stored.of(place.kvstore)))
        yield from map(_opened, waiting)


def _opened(waiting: tuple[Any, str, StoredIn | None]) -> TensorStoreArray:
    opening, name, stored = waiting
    with translated(name):
        return TensorStoreArray(opening.result(), row=name, stored=stored)


class _Stored:
    """Finds where arrays on this machine are stored; arrays share a database."""

    def __init__(self, location: Location) -> None:
        self._is_local = location.is_local
        self._databases: dict[str, OcdbtPlaces] = {}

    def of(self, kvstore: Mapping[str, Any]) -> StoredIn | None:
        """Returns where the values of a key-value store are stored; None: elsewhere."""
        if not self._is_local:
            return None
        if kvstore["driver"] == "file":
            return StoredIn(FolderPlaces(kvstore["path"]), "")
        folder = kvstore["base"]["path"]
        database = self._databases.setdefault(folder, OcdbtPlaces(folder))
        return StoredIn(database, kvstore["path"])


class _MetadataSizes:
    """Checks the size of the metadata of arrays: TensorStore takes 72 bytes of memory
    for each byte of a hostile one.

    What a database has is received whole before its size is known.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._databases: dict[str, Any] = {}

    def check(self, places: Sequence[ArrayPlace]) -> None:
        """Rejects metadata that is too large; what is absent is left to TensorStore.

        Raises:
            DataLossError: That of an array is, or its database is damaged.
        """
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            sizes = [(place.name, self._size(place, pool)) for place in places]
            for name, size_bytes in sizes:
                with translated(name):
                    found = size_bytes()
                if found > MAX_METADATA_BYTES:
                    raise DataLossError(
                        f"{name}: expected at most {MAX_METADATA_BYTES} bytes of "
                        f"metadata, got {found}; use another checkpoint"
                    )

    def _size(self, place: ArrayPlace, pool: Executor) -> Callable[[], int]:
        """Begins to look at the metadata of an array; returns what waits for its size
        in bytes."""
        key = _METADATA_KEYS[place.driver]
        if place.kvstore["driver"] == "file":
            return partial(_file_size, f"{place.kvstore['path']}{key}")
        if place.folder is not None:
            asking = pool.submit(self._location.size, join(place.folder, key))
            return lambda: asking.result() or 0
        with self._location.opening(), translated(place.name):
            reading = self._database(place).read(f"{place.kvstore['path']}{key}")
        return lambda: len(reading.result().value)

    def _database(self, place: ArrayPlace) -> Any:
        """Returns the whole database that a place is in; places share it."""
        base = str(place.kvstore["base"])
        if base not in self._databases:
            shared = context()
            import tensorstore as ts

            spec = {**place.kvstore, "path": ""}
            self._databases[base] = ts.KvStore.open(spec, context=shared).result()
        return self._databases[base]


def _file_size(path: str) -> int:
    """Returns the size of a file; 0 if there is none."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
