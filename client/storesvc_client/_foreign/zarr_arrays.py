"""Arrays that TensorStore reads: zarr 2 and 3, in OCDBT or as files.

All arrays of a process share one context: the concurrency of buckets as for a store,
and a cache for the nodes of OCDBT trees. Chunks are never cached.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region
from storesvc.storage.location import CONCURRENCY, RETRIES
from storesvc_client._foreign.foreign_step import Reading
from storesvc_client._foreign.location import Location
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    PreconditionError,
    StoreError,
    UnavailableError,
)

if TYPE_CHECKING:
    import tensorstore as ts

NODE_CACHE: Final = "cache_pool#storesvc_nodes"
NODE_CACHE_BYTES: Final = 64 << 20
"""Memory for nodes of OCDBT trees, of all arrays together."""

_OPENING_AT_ONCE: Final = 512
"""Arrays that are being opened at a time."""

_UNAVAILABLE: Final = re.compile(
    r"UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|CURL error|Connection|Timeout"
)
_DENIED: Final = re.compile(r"PERMISSION_DENIED|UNAUTHENTICATED|Permission denied")


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


@dataclass(frozen=True, slots=True, eq=False)
class ZarrArray:
    """The elements of an array that TensorStore opened."""

    name: str
    store: "ts.TensorStore"

    @property
    def dtype(self) -> str:
        """Name of the element type.

        Raises:
            PreconditionError: The format of checkpoints has no such type.
        """
        name = str(self.store.dtype.name)
        if name not in DTYPES:
            raise PreconditionError(
                f"{self.name}: expected numbers of a dtype that a checkpoint can hold, "
                f"got {name}"
            )
        return name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.store.shape)

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Shape of the pieces that are read as a whole."""
        chunk = self.store.chunk_layout.read_chunk.shape
        if chunk is None:
            return tuple(max(1, n) for n in self.shape)
        return tuple(
            max(1, min(c or n, n)) for c, n in zip(chunk, self.shape, strict=True)
        )

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        """See ``ForeignArray``."""
        import tensorstore as ts

        part = self.store[tuple(slice(*bounds) for bounds in region)]
        target = ts.array(into, copy=False, write=True, context=context())
        target = target.translate_to[part.domain.origin] if region else target
        return _Read(self.name, target.write(part).commit)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A read of TensorStore, whose errors are ours."""

    name: str
    future: Any

    def result(self, timeout: float | None = None) -> Any:
        """See ``Reading``."""
        try:
            return self.future.result(timeout)
        except TimeoutError:
            raise
        except Exception as e:
            raise _error(self.name, e) from e


@lru_cache(maxsize=1)
def context() -> "ts.Context":
    """Returns the context of all arrays."""
    import tensorstore as ts

    return ts.Context(
        {
            NODE_CACHE: {"total_bytes_limit": NODE_CACHE_BYTES},
            "gcs_request_concurrency": {"limit": CONCURRENCY},
            "gcs_request_retries": dict(RETRIES),
            "s3_request_concurrency": {"limit": CONCURRENCY},
            "s3_request_retries": dict(RETRIES),
            "http_request_concurrency": {"limit": CONCURRENCY},
            "http_request_retries": dict(RETRIES),
        }
    )


def ocdbt(base: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the spec of a folder in an OCDBT database."""
    return {"driver": "ocdbt", "base": base, "path": path, "cache_pool": NODE_CACHE}


def open_arrays(
    location: Location, places: Iterable[ArrayPlace]
) -> Iterator[ZarrArray]:
    """Yields the arrays of places, in order; their metadata is read, no elements.

    Raises:
        DataLossError: There is no such array, or its metadata is damaged.
        InvalidRequestError: TensorStore is missing.
        PreconditionError: The storage denies access.
        UnavailableError: The storage does not answer.
    """
    try:
        import tensorstore as ts
    except ImportError as e:
        raise InvalidRequestError(
            f"{location.url} holds arrays that tensorstore reads; pip install "
            "'storesvc[interop]'"
        ) from e
    waiting: list[tuple[ArrayPlace, Any]] = []
    for place in places:
        with location.opening():
            spec = {
                "driver": place.driver,
                "kvstore": place.kvstore,
                "fill_missing_data_reads": not place.is_whole,
            }
            opening = ts.open(spec, open=True, read=True, context=context())
        waiting.append((place, opening))
        if len(waiting) >= _OPENING_AT_ONCE:
            yield from map(_opened, waiting)
            waiting = []
    yield from map(_opened, waiting)


def _opened(waiting: tuple[ArrayPlace, Any]) -> ZarrArray:
    place, opening = waiting
    try:
        return ZarrArray(place.name, opening.result())
    except Exception as e:
        raise _error(place.name, e) from e


def _error(name: str, e: Exception) -> StoreError:
    """Returns the error for an exception of TensorStore, which has the status in its
    text only."""
    text = " ".join(str(e).split())
    cause = text.partition(" [source locations")[0].partition(" [tensorstore_spec")[0]
    cause = cause[:300]
    if _DENIED.search(text):
        return PreconditionError(f"{name}: access denied ({cause}); check credentials")
    if _UNAVAILABLE.search(text):
        return UnavailableError(
            f"{name}: its storage does not answer ({cause}); try again"
        )
    return DataLossError(
        f"{name}: its stored bytes are missing or damaged ({cause}); use another "
        "checkpoint"
    )
