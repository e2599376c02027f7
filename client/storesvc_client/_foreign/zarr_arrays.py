"""Opens arrays that TensorStore reads, many at a time: zarr 2 and 3, in OCDBT or as
files.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from storesvc_client._foreign.location import Location
from storesvc_client._foreign.ocdbt_places import FolderPlaces, OcdbtPlaces
from storesvc_client._foreign.tensorstore_array import (
    StoredIn,
    TensorStoreArray,
    context,
    translated,
)

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

    stored = _Stored(location)
    waiting: list[tuple[Any, str, StoredIn | None]] = []
    for place in places:
        with location.opening(), translated(place.name):
            spec = {
                "driver": place.driver,
                "kvstore": place.kvstore,
                "fill_missing_data_reads": not place.is_whole,
            }
            opening = ts.open(spec, open=True, read=True, context=shared)
        waiting.append((opening, place.name, stored.of(place.kvstore)))
        if len(waiting) >= _OPENING_AT_ONCE:
            yield from map(_opened, waiting)
            waiting = []
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
