"""Writes files of arrays: ``.npy``, ``.npz`` and ``.safetensors``.

A file appears under its name when it is complete: it is written in the same directory
under a name that starts with a dot, and then renamed. Leaves are written as they
arrive, in any order, so at most one is in memory.

The formats differ in their dtypes. NumPy's formats hold the dtypes of NumPy itself;
safetensors also has bfloat16 and the common float8, but not complex128. A leaf whose
dtype a format lacks is rejected before a byte is read, never converted. Arrays of PRNG
keys are written as their key data.

``storectl get -o DIR`` writes a directory with a file for each leaf:

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

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Final, TypeAlias

from storesvc_client._export.safetensors import DTYPE_NAMES, MAX_HEADER_BYTES
from storesvc_client._views.texts import ENCODED, count_text, printable
from storesvc_client.cli.encoded_text import encode_leaf
from storesvc_client.cli.errors import Refusal

if TYPE_CHECKING:
    from storesvc_client import LeafInfo
    from storesvc_client.cli.leaf_summary import Array

Arrays: TypeAlias = "Iterable[tuple[LeafInfo, Array]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFormat:
    """The functions of one file format."""

    check: "Callable[[Sequence[LeafInfo]], None]"
    """Rejects leaves that the format cannot hold."""
    write: "Callable[[IO[bytes], Sequence[LeafInfo], Arrays], None]"
    """Writes the arrays of these leaves."""


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Yields a file that is renamed to ``path`` when the block succeeds.

    Raises:
        Refusal: The file exists and ``force`` is not given, or it cannot be written.
    """
    from storesvc_client import StoreError

    try:
        taken = path.exists() and not (force and path.is_file())
    except OSError as e:  # such as a name that is too long
        raise Refusal(f"{path}: {e.strerror or e}") from e
    if taken:
        hint = "; --force replaces it" if path.is_file() else " and is not a file"
        raise Refusal(f"{path} exists{hint}")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except StoreError:  # some are OSErrors too, and none concerns this file
        raise
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror or e}") from e
    finally:
        with suppress(FileNotFoundError):
            part.unlink()


def has_numpy_dtype(leaf: "LeafInfo") -> bool:
    """Returns whether the file format of NumPy has a name for the dtype of a leaf."""
    from storesvc.format.dtypes import DTYPES

    # 1: a dtype of NumPy itself; 2: one that another package has registered
    is_builtin: int = DTYPES[leaf.dtype].isbuiltin
    return is_builtin == 1


def _check_arrays(leaves: "Sequence[LeafInfo]") -> None:
    for leaf in leaves:
        if leaf.kind in ENCODED:
            raise Refusal(
                f"leaf {printable(leaf.key)}: expected an array, got the kind "
                f"{leaf.kind}; leave it out of the path, or write to a directory, "
                "such as -o leaves/"
            )


def _check_numpy(leaves: "Sequence[LeafInfo]") -> None:
    _check_arrays(leaves)
    for leaf in leaves:
        if not has_numpy_dtype(leaf):
            hint = "; a .safetensors file holds it" if leaf.dtype in DTYPE_NAMES else ""
            raise Refusal(
                f"leaf {printable(leaf.key)}: NumPy's file format has no name for "
                f"{leaf.dtype}{hint}"
            )


def _check_npz(leaves: "Sequence[LeafInfo]") -> None:
    from storesvc_client._export.safetensors import is_member_name

    _check_numpy(leaves)
    for leaf in leaves:
        if leaf.key and not is_member_name(leaf.key):
            raise Refusal(
                f"leaf {printable(leaf.key)}: expected a name for a member of a zip "
                "file; a .safetensors file holds it"
            )


def _check_npy(leaves: "Sequence[LeafInfo]") -> None:
    if len(leaves) != 1:
        raise Refusal(
            f"a .npy file holds one array, and {count_text(len(leaves), 'leaf')} "
            "match; .npz and .safetensors files hold several"
        )
    _check_numpy(leaves)


def _check_safetensors(leaves: "Sequence[LeafInfo]") -> None:
    _check_arrays(leaves)
    for leaf in leaves:
        if leaf.dtype not in DTYPE_NAMES:
            raise Refusal(
                f"leaf {printable(leaf.key)}: safetensors has no name for {leaf.dtype}"
            )
        if leaf.key == "__metadata__":
            raise Refusal(f"leaf {leaf.key}: safetensors keeps this name for itself")


def _write_npy(file: IO[bytes], _leaves: "Sequence[LeafInfo]", arrays: Arrays) -> None:
    from numpy.lib import format as npy

    for _, array in arrays:
        npy.write_array(file, array, allow_pickle=False)


def _write_npz(file: IO[bytes], _leaves: "Sequence[LeafInfo]", arrays: Arrays) -> None:
    import zipfile

    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for leaf, array in arrays:
            with archive.open(f"{leaf.key}.npy", "w", force_zip64=True) as member:
                _write_npy(member, (leaf,), [(leaf, array)])


def _write_safetensors(
    file: IO[bytes], leaves: "Sequence[LeafInfo]", arrays: Arrays
) -> None:
    import numpy as np

    from storesvc.format.dtypes import DTYPES

    # Widest elements first: then each array begins at a multiple of its itemsize.
    ordered = sorted(leaves, key=lambda leaf: (-DTYPES[leaf.dtype].itemsize, leaf.key))
    header: dict[str, object] = {}
    offsets, end = {}, 0
    for leaf in ordered:
        offsets[leaf.key], start = end, end
        end += leaf.size_bytes
        header[leaf.key] = {
            "dtype": DTYPE_NAMES[leaf.dtype],
            "shape": leaf.shape,
            "data_offsets": (start, end),
        }
    impls = {leaf.key: leaf.prng_impl for leaf in leaves if leaf.prng_impl}
    metadata = {"__metadata__": {"prng_impls": json.dumps(impls)}} if impls else {}
    text = json.dumps({**metadata, **header}, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise Refusal(
            f"{count_text(len(leaves), 'leaf')} make a safetensors header of "
            f"{len(text):,} bytes, expected at most {MAX_HEADER_BYTES:,}; "
            "write them in several files"
        )
    text += b" " * (-len(text) % 8)
    prefix = struct.pack("<Q", len(text)) + text
    file.write(prefix)
    for leaf, array in arrays:
        file.seek(len(prefix) + offsets[leaf.key])
        # arrays of ml_dtypes export no buffer; views of their bytes do
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.truncate(len(prefix) + end)


FORMATS: Final = MappingProxyType(
    {
        ".npy": ArrayFormat(check=_check_npy, write=_write_npy),
        ".npz": ArrayFormat(check=_check_npz, write=_write_npz),
        ".safetensors": ArrayFormat(check=_check_safetensors, write=_write_safetensors),
    }
)
"""The formats by file suffix."""


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
            if leaf.kind in ENCODED:
                opened.write(encode_leaf(leaf, array))
            else:
                FORMATS[file.suffix].write(opened, [leaf], [(leaf, array)])
            opened.flush()
            os.fsync(opened.fileno())


def _suffix(leaf: "LeafInfo") -> str:
    if leaf.kind in ENCODED:
        return _SUFFIXES[leaf.kind]
    suffix = ".npy" if has_numpy_dtype(leaf) else ".safetensors"
    FORMATS[suffix].check([leaf])
    return suffix
