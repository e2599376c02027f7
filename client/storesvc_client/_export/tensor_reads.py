"""Reads the tensors of a flat format: cast, transposed, in pieces of bounded size."""

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from storesvc_client._export.elements import (
    TRANSPOSED_BYTES,
    WINDOW_BYTES,
    Piece,
    cast_array,
    raw_bytes,
    read_in_order,
    windows,
)
from storesvc_client._export.source import Source
from storesvc_client._export.tensors import Tensor
from storesvc_client._values.progress import Meter


def read_tensors(
    source: Source, tensors: Sequence[Tensor], meter: Meter
) -> Iterator[tuple[Tensor, Iterator[memoryview]]]:
    """Yields each tensor with its bytes in C order, in pieces; all pieces of a tensor
    must be taken before the next one.

    Raises:
        StoreError: Stored bytes are damaged, or a cast exceeds the range.
    """
    plans = [
        [
            Piece(tensor.row, tensor.saved(region))
            for region in windows(
                tensor.shape,
                tensor.chunk_shape,
                itemsize=source.tree.grids[tensor.row].itemsize,
                limit=WINDOW_BYTES if tensor.axes is None else TRANSPOSED_BYTES,
            )
        ]
        for tensor in tensors
    ]
    arrays = read_in_order(source, (p for plan in plans for p in plan), meter)
    for tensor, plan in zip(tensors, plans, strict=True):
        yield tensor, _pieces(source, tensor, arrays, len(plan))


def _pieces(
    source: Source, tensor: Tensor, arrays: Iterator[NDArray[Any]], count: int
) -> Iterator[memoryview]:
    # no variable holds an array while the next one is read
    for _ in range(count):
        yield _exported(source, tensor, next(arrays))


def _exported(source: Source, tensor: Tensor, array: NDArray[Any]) -> memoryview:
    """Returns the bytes of a piece, transposed and cast."""
    if tensor.axes is not None:
        array = array.transpose(tensor.axes)
    return raw_bytes(cast_array(array, tensor.dtype, source.describe(tensor.row)))
