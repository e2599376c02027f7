"""Leaves that a path selects: their keys, a summary of each, and files of them.

A summary has minimum, maximum and mean of the values that are not NaN, infinities
included, and the count of NaN. A number that does not exist is None:

==============  ====================================================
booleans        counted as 0 and 1: the mean is the share of true
integers        exact, except for the mean
complex         mean and NaN count only: they have no order
PRNG keys       None: their bits are no quantities
texts, bytes    None, as are large integers
empty arrays    None, and a NaN count of 0
==============  ====================================================

A file, ``.npy``, ``.npz`` or ``.safetensors``, appears under its name when it is
complete: it is written in the same directory under a name that starts with a dot, and
then renamed. Leaves are written as they arrive, in any order, so at most one is in
memory.

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
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import click

from storesvc_client._values.key_patterns import keys_below, matching_keys, nearest_keys
from storesvc_client._views.texts import (
    ENCODED,
    count_text,
    printable,
    printable_lines,
    size_text,
)
from storesvc_client.cli.errors import Refusal
from storesvc_client.cli.paths import CheckpointPath, LeafPath, Readable

if TYPE_CHECKING:
    import numpy as np

    from storesvc_client import ForeignCheckpoint, ItemInfo, LeafInfo, OpenCheckpoint

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Leaves of one checkpoint."""

    checkpoint: CheckpointPath
    """The checkpoint by its step; a tag or "latest" may move before the next call."""
    leaves: "tuple[LeafInfo, ...]"
    """The leaves, in the order of their keys."""
    items: "tuple[ItemInfo, ...]" = ()
    """The items, if the whole checkpoint is selected."""
    unread: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Reason for each item that cannot be read, if the whole checkpoint is
    selected."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of the elements."""
        return sum(leaf.size_bytes for leaf in self.leaves)

    def names_encoded(self, key: str) -> bool:
        """Returns whether it is one leaf, with this key, that holds an encoded value:
        a text, JSON, bytes, or a large integer."""
        return [key] == [leaf.key for leaf in self.leaves if leaf.kind in ENCODED]


def select_leaves(client: Readable, path: CheckpointPath | LeafPath) -> Selection:
    """Returns the leaves that the path names; all of them without a glob."""
    where = path.checkpoint if isinstance(path, LeafPath) else path
    checkpoint = _pin(client, where)
    opened = client.run(checkpoint.run).open(checkpoint.which)
    leaves = opened.leaves
    if isinstance(path, CheckpointPath):
        items = tuple(map(opened.items.info, opened.items))
        return Selection(checkpoint, tuple(leaves.values()), items, find_unread(opened))
    found = matching_keys(path.glob, leaves)
    if not found:
        raise Refusal(_absence(path.glob, opened, checkpoint=checkpoint))
    return Selection(checkpoint, tuple(leaves[key] for key in found))


def select_leaf(client: Readable, path: LeafPath) -> Selection:
    """Returns the one leaf with the key of the path."""
    checkpoint = _pin(client, path.checkpoint)
    opened = client.run(checkpoint.run).open(checkpoint.which)
    leaves = opened.leaves
    if path.glob not in leaves and set("*?[") & set(path.glob):
        raise Refusal(
            f"{path.glob!r}: expected the key of one leaf, got a glob; 'storectl ls' "
            "accepts globs"
        )
    if path.glob not in leaves:
        raise Refusal(_absence(path.glob, opened, checkpoint=checkpoint))
    return Selection(checkpoint, (leaves[path.glob],))


def find_unread(opened: "OpenCheckpoint | ForeignCheckpoint") -> Mapping[str, str]:
    """Returns the reason for each item that cannot be read; only checkpoints of other
    projects have such."""
    found: Mapping[str, str] = getattr(opened.info, "unread", {})
    return found


def unread_notes(unread: Mapping[str, str]) -> Iterator[str]:
    """Yields the note of each item or file that is not read."""
    for name, reason in unread.items():
        yield f"not read: {printable(name)}: {printable(reason)}"


def _pin(client: Readable, path: CheckpointPath) -> CheckpointPath:
    if isinstance(path.which, int):
        return path
    return CheckpointPath(path.run, client.run(path.run).checkpoint(path.which).step)


def _absence(
    glob: str,
    opened: "OpenCheckpoint | ForeignCheckpoint",
    *,
    checkpoint: CheckpointPath,
) -> str:
    leaves = opened.leaves
    name = glob.partition("/")[0]
    if name in (unread := find_unread(opened)):
        return f"the item {name} of {checkpoint} cannot be read: {unread[name]}"
    if glob in opened.items:
        return (
            f"{glob!r} is an item of {checkpoint}, no leaf; 'storectl cat "
            f"{checkpoint}:{glob}' writes it"
        )
    wanted = f"no leaf of {checkpoint} matches {glob!r}"
    if below := keys_below(glob, leaves):
        subtree = glob.rstrip("/")
        return (
            f"{wanted}, which is a subtree of {count_text(len(below), 'leaf')}; "
            f"use '{subtree}/**'"
        )
    if nearest := nearest_keys(glob, leaves):
        return f"{wanted}; nearest: {', '.join(map(printable, nearest))}"
    return f"{wanted}; 'storectl ls {checkpoint}' lists its leaves"


_BLOCK: Final = 1 << 20
"""Elements converted at a time, which bounds the memory on top of the leaf's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Four numbers that summarize the values of a leaf."""

    min: complex | None
    max: complex | None
    mean: complex | None
    nan_count: int | None


def summarize(leaf: "LeafInfo", array: "Array") -> Summary:
    import numpy as np

    if leaf.prng_impl or leaf.kind in ENCODED:
        return Summary(min=None, max=None, mean=None, nan_count=None)
    flat = array.reshape(-1)
    least, greatest, total, count = [], [], 0.0, 0
    for start in range(0, flat.size, _BLOCK):
        values = _computable(flat[start : start + _BLOCK])
        values = values[~np.isnan(values)]
        if not values.size:
            continue
        count += values.size
        # Infinities of both signs give NaN, large finite numbers may give inf.
        with np.errstate(over="ignore", invalid="ignore"):
            total += values.sum(dtype=np.result_type(values, np.float64)).item()
        if not np.iscomplexobj(values):
            least.append(values.min().item())
            greatest.append(values.max().item())
    return Summary(
        min=min(least, default=None),
        max=max(greatest, default=None),
        mean=total / count if count else None,
        nan_count=flat.size - count,
    )


def _computable(values: "Array") -> "Array":
    """Returns the values, exactly, in a dtype with NumPy arithmetic."""
    import numpy as np

    if values.dtype.isbuiltin == 1:
        return values
    is_integer = values.dtype.name.startswith(("int", "uint"))
    return values.astype(np.int8 if is_integer else np.float32)


def echo_data(what: str, kind: str, data: bytes) -> None:
    """Writes a value to stdout, byte for byte. In a terminal a line feed is added, and
    control characters are escaped."""
    if not sys.stdout.isatty():
        click.echo(data, nl=False)
    elif kind == "bytes":
        raise Refusal(
            f"{what} is {size_text(len(data))} of bytes, which may control a terminal; "
            "redirect it to a file"
        )
    else:
        click.echo(printable_lines(data.decode(errors="replace")))


def encode_leaf(leaf: "LeafInfo", array: "Array") -> bytes:
    """Returns the bytes that are written for an encoded leaf: the stored ones, but of a
    large integer its decimal digits."""
    data = array.tobytes()
    if leaf.kind != "integer":
        return data
    try:
        return str(int.from_bytes(data, "little", signed=True)).encode()
    except ValueError as e:
        raise Refusal(
            f"leaf {printable(leaf.key)}: expected an integer of at most "
            f"{sys.get_int_max_str_digits():,} digits, got one of "
            f"{size_text(len(data))}; read it with run.restore(select=)"
        ) from e


Arrays: TypeAlias = "Iterable[tuple[LeafInfo, Array]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFormat:
    """The functions of one file format."""

    check: "Callable[[Sequence[LeafInfo]], None]"
    """Rejects leaves that the format cannot hold."""
    write: "Callable[[IO[bytes], Sequence[LeafInfo], Arrays], None]"
    """Writes the arrays of these leaves."""


@contextmanager
def _refuse_system_errors(path: Path) -> Iterator[None]:
    from storesvc_client import StoreError

    try:
        yield
    except StoreError:  # some are OSErrors too, and none concerns this path
        raise
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror or e}") from e


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """Yields a file that is renamed to ``path`` when the block succeeds."""
    with _refuse_system_errors(path):
        if path.exists() and not (force and path.is_file()):
            hint = "; --force replaces it" if path.is_file() else " and is not a file"
            raise Refusal(f"{path} exists{hint}")
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with part.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
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
    from storesvc_client._export.safetensors import DTYPE_NAMES

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
    from storesvc_client._export.safetensors import DTYPE_NAMES

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
    from storesvc_client._export.safetensors import DTYPE_NAMES, MAX_HEADER_BYTES

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
    """Yields a directory that is renamed to ``path`` when the block succeeds."""
    with _refuse_system_errors(path):
        if os.path.lexists(path):
            raise Refusal(f"{path} exists; expected the name of a new directory")
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.mkdir()
        try:
            yield part
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def file_names(leaves: "Sequence[LeafInfo]") -> dict[str, str]:
    """Returns the name of the file of each leaf, by its key."""
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
    """Writes the files of leaves as they arrive."""
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
