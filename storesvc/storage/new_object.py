"""An object of unique name that is written piece by piece."""

from storesvc.format.checksums import Buffer
from storesvc.storage.data_file import NewFile
from storesvc.storage.errors import translated
from storesvc.storage.location import Storage


class NewObject:
    """An object that is being written.

    On files each piece is written at once; elsewhere all of them at the end.
    """

    def __init__(self, path: str, file: NewFile | None, storage: Storage) -> None:
        self.path = path
        self.file = file
        self._storage = storage
        self.parts: list[Buffer] = []

    def append(self, data: Buffer) -> None:
        """Appends a piece; blocks on the storage.

        Raises:
            StorageFullError: The storage is full.
            StorageUnavailableError: The storage failed.
        """
        if self.file is None:
            self.parts.append(data)
            return
        with translated(self._storage, self.path):
            self.file.append([data])

    def discard(self) -> None:
        """Ends the object, and removes what was written."""
        if self.file is not None:
            file, self.file = self.file, None
            file.discard()
