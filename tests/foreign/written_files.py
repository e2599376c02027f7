"""Files that a test has written, as bytes, to be stored elsewhere."""

from collections.abc import Mapping
from pathlib import Path

import fsspec
import tensorstore as ts

from storesvc_client._foreign.locations import Location


def files_below(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by their paths."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def to_memory(files: Mapping[str, bytes], url: str) -> None:
    """Writes files below a ``memory://`` URL."""
    memory = fsspec.filesystem("memory")
    for path, data in files.items():
        memory.pipe_file(f"{url}/{path}", data)


def put_files(files: Mapping[str, bytes], location: Location) -> None:
    """Writes files into a location."""
    if location.url.startswith("memory:"):
        to_memory(files, location.url)
        return
    with location.opening():
        store = ts.KvStore.open(location.kvstore()).result()
    for path, data in files.items():
        store.write(path, data).result()
