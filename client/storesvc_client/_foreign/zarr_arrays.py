"""Opens arrays that TensorStore reads, many at a time: zarr 2 and 3, in OCDBT or as
files.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from storesvc_client._foreign.chunk_bounds import check_stored
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.ocdbt_places import NODE, FolderPlaces, OcdbtPlaces
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

MANIFEST: Final = "manifest.ocdbt"
MAX_MANIFEST_BYTES: Final = 64 << 20

MAX_NODE_BYTES: Final = 256 << 20
"""Maximum stored bytes of a node; Orbax writes up to 100 MB."""

MAX_NODES: Final = 100_000

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


def database_base(location: Location, folder: str) -> dict[str, Any]:
    """Returns the spec of the folder of a database, ``Location.kvstore``, whose
    manifest and nodes can be read in bounded memory; what is absent is left to the
    read.

    Raises:
        DataLossError: One of them is too large, or damaged.
        UnavailableError: The storage does not answer.
    """
    what, shared = join(location.url, folder), context()
    import tensorstore as ts

    spec = location.kvstore(folder)
    files = location.stamps(folder)
    for name, stamp in files.items():
        if name.startswith("manifest.") and int(stamp.split()[0]) > MAX_MANIFEST_BYTES:
            raise DataLossError(
                f"{what}/{name}: expected at most {MAX_MANIFEST_BYTES} bytes, got "
                f"{stamp.split()[0]}; use another checkpoint"
            )
    if MANIFEST not in files:
        return spec
    with location.opening(), translated(what):
        base = ts.KvStore.open(spec, context=shared).result()
        newest = ts.ocdbt.dump(base).result()["versions"][-1:]
        left = [(each["root"].get("location"), each["root_height"]) for each in newest]
        for count, (node, height) in enumerate(left):
            found = NODE.fullmatch(node or "")
            if count > MAX_NODES or (found and int(found[1]) > MAX_NODE_BYTES):
                raise DataLossError(
                    f"{what}: expected at most {MAX_NODES} nodes of at most "
                    f"{MAX_NODE_BYTES} bytes, got more; use another checkpoint"
                )
            if found and height:
                below = ts.ocdbt.dump(base, node).result()["entries"]
                left += [(each.get("location"), height - 1) for each in below]
    return spec


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
    left = iter(places)
    while batch := list(islice(left, _OPENING_AT_ONCE)):
        _check_metadata(location, batch)
        waiting: list[tuple[Any, str, StoredIn | None]] = []
        for array in batch:
            with location.opening(), translated(array.name):
                spec = {
                    "driver": array.driver,
                    "kvstore": array.kvstore,
                    "fill_missing_data_reads": not array.is_whole,
                }
                opening = ts.open(spec, open=True, read=True, context=shared)
            waiting.append((opening, array.name, stored.of(array.kvstore)))
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


def _check_metadata(location: Location, places: Sequence[ArrayPlace]) -> None:
    """Rejects metadata of an array that is too large, of which TensorStore takes 72
    bytes of memory for each byte; what is absent is left to it.

    Raises:
        DataLossError: That of an array is.
    """
    shared = context()
    import tensorstore as ts

    names = {
        f"{place.kvstore['path']}{_METADATA_KEYS[place.driver]}": place.name
        for place in places
    }
    spec = {**places[0].kvstore, "path": ""}  # all are in one bucket or database
    with location.opening(), translated(places[0].name):
        values = ts.KvStore.open(spec, context=shared).result()
        check_stored(
            values,
            [*names],
            MAX_METADATA_BYTES,
            what=lambda key: f"{names[key]}, {key.rpartition('/')[2]}",
        )
