"""Finds where an OCDBT database on this machine stores its values.

TensorStore reads values of a database, but does not say where they are stored. Its dump
of the nodes does: each value is a range of a data file. A dump costs memory for each
key, so databases with very many keys are not looked at; of what cannot be found here,
readers ask TensorStore.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from storesvc_client._foreign.local_location import LocalLocation

MAX_KEYS: Final = 50_000
"""Maximum keys of a database that is looked at: some tens of MB."""

MAX_DUMPED_BYTES: Final = 4 << 20
"""Maximum stored bytes of a node whose keys are looked at."""

_VALUE: Final = re.compile(r"value:([^:%]*):([^:%]+):(\d{1,18}):(\d{1,18})")
NODE: Final = re.compile(r"btreenode:[^:]*:[^:]+:\d{1,18}:(\d{1,18})")
"""Place of a node in a dump, with its stored bytes."""


class StoredRange(NamedTuple):
    """A range of a file."""

    path: str
    """Relative to the location."""
    start: int
    size: int
    """Bytes of the range."""


class FolderPlaces:
    """The values of a folder: each is a file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @cached_property
    def location(self) -> LocalLocation:
        """The folder; a tree may have 100,000, of which few are read here."""
        return LocalLocation(Path(self._folder))

    def find(self, key: str) -> StoredRange | None:
        """Returns the range of a value; None if there is no such file."""
        size = self.location.size(key)
        return None if size is None else StoredRange(key, 0, size)


class OcdbtPlaces:
    """The values of an OCDBT database in a folder. Thread-safe."""

    def __init__(self, folder: str) -> None:
        """Reads nothing yet.

        Args:
            folder: Path of the folder.
        """
        self.location = LocalLocation(Path(folder))
        self._lock = threading.Lock()
        self._found: Mapping[str, StoredRange] | None = None

    def find(self, key: str) -> StoredRange | None:
        """Returns the range of a value; None if it is not known, for example because
        the database has too many keys.

        Raises:
            ValueError: The database is damaged; also other errors of TensorStore.
        """
        with self._lock:
            if self._found is None:
                self._found = {}  # also after an error: it would only repeat
                self._found = dict(self._values())
        return self._found.get(key)

    def _values(self) -> Iterator[tuple[str, StoredRange]]:
        import tensorstore as ts

        base = ts.KvStore.open(self.location.kvstore()).result()
        manifest = ts.ocdbt.dump(base).result()
        if not manifest["versions"]:
            return
        newest = manifest["versions"][-1]
        root = newest["root"]
        if root["statistics"]["num_keys"] > MAX_KEYS or "location" not in root:
            return
        left = [(root["location"], b"", newest["root_height"])]
        seen = 0
        while left:
            at, prefix, height = left.pop()
            node = NODE.fullmatch(at)
            if node is None or int(node[1]) > MAX_DUMPED_BYTES:
                continue
            found = ts.ocdbt.dump(base, at).result()
            seen += len(found["entries"])
            if found["height"] != height or seen > 2 * MAX_KEYS:
                return
            for entry in found["entries"]:
                key = prefix + entry["key"]
                if height:
                    below = prefix + entry["subtree_common_prefix"]
                    left.append((entry["location"], below, height - 1))
                elif value := _VALUE.fullmatch(entry.get("indirect_value", "")):
                    path = value[1] + value[2]
                    yield (
                        key.decode(errors="replace"),
                        StoredRange(path, int(value[3]), int(value[4])),
                    )
