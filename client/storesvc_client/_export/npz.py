"""Writes a checkpoint as one ``.npz`` file, member by member, without compression.

A member is named by the key of its leaf, as ``storectl get -o FILE.npz`` names it. The
format holds the dtypes of NumPy itself: a leaf of bfloat16 is rejected unless it is
cast, because ``numpy.load`` would return raw bytes.
"""

import posixpath
import zipfile
from collections.abc import Sequence
from io import BytesIO
from typing import Final

from numpy.lib import format as npy

from storesvc.format.dtypes import DTYPES
from storesvc_client._export.renames import Rule
from storesvc_client._export.report import Written
from storesvc_client._export.source import Source
from storesvc_client._export.target import NewFile, OpenTarget
from storesvc_client._export.tensor_reads import read_tensors
from storesvc_client._export.tensors import Tensor, plan_tensors
from storesvc_client._values.progress import Meter
from storesvc_client.errors import InvalidRequestError, PreconditionError

SUFFIX: Final = ".npz"

HELD: Final = frozenset(name for name, dtype in DTYPES.items() if dtype.isbuiltin == 1)
"""Names of the dtypes that NumPy's file format has."""

_MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""Time of each member: equal checkpoints make equal files."""


def write_npz(
    source: Source,
    url: str,
    *,
    cast: str | None,
    rules: Sequence[Rule],
    opened: OpenTarget,
    meter: Meter,
) -> Written:
    """Writes the selected leaves.

    Args:
        source: The checkpoint.
        url: The file; it ends in ".npz".
        cast: Name of the dtype to cast floating-point leaves to, or None.
        rules: Renames.
        opened: Opens the target.
        meter: Gets the progress.

    Raises:
        InvalidRequestError: The URL names no such file.
        PreconditionError: The format would lose a leaf, or the file exists.
        StoreError: The checkpoint could not be read, or the target not be written.
    """
    folder, name = posixpath.split(url)
    if not name.endswith(SUFFIX):
        raise InvalidRequestError(
            f"target {url!r}: expected a file whose name ends in {SUFFIX}"
        )
    tensors = plan_tensors(
        source, cast=cast, rules=rules, separator="/", dtypes=HELD, target="npz"
    )
    for tensor in tensors:
        _check_member(source, tensor)
    target = opened(folder or ".")
    if target.size(name) is not None:
        raise PreconditionError(f"{url} exists; remove it, or choose another target")
    meter.total_bytes = sum(tensor.size_bytes for tensor in tensors)
    with target.create(name) as file:
        _write(source, file, tensors, meter)
    return Written(files=(name,), size_bytes=meter.total_bytes)


def _check_member(source: Source, tensor: Tensor) -> None:
    """Rejects a name that a program which unpacks the file could take for a path out of
    its folder, or that a member cannot have."""
    parts = tensor.name.split("/")
    if not {"", ".", ".."}.isdisjoint(parts) or "\0" in tensor.name:
        raise PreconditionError(
            f"{source.describe(tensor.row)}: expected a name for a member of a zip "
            f"file, got {tensor.name!r}; rename it with rename="
        )


def _write(
    source: Source, file: NewFile, tensors: Sequence[Tensor], meter: Meter
) -> None:
    # ZipFile writes to a stream, too: it needs no seek
    with zipfile.ZipFile(_Stream(file), "w", allowZip64=True) as archive:
        for tensor, pieces in read_tensors(source, tensors, meter):
            member = zipfile.ZipInfo(f"{tensor.name}.npy", _MOMENT)
            with archive.open(member, "w", force_zip64=True) as opened:
                opened.write(_header(tensor))
                for piece in pieces:
                    with meter.phase("write"):
                        opened.write(piece)
                    meter.add(len(piece))


def _header(tensor: Tensor) -> bytes:
    header = BytesIO()
    npy.write_array_header_2_0(
        header,
        {
            "descr": npy.dtype_to_descr(DTYPES[tensor.dtype]),
            "fortran_order": False,
            "shape": tensor.shape,
        },
    )
    return header.getvalue()


class _Stream:
    """A file that can only be written from its beginning to its end."""

    def __init__(self, file: NewFile) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Appends bytes."""
        return self._file.write(data)

    def flush(self) -> None:
        """Does nothing: the file is complete when its owner closes it."""

    def close(self) -> None:
        """Does nothing, as ``flush``."""
