"""Chunks that are stored as plain elements are read from their files; all others by
TensorStore, with the same bytes and the same errors."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorstore as ts
from numpy.typing import NDArray

from storesvc.format.grids import Region
from storesvc_client._foreign import raw_chunks as ocdbt_places
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client._foreign.raw_chunks import (
    FolderPlaces,
    OcdbtPlaces,
    Places,
    RawChunks,
    raw_form,
)
from storesvc_client._foreign.zarr_arrays import (
    ArrayPlace,
    TensorStoreArray,
    ocdbt,
    open_arrays,
)
from storesvc_client.errors import DataLossError
from tests.support.examples import sampled

ARRAY = np.arange(10 * 9, dtype=np.float32).reshape(10, 9)
CHUNK = (4, 5)
LARGE = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)
"""Its chunks are large enough to be read from their files."""

LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}


def zarr2(chunk: tuple[int, ...], **more: Any) -> dict[str, Any]:
    metadata = {"chunks": chunk, "compressor": None, **more}
    return {"driver": "zarr", "metadata": metadata}


def zarr3(chunk: tuple[int, ...], codecs: Any = (LITTLE,)) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    return {"driver": "zarr3", "metadata": {"chunk_grid": grid, "codecs": [*codecs]}}


def sharded(chunk: tuple[int, ...], inner: tuple[int, ...]) -> dict[str, Any]:
    shard = {
        "chunk_shape": inner,
        "codecs": [LITTLE],
        "index_codecs": [LITTLE, {"name": "crc32c"}],
    }
    return zarr3(chunk, [{"name": "sharding_indexed", "configuration": shard}])


FORMS = {"zarr2": zarr2, "zarr3": zarr3, "shards": lambda chunk: sharded(chunk, chunk)}


class Stored(NamedTuple):
    """An array that was written."""

    kvstore: dict[str, Any]
    chunks: RawChunks | None
    """None if they are not plain elements."""

    def read(self, region: Region, into: NDArray[Any]) -> bool:
        assert self.chunks is not None
        return self.chunks.read(region, into)


def stored(
    folder: Path,
    spec: Mapping[str, Any],
    array: NDArray[Any],
    *,
    in_ocdbt: bool = False,
) -> Stored:
    """Writes an array."""
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{folder}/params.w/"}
    written: dict[str, Any] = kvstore
    if in_ocdbt:
        kvstore = ocdbt(base, "params.w/")
        config = {"max_decoded_node_bytes": 300, "max_inline_value_bytes": 10}
        written = {"driver": "ocdbt", "base": base, "config": config}
        written["path"] = "params.w/"  # several levels of nodes
    opened = ts.open(
        {**spec, "kvstore": written}, create=True, dtype=array.dtype, shape=array.shape
    )
    found = opened.result()
    found.write(array).result()
    places: Places = FolderPlaces(f"{folder}/params.w")
    prefix = ""
    if in_ocdbt:
        places, prefix = OcdbtPlaces(str(folder)), "params.w/"
    metadata, dtype = found.spec().to_json()["metadata"], found.dtype.name
    form, chunks = raw_form(metadata, dtype), None
    if form is not None:
        chunks = RawChunks(
            form, metadata, places, prefix=prefix, dtype=dtype, row="leaf 'w'"
        )
    return Stored(kvstore, chunks)


def opened_array(
    folder: Path, driver: str, kvstore: dict[str, Any], *, is_whole: bool = True
) -> TensorStoreArray:
    place = ArrayPlace(
        name="leaf 'w'", driver=driver, kvstore=kvstore, is_whole=is_whole
    )
    (found,) = open_arrays(LocalLocation(folder), [place])
    return found


def regions(shape: tuple[int, int]) -> Iterator[Region]:
    spans = [
        [(start, stop) for start in range(n) for stop in range(start + 1, n + 1)]
        for n in shape
    ]
    return product(*spans)


@pytest.mark.slow
@pytest.mark.parametrize("in_ocdbt", [False, True])
@pytest.mark.parametrize("form", sampled(FORMS, every=3))
def test_every_region_has_its_elements(
    form: str, tmp_path: Path, *, in_ocdbt: bool
) -> None:
    chunks = stored(tmp_path, FORMS[form](CHUNK), ARRAY, in_ocdbt=in_ocdbt)
    for region in regions((10, 9)):
        expected = ARRAY[tuple(slice(*span) for span in region)]
        into = np.full(expected.shape, -1, np.float32)
        assert chunks.read(region, into)
        assert expected.tobytes() == into.tobytes()


@pytest.mark.parametrize("dtype", ["int8", "uint64", "bfloat16", "complex64"])
@pytest.mark.parametrize("form", FORMS)
def test_elements_of_each_size_are_read(form: str, dtype: str, tmp_path: Path) -> None:
    array = np.arange(24).astype(ts.dtype(dtype).numpy_dtype).reshape(4, 6)
    chunks = stored(tmp_path, FORMS[form]((3, 6)), array)
    into = np.empty_like(array)
    assert chunks.read(((0, 4), (0, 6)), into)
    assert array.tobytes() == into.tobytes()


@pytest.mark.parametrize(
    "spec",
    [
        zarr2(CHUNK, compressor={"id": "zstd"}),
        zarr2(CHUNK, order="F"),
        zarr2(CHUNK, dtype=">f4"),
        zarr3(CHUNK, [{"name": "bytes", "configuration": {"endian": "big"}}]),
        zarr3(CHUNK, [LITTLE, {"name": "crc32c"}]),
        zarr3(CHUNK, [LITTLE, {"name": "zstd"}]),
        zarr3(
            CHUNK, [{"name": "transpose", "configuration": {"order": [1, 0]}}, LITTLE]
        ),
        sharded((4, 10), (4, 5)),
    ],
    ids=str,
)
def test_chunks_in_another_form_are_left_to_tensorstore(
    spec: Mapping[str, Any], tmp_path: Path
) -> None:
    assert stored(tmp_path, spec, ARRAY).chunks is None


def test_the_records_of_one_field_are_left_to_tensorstore() -> None:
    spec = zarr2(CHUNK, dtype=[["x", ">f4"]], order="C")
    assert raw_form(spec["metadata"], "float32") is None


def test_the_bytes_of_a_bool_are_left_to_tensorstore(tmp_path: Path) -> None:
    assert stored(tmp_path, zarr2(CHUNK), ARRAY > 3).chunks is None


@pytest.mark.parametrize("in_ocdbt", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_absent_chunk_has_the_fill_value_unless_all_must_be_stored(
    form: str, tmp_path: Path, *, in_ocdbt: bool
) -> None:
    array = LARGE.copy()
    array[256:] = 0  # TensorStore does not store it
    spec = FORMS[form]((256, 512))
    if spec["driver"] == "zarr":
        spec["metadata"] |= {"fill_value": 0, "dtype": "<f4"}
    chunks = stored(tmp_path, spec, array, in_ocdbt=in_ocdbt)
    region, into = ((0, 512), (0, 512)), np.ones((512, 512), np.float32)
    assert not chunks.read(region, into)

    sparse = opened_array(tmp_path, spec["driver"], chunks.kvstore, is_whole=False)
    sparse.read(region, into).result()
    assert array.tobytes() == into.tobytes()
    with pytest.raises(DataLossError, match="leaf 'w'"):
        opened_array(tmp_path, spec["driver"], chunks.kvstore).read(
            region, into
        ).result()


@pytest.mark.parametrize("in_ocdbt", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_that_end_early_are_damage(
    form: str, tmp_path: Path, *, in_ocdbt: bool
) -> None:
    spec = FORMS[form]((512, 512))
    kvstore = stored(tmp_path, spec, LARGE, in_ocdbt=in_ocdbt).kvstore
    array = opened_array(tmp_path, spec["driver"], kvstore)
    into = np.empty_like(LARGE)
    array.read(((0, 512), (0, 512)), into).result()
    assert LARGE.tobytes() == into.tobytes()
    (data,) = (p for p in tmp_path.rglob("*") if p.stat().st_size >= LARGE.nbytes)
    with data.open("r+b") as file:
        file.truncate(LARGE.nbytes - 4)

    with pytest.raises(DataLossError, match="leaf 'w'"):
        array.read(((0, 512), (0, 512)), into).result()


def test_a_damaged_index_of_a_shard_is_damage(tmp_path: Path) -> None:
    kvstore = stored(tmp_path, sharded((512, 512), (512, 512)), LARGE).kvstore
    (data,) = (p for p in tmp_path.rglob("*") if p.stat().st_size >= LARGE.nbytes)
    flipped = bytearray(data.read_bytes())
    flipped[-1] ^= 1
    data.write_bytes(flipped)

    array = opened_array(tmp_path, "zarr3", kvstore)
    with pytest.raises(DataLossError, match="leaf 'w'"):
        array.read(((0, 512), (0, 512)), np.empty_like(LARGE)).result()


def test_a_database_of_very_many_keys_is_left_to_tensorstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = stored(tmp_path, zarr2(CHUNK), ARRAY, in_ocdbt=True)
    monkeypatch.setattr(ocdbt_places, "MAX_KEYS", 3)
    assert not chunks.read(((0, 4), (0, 5)), np.empty((4, 5), np.float32))
