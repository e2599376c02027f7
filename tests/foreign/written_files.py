"""Files that a test has written, as bytes, to be stored elsewhere."""

from collections.abc import Mapping
from pathlib import Path

import fsspec


def files_below(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by their paths."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def to_memory(files: Mapping[str, bytes], url: str) -> None:
    """Writes files below a ``memory://`` URL."""
    memory = fsspec.filesystem("memory")
    for path, data in files.items():
        memory.pipe_file(f"{url}/{path}", data)
