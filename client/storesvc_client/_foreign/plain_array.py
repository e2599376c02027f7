"""Arrays of foreign checkpoints whose elements are plain bytes of a file."""

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, part
from storesvc.storage.threads import Threads
from storesvc_client._foreign.byte_ranges import Piece, pieces, strides_of
from storesvc_client._foreign.location import Location
from storesvc_client.errors import DataLossError, NotFoundError, UnavailableError

_THREADS: Final = 16
"""Reads in progress at the same time."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlainArray:
    """A ``ForeignArray`` over a range of a file: C order, little-endian."""

    location: Location
    path: str
    start: int
    """Offset of the first element in the file, in bytes."""
    shape: tuple[int, ...]
    dtype: str
    row: str
    """Name of the row for messages, such as "leaf 'params/w'"."""

    def read(self, region: Region, into: NDArray[Any]) -> "Future[None]":
        """Starts to read a region; see ``ForeignArray``."""
        return reading_threads().submit(self.fill, region, into)

    def fill(self, region: Region, into: NDArray[Any]) -> None:
        """Reads a region in this thread; raises what the result of ``read`` raises."""
        itemsize = DTYPES[self.dtype].itemsize
        try:
            for piece in pieces(self.shape, region, itemsize=itemsize):
                self._read_piece(piece, part(into, region, piece.region))
        except (DataLossError, NotFoundError) as e:
            raise DataLossError(f"{self.row}: {e}") from e
        except UnavailableError as e:
            raise UnavailableError(f"{self.row}: {e}") from e

    def _read_piece(self, piece: Piece, into: NDArray[Any]) -> None:
        start = self.start + piece.start
        if piece.is_contiguous and into.flags.c_contiguous:
            elements = into.reshape(-1).view(np.uint8)
            self.location.read_into(self.path, start, elements.data)
        else:
            covering = np.empty(piece.stop - piece.start, np.uint8)
            self.location.read_into(self.path, start, covering.data)
            strides = strides_of(self.shape, itemsize=into.itemsize)
            # The covering range ends with the last element of the view.
            into[...] = as_strided(covering.view(into.dtype), into.shape, strides)
        if self.dtype == "bool" and into.view(np.uint8).max() > 1:
            raise DataLossError(
                f"{self.path}: expected 0 or 1 in each byte of a BOOL, got "
                f"{into.view(np.uint8).max()}"
            )


@cache
def reading_threads() -> Threads:
    """Returns the threads that read files, for all arrays."""
    return Threads(_THREADS, "storesvc-foreign-read")
