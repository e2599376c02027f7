"""Data files that this process writes to a bucket by itself.

An object is written as a whole, so what goes into it is copied together first: the
slabs go back to the staging before it is under way.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Final

from storesvc_client._save.data_files import StoppedError
from storesvc_client._storage.bucket import BucketRoot

OBJECT_BYTES: Final = 64 << 20
"""Where the next object begins; a save that is cut off loses those under way."""

THREADS: Final = 8
"""Objects that are under way; each is in memory twice, as TensorStore has a copy."""


class NewObject:
    """An object that is put together."""

    def __init__(self) -> None:
        self._data = BytesIO()
        self.size_bytes = 0

    def append(self, parts: Sequence[memoryview]) -> None:
        """Copies parts behind those before."""
        for part in parts:
            self.size_bytes += self._data.write(part)

    def data(self) -> bytes:
        """Returns all of it, without a copy."""
        return self._data.getvalue()


class BucketPool:
    """The data files of a run in a bucket; see ``Pool``."""

    threads = THREADS

    def __init__(self, root: BucketRoot, pool: str, stopped: threading.Event) -> None:
        """Prepares to write.

        Args:
            root: Of the store.
            pool: What the data files lie below.
            stopped: Set where nobody wants them any more.
        """
        self._root = root
        self._pool = pool
        self._stopped = stopped
        self.file_bytes = OBJECT_BYTES

    @contextmanager
    def create(self, name: str) -> Generator[NewObject]:
        """See ``Pool.create``."""
        new = NewObject()
        yield new
        self._root.write(
            f"{self._pool}{name}",
            new.data(),
            what=f"save: data file {name}",
            check=self._check,
        )

    def _check(self) -> None:
        if self._stopped.is_set():
            raise StoppedError
