"""Small chunks of many arrays in a database are read in one step, with the same bytes
as by TensorStore alone; what is not stored as expected is left to it, and bounded."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from numpy.typing import NDArray

import storesvc_client as store
from storesvc.format.grids import Region
from storesvc_client._foreign import raw_chunks
from storesvc_client._foreign.foreign_step import Wanted
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client._foreign.zarr_arrays import (
    ArrayPlace,
    TensorStoreArray,
    ocdbt,
    open_arrays,
)
from storesvc_client.errors import DataLossError
from tests.foreign.orbax_checkpoints import WRITERS
from tests.foreign.own_memory import at_most

LITTLE: Final[dict[str, Any]] = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD: Final = {"name": "zstd", "configuration": {"level": 1}}
TRANSPOSED: Final = {"name": "transpose", "configuration": {"order": [1, 0]}}
CHUNK: Final = (4, 5)
SHAPES: Final = ((10, 9), (10, 9), (4, 5), (3, 4), (8, 20))
"""Shapes of arrays with the same chunk shape: some have edges, one is a single chunk,
one is smaller than a chunk."""

MAX_MEMORY_BYTES: Final = 64 << 20


def zarr2(**more: Any) -> dict[str, Any]:
    metadata = {"chunks": CHUNK, "compressor": {"id": "zstd", "level": 1}, **more}
    return {"driver": "zarr", "metadata": metadata}


def zarr3(*codecs: Any, **more: Any) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": CHUNK}}
    return {
        "driver": "zarr3",
        "metadata": {"chunk_grid": grid, "codecs": codecs, **more},
    }


def sharded(inner: Sequence[int]) -> dict[str, Any]:
    shard = {
        "chunk_shape": inner,
        "codecs": [LITTLE, ZSTD],
        "index_codecs": [LITTLE, {"name": "crc32c"}],
    }
    return zarr3({"name": "sharding_indexed", "configuration": shard})


FORMS: Final = {
    "zarr 2, zstd": zarr2(),
    "zarr 2, plain": zarr2(compressor=None),
    "zarr 2, column-major": zarr2(order="F"),
    "zarr 2, keys with slashes": zarr2(dimension_separator="/"),
    "zarr 3, zstd": zarr3(LITTLE, ZSTD),
    "zarr 3, checksums": zarr3(LITTLE, {"name": "crc32c"}),
    "zarr 3, transposed": zarr3(TRANSPOSED, LITTLE, ZSTD),
    "zarr 3, keys of zarr 2": zarr3(LITTLE, chunk_key_encoding={"name": "v2"}),
    "zarr 3, shards": sharded(CHUNK),
}


def write(
    folder: Path,
    spec: Mapping[str, Any],
    *,
    dtype: str = "float32",
    inline_bytes: int = 1024,
) -> list[NDArray[Any]]:
    """Writes an array of each shape; returns them."""
    config = {"max_decoded_node_bytes": 700, "max_inline_value_bytes": inline_bytes}
    base = {"driver": "file", "path": f"{folder}/"}
    written = []
    for n, shape in enumerate(SHAPES):
        array = (np.arange(np.prod(shape)) + 100 * n).reshape(shape)
        array = array.astype(ts.dtype(dtype).numpy_dtype)
        kvstore = {"driver": "ocdbt", "base": base, "config": config, "path": f"{n}/"}
        where = {"kvstore": kvstore, "create": True}
        kept = {"store_data_equal_to_fill_value": True}
        opened = ts.open({**spec, **where, **kept}, dtype=array.dtype, shape=shape)
        opened.result().write(array).result()
        written.append(array)
    return written


def opened_arrays(folder: Path, driver: str) -> list[TensorStoreArray]:
    base = {"driver": "file", "path": f"{folder}/"}
    places = [
        ArrayPlace(
            name=f"leaf '{n}'",
            driver=driver,
            kvstore=ocdbt(base, f"{n}/"),
            is_whole=True,
        )
        for n in range(len(SHAPES))
    ]
    return list(open_arrays(LocalLocation(folder), places))


def wanted_regions(
    arrays: Sequence[TensorStoreArray],
) -> list[tuple[TensorStoreArray, Region, NDArray[Any]]]:
    """Returns a region of each array, and strided memory for it."""
    found = []
    for array in arrays:
        region = tuple((0 if n < 5 else 1, n) for n in array.shape)
        shape = [stop - start for start, stop in region]
        memory = np.zeros((shape[0], 2 * shape[1]), ts.dtype(array.dtype).numpy_dtype)
        found.append((array, region, memory[:, ::2]))
    return found


@pytest.mark.parametrize("inline_bytes", [0, 1024])
@pytest.mark.parametrize("form", FORMS)
def test_chunks_of_many_arrays_are_read_in_one_step(
    form: str, inline_bytes: int, tmp_path: Path
) -> None:
    """The nodes hold the values, or data files do."""
    spec = FORMS[form]
    written = write(tmp_path, spec, inline_bytes=inline_bytes)
    arrays = opened_arrays(tmp_path, spec["driver"])
    (together,) = {array.together for array in arrays}
    assert together is not None
    wanted = wanted_regions(arrays)
    assert together.read(wanted)
    for expected, (array, region, into) in zip(written, wanted, strict=True):
        part = expected[tuple(slice(*span) for span in region)]
        assert part.tobytes() == into.tobytes()
        alone = np.zeros_like(expected)
        array.read(tuple((0, n) for n in array.shape), alone).result(60)
        assert expected.tobytes() == alone.tobytes()


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_elements_of_each_size_are_read_in_one_step(dtype: str, tmp_path: Path) -> None:
    written = write(tmp_path, zarr2(), dtype=dtype)
    wanted = wanted_regions(opened_arrays(tmp_path, "zarr"))
    together = wanted[0][0].together
    assert together is not None
    assert together.read(wanted)
    for expected, (_, region, into) in zip(written, wanted, strict=True):
        part = expected[tuple(slice(*span) for span in region)]
        assert part.tobytes() == into.tobytes()


@pytest.mark.parametrize(
    "spec",
    [
        zarr2(compressor={"id": "blosc"}),
        zarr3(LITTLE, {"name": "blosc"}),
        sharded((2, 5)),
    ],
    ids=["zarr 2, blosc", "zarr 3, blosc", "several chunks in a shard"],
)
def test_chunks_that_their_size_does_not_bound_are_read_alone(
    spec: Mapping[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, spec)
    arrays = opened_arrays(tmp_path, spec["driver"])
    assert {array.together for array in arrays} == {None}


def change(folder: Path, key: str, value: bytes | None) -> None:
    """Replaces a value, or deletes it."""
    base = {"driver": "file", "path": f"{folder}/"}
    ts.KvStore.open({"driver": "ocdbt", "base": base}).result().write(
        key, value
    ).result()


@pytest.mark.parametrize(
    "value",
    [None, b"", b"x" * 40, bytes(100 << 20)],
    ids=["absent", "empty", "garbage", "100 MiB"],
)
def test_a_damaged_or_long_chunk_is_left_to_its_array_which_names_it(
    value: bytes | None, tmp_path: Path
) -> None:
    write(tmp_path, zarr2())
    change(tmp_path, "1/0.0", value)
    arrays = opened_arrays(tmp_path, "zarr")
    wanted: Sequence[Wanted] = wanted_regions(arrays)
    together = arrays[0].together
    assert together is not None
    with at_most(MAX_MEMORY_BYTES):
        assert not together.read(wanted)
        array, region, into = wanted[1]
        with pytest.raises(DataLossError, match="leaf '1'"):
            array.read(region, np.zeros(into.shape, into.dtype)).result(60)


@pytest.mark.parametrize(("limit", "most"), [("MAX_KEYS", 3), ("MAX_DUMPED_BYTES", 10)])
def test_a_database_that_is_too_large_to_be_looked_at_is_left_to_tensorstore(
    limit: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw_chunks, limit, most)
    written = write(tmp_path, zarr2())
    arrays = opened_arrays(tmp_path, "zarr")
    assert {array.together for array in arrays} == {None}
    for expected, array in zip(written, arrays, strict=True):
        into = np.zeros_like(expected)
        array.read(tuple((0, n) for n in array.shape), into).result(60)
        assert expected.tobytes() == into.tobytes()


@pytest.mark.parametrize("way", ["v0-pytree", "v0-zarr3"])
def test_a_checkpoint_of_many_small_leaves_is_restored_and_imported(
    way: str, tmp_path: Path
) -> None:
    state = {
        f"layer{n}": {"w": jnp.full((3, n % 3 + 1), n), "b": jnp.arange(n % 5 + 1)}
        for n in range(40)
    }
    WRITERS[way](tmp_path / "3", state)
    url = f"orbax:{tmp_path / '3'}"
    expected = {
        f"{k}.{key}": v.tolist() for k, x in state.items() for key, v in x.items()
    }
    found = store.open_foreign(url).restore(like=state)
    assert expected == {
        f"{k}.{key}": v.tolist() for k, x in found.items() for key, v in x.items()
    }
    with store.connect("memory://") as client:
        run = client.run("tests/imported")
        run.import_from(url)
        found = run.restore(like=state)
    assert expected == {
        f"{k}.{key}": v.tolist() for k, x in found.items() for key, v in x.items()
    }
