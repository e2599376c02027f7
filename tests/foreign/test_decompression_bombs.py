"""A stored chunk of some kilobytes that would be decoded to much more than a chunk is
rejected, and takes no memory."""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import tensorstore as ts

from storesvc_client._foreign.zarr_arrays import TensorStoreArray
from storesvc_client.errors import DataLossError, PreconditionError
from tests.foreign.own_memory import at_most

BOMB_BYTES: Final = 256 << 20
"""Bytes that each bomb is decoded to; a chunk of the arrays has 4 KiB."""

MAX_MEMORY_BYTES: Final = 64 << 20

SIZE: Final = 1024

BLOSC: Final = {"id": "blosc", "cname": "zstd", "clevel": 9, "shuffle": 0}


def zarr2(compressor: Mapping[str, Any], **metadata: Any) -> dict[str, Any]:
    fields = {"shape": [SIZE, 1], "chunks": [SIZE, 1], "compressor": compressor}
    return {"driver": "zarr", "metadata": fields | {"dtype": "<f4"} | metadata}


def zarr3(*codecs: Mapping[str, Any], **metadata: Any) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": [SIZE, 1]}}
    fields = {"shape": [SIZE, 1], "chunk_grid": grid, "data_type": "float32"}
    fields |= {"codecs": [{"name": "bytes"}, *codecs]}
    return {"driver": "zarr3", "metadata": fields | metadata}


def zstd_bomb() -> bytes:
    """Returns a frame of blocks that each repeat one byte."""
    block, count = 128 << 10, BOMB_BYTES // (128 << 10)
    head = b"\x28\xb5\x2f\xfd\x00\x38"
    blocks = (block << 3 | 1 << 1 | (n == count - 1) for n in range(count))
    return head + b"".join(each.to_bytes(3, "little") + b"\0" for each in blocks)


def deflated_bomb(bits: int) -> bytes:
    deflate = zlib.compressobj(1, zlib.DEFLATED, bits)
    zeros = bytes(1 << 20)
    parts = [deflate.compress(zeros) for _ in range(BOMB_BYTES >> 20)]
    return b"".join([*parts, deflate.flush()])


def blosc_bomb() -> bytes:
    """Returns a header whose blocks are all the first block of a real chunk."""
    spec = zarr2(BLOSC, shape=[4 << 20, 1], chunks=[4 << 20, 1])
    array = ts.open({**spec, "kvstore": {"driver": "memory"}}, create=True).result()
    array.write(np.ones((4 << 20, 1), np.float32)).result()
    assert array.kvstore is not None
    real = array.kvstore.read("0.0").result().value
    block_bytes, first, second = (
        int.from_bytes(real[at : at + 4], "little") for at in (8, 16, 20)
    )
    block, count = real[first:second], BOMB_BYTES // block_bytes
    place = 16 + 4 * count
    sizes = [BOMB_BYTES, block_bytes, place + len(block)]
    numbers = [*sizes, *[place] * count]
    return real[:4] + b"".join(n.to_bytes(4, "little") for n in numbers) + block


BOMBS: Final[dict[str, tuple[dict[str, Any], Callable[[], bytes]]]] = {
    "zarr 2, zstd": (zarr2({"id": "zstd"}), zstd_bomb),
    "zarr 2, zlib": (zarr2({"id": "zlib"}), lambda: deflated_bomb(15)),
    "zarr 2, gzip": (zarr2({"id": "gzip"}), lambda: deflated_bomb(31)),
    "zarr 2, blosc": (zarr2(BLOSC), blosc_bomb),
    "zarr 2, blosc, a folder for each dimension": (
        zarr2(BLOSC, dimension_separator="/"),
        blosc_bomb,
    ),
    "zarr 3, zstd": (zarr3({"name": "zstd"}), zstd_bomb),
    "zarr 3, gzip": (zarr3({"name": "gzip"}), lambda: deflated_bomb(31)),
    "zarr 3, blosc": (zarr3({"name": "blosc"}), blosc_bomb),
    "zarr 3, blosc, keys as in zarr 2": (
        zarr3({"name": "blosc"}, chunk_key_encoding={"name": "v2"}),
        blosc_bomb,
    ),
}


def opened(spec: Mapping[str, Any], folder: Path) -> ts.TensorStore:
    """Returns a new array of ones."""
    kvstore = {"driver": "file", "path": f"{folder}/"}
    array = ts.open({**spec, "kvstore": kvstore}, create=True).result()
    array.write(np.ones((SIZE, 1), np.float32)).result()
    return array


def read(array: TensorStoreArray) -> np.ndarray[Any, Any]:
    into = np.zeros((SIZE, 1), np.float32)
    array.read(((0, SIZE), (0, 1)), into).result(60)
    return into


@pytest.mark.parametrize(("spec", "bomb"), BOMBS.values(), ids=BOMBS)
def test_a_chunk_that_grows_beyond_its_size_is_rejected_in_bounded_memory(
    tmp_path: Path, spec: dict[str, Any], bomb: Callable[[], bytes]
) -> None:
    store = opened(spec, tmp_path)
    assert np.array_equal(read(TensorStoreArray(store, row="w")), np.ones((SIZE, 1)))
    chunks = [path for path in tmp_path.rglob("[0-9]*") if path.is_file()]
    assert len(chunks) == 1
    chunks[0].write_bytes(bomb())
    assert chunks[0].stat().st_size < 2 << 20
    with at_most(MAX_MEMORY_BYTES), pytest.raises(DataLossError):
        read(TensorStoreArray(store, row="w"))


SHARDS: Final = {
    "name": "sharding_indexed",
    "configuration": {
        "chunk_shape": [SIZE // 2, 1],
        "codecs": [{"name": "bytes"}, {"name": "blosc"}],
    },
}


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(zarr3({"name": "blosc"}, {"name": "zstd"}), id="below zstd"),
        pytest.param(zarr3({"name": "blosc"}, {"name": "blosc"}), id="twice"),
        pytest.param(zarr3(codecs=[SHARDS]), id="in shards"),
    ],
)
def test_blosc_without_a_header_at_the_front_of_the_stored_bytes_is_rejected(
    tmp_path: Path, spec: dict[str, Any]
) -> None:
    store = opened(spec, tmp_path)
    with pytest.raises(PreconditionError, match="write it again with zstd"):
        TensorStoreArray(store, row="w")
