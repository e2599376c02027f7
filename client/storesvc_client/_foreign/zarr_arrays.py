"""Opens arrays that TensorStore reads, many at a time: zarr 2 and 3, in OCDBT or as
files.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from storesvc_client._foreign.bounded_json import parse_object
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.ocdbt_places import FolderPlaces, OcdbtPlaces
from storesvc_client._foreign.tensorstore_array import (
    StoredIn,
    TensorStoreArray,
    context,
    translated,
)
from storesvc_client.errors import DataLossError

MAX_METADATA_BYTES: Final = 256 << 10
"""Maximum bytes of the metadata of an array, which real ones are far below."""

_ZARR2_FIELDS: Final = frozenset({
    "zarr_format",
    "shape",
    "chunks",
    "dtype",
    "compressor",
    "fill_value",
    "order",
    "filters",
    "dimension_separator",
})  # fmt: skip
"""Fields of the metadata of an array of zarr 2 (its specification, Arrays)."""

_METADATA_KEYS: Final = {"zarr": ".zarray", "zarr3": "zarr.json"}
"""Name of the metadata of an array of each driver."""

_OPENING_AT_ONCE: Final = 512
"""Arrays that are being opened at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """The place of an array in storage."""

    name: str
    """Its name in messages."""
    driver: str
    """"zarr" or "zarr3"."""
    kvstore: dict[str, Any]
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

    stored, documents = _Stored(location), _Documents(location)
    left = iter(places)
    while batch := list(islice(left, _OPENING_AT_ONCE)):
        waiting: list[tuple[Any, str, StoredIn | None]] = []
        for place, metadata in documents.of(batch):
            spec: dict[str, Any] = {
                "driver": place.driver,
                "kvstore": place.kvstore,
                "fill_missing_data_reads": not place.is_whole,
            }
            if metadata is not None:
                spec["metadata"] = metadata
            with location.opening(), translated(place.name):
                opening = ts.open(
                    spec,
                    open=True,
                    read=True,
                    assume_metadata=metadata is not None,
                    context=shared,
                )
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


class _Documents:
    """Reads the metadata of arrays, of bounded size: TensorStore, which would parse any
    size, takes 72 bytes of memory for each byte of a hostile one."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._databases: dict[str, Any] = {}

    def of(
        self, places: Sequence[ArrayPlace]
    ) -> Iterator[tuple[ArrayPlace, dict[str, Any] | None]]:
        """Yields each place with its metadata, as TensorStore takes it; None if
        TensorStore is to read that itself, or will find that there is none.

        Raises:
            DataLossError: That of an array is too large or damaged, or its database is.
        """
        reads = [(place, self._read(place)) for place in places]
        for place, read in reads:
            with translated(place.name):
                found = read()
            size = found if isinstance(found, int) else len(found)
            if size > MAX_METADATA_BYTES:
                raise DataLossError(
                    f"{place.name}: expected at most {MAX_METADATA_BYTES} bytes of "
                    f"metadata, got {size}; use another checkpoint"
                )
            if isinstance(found, int) or not found:
                yield place, None
            else:
                yield place, _metadata(place, found)

    def _read(self, place: ArrayPlace) -> Callable[[], bytes | int]:
        """Begins to read metadata; returns what waits for it. That of a file of this
        machine is left to TensorStore, once its size in bytes is known."""
        key = _METADATA_KEYS[place.driver]
        if place.kvstore["driver"] == "file":
            return partial(_file_size, f"{place.kvstore['path']}{key}")
        with self._location.opening(), translated(place.name):
            if place.kvstore["driver"] == "ocdbt":
                reading = self._database(place).read(f"{place.kvstore['path']}{key}")
            else:
                reading = _opened_store(place.kvstore).read(key)
        return lambda: reading.result().value

    def _database(self, place: ArrayPlace) -> Any:
        """Returns the whole database that a place is in; places share it."""
        base = str(place.kvstore["base"])
        if base not in self._databases:
            self._databases[base] = _opened_store({**place.kvstore, "path": ""})
        return self._databases[base]


def _metadata(place: ArrayPlace, data: bytes) -> dict[str, Any]:
    """Parses metadata. TensorStore ignores unknown fields of zarr 2 in what it reads,
    and rejects them in what it is given."""
    found = parse_object(data, what=f"{place.name}: {_METADATA_KEYS[place.driver]}")
    if place.driver == "zarr":
        return {name: value for name, value in found.items() if name in _ZARR2_FIELDS}
    return found


def _opened_store(kvstore: Mapping[str, Any]) -> Any:
    """Returns a key-value store of TensorStore."""
    shared = context()
    import tensorstore as ts

    return ts.KvStore.open(dict(kvstore), context=shared).result()


def _file_size(path: str) -> int:
    """Returns the size of a file; 0 if there is none."""
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0
