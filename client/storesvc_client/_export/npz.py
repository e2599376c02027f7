"""Writes a checkpoint as one ``.npz`` file, member by member, without compression.

A member is named by the key of its leaf, as ``storectl get -o FILE.npz`` names it. The
format holds the dtypes of NumPy itself: a leaf of bfloat16 is rejected unless it is
cast, because ``numpy.load`` would return raw bytes.
"""

import re
import zipfile
from collections.abc import Sequence
from io import BytesIO
from typing import Final

from numpy.lib import format as npy

from storesvc.format.dtypes import DTYPES
from storesvc_client._export.report import Written
from storesvc_client._export.source import ExportCall, Source
from storesvc_client._export.target import NewFile, split_file
from storesvc_client._export.tensor_reads import read_tensors
from storesvc_client._export.tensors import Tensor, plan_tensors
from storesvc_client._values.progress import Meter
from storesvc_client.errors import InvalidRequestError, PreconditionError

NPZ_SUFFIX: Final = ".npz"

HELD: Final = frozenset(name for name, dtype in DTYPES.items() if dtype.isbuiltin == 1)
"""Names of the dtypes that NumPy's file format has."""

_MOMENT: Final = (1980, 1, 1, 0, 0, 0)
"""Time of each member: equal checkpoints make equal files."""


def write_npz(call: ExportCall) -> Written:
    """Writes the selected leaves to a file whose name ends in ".npz".

    Raises:
        InvalidRequestError: The target is no such file.
        PreconditionError: The format would lose a leaf, or the file exists.
        StoreError: The checkpoint could not be read, or the target not be written.
    """
    source, meter = call.source, call.meter
    folder, name = split_file(call.where)
    if not name.endswith(NPZ_SUFFIX):
        raise InvalidRequestError(
            f"target {call.where!r}: expected a file whose name ends in {NPZ_SUFFIX}"
        )
    tensors = plan_tensors(
        source,
        cast=call.cast,
        table=call.table,
        separator="/",
        dtypes=HELD,
        target="npz",
    )
    for tensor in tensors:
        _check_member(source, tensor)
    target = call.opened(folder)
    if target.size(name) is not None:
        raise PreconditionError(
            f"{call.where} exists; remove it, or choose another target"
        )
    meter.total_bytes = sum(tensor.size_bytes for tensor in tensors)
    with target.create(name) as file:
        _write(source, file, tensors, meter)
    renamed = sum(tensor.is_renamed for tensor in tensors)
    return Written(files=(name,), size_bytes=meter.total_bytes, renamed_count=renamed)


def is_member_name(name: str) -> bool:
    """Returns whether a zip file can have a member of a name that no program which
    unpacks the file takes for a path out of its folder."""
    parts = re.split(r"[/\\]", name)
    return {"", ".", ".."}.isdisjoint(parts) and not re.match(r"[A-Za-z]:|.*\0", name)


def _check_member(source: Source, tensor: Tensor) -> None:
    """Rejects a name that no member has."""
    if not is_member_name(tensor.name):
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
                    del piece  # before the next one takes memory


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
