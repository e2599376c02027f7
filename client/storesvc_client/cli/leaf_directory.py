"""Writes a directory with a file for each leaf: ``storectl get -o DIR``.

==============================  =====================================================
array with a dtype of NumPy     ``KEY.npy``
other array                     ``KEY.safetensors``, with the key as its name
text                            ``KEY.txt``, UTF-8
large integer                   ``KEY.txt``, its decimal digits
JSON                            ``KEY.json``, as it is stored
bytes                           ``KEY.bin``
==============================  =====================================================

The parts of a key are directories; a tree that is one leaf, with the key "", has one
file named "leaf". The directory appears under its name when it is complete. No key
leads out of it: the format escapes "..", "/" and control characters.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Final

from storesvc_client._values.texts import ENCODED, printable
from storesvc_client.cli.array_files import FORMATS, Arrays, is_of_numpy
from storesvc_client.cli.encoded_text import data_of
from storesvc_client.cli.errors import Refusal

if TYPE_CHECKING:
    from storesvc_client import LeafInfo
    from storesvc_client.cli.leaf_summary import Array

_SUFFIXES: Final = MappingProxyType(
    {"text": ".txt", "integer": ".txt", "json": ".json", "bytes": ".bin"}
)
"""Suffix by the kind of an encoded leaf."""

_ONLY: Final = "leaf"
"""Name of the file of a tree that is one leaf."""


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a directory that is renamed to ``path`` when the block succeeds.

    Raises:
        Refusal: The path exists, or cannot be written.
    """
    from storesvc_client import StoreError

    try:
        if os.path.lexists(path):
            raise Refusal(f"{path} exists; expected the name of a new directory")
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.mkdir()
        try:
            yield part
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except StoreError:  # some are OSErrors too, and none concerns this directory
        raise
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror or e}") from e


def file_names(leaves: "Sequence[LeafInfo]") -> dict[str, str]:
    """Returns the name of the file of each leaf, by its key.

    Raises:
        Refusal: A leaf has a dtype that no file format has, or the file of one would be
            the directory of another.
    """
    names = {leaf.key: (leaf.key or _ONLY) + _suffix(leaf) for leaf in leaves}
    above = {str(parent) for name in names.values() for parent in Path(name).parents}
    for key, name in names.items():
        if name in above:
            raise Refusal(
                f"leaf {printable(key)}: its file {printable(name)} would be the "
                "directory of other leaves; write them to several directories"
            )
    return names


def write_leaves(directory: Path, names: Mapping[str, str], arrays: Arrays) -> None:
    """Writes the files of leaves as they arrive.

    Args:
        directory: Directory for them.
        names: Names of the files by key.
        arrays: The leaves and their arrays.
    """
    for leaf, array in arrays:
        file = directory / names[leaf.key]
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as opened:
            _write(opened, leaf, array, file.suffix)
            opened.flush()
            os.fsync(opened.fileno())


def _suffix(leaf: "LeafInfo") -> str:
    if leaf.kind in ENCODED:
        return _SUFFIXES[leaf.kind]
    suffix = ".npy" if is_of_numpy(leaf) else ".safetensors"
    FORMATS[suffix].check([leaf])
    return suffix


def _write(file: IO[bytes], leaf: "LeafInfo", array: "Array", suffix: str) -> None:
    if leaf.kind in ENCODED:
        file.write(data_of(leaf, array))
    else:
        FORMATS[suffix].write(file, [leaf], [(leaf, array)])
