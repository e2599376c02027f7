"""A chunk that several regions of a restore need is read once, whatever they are."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from numpy.typing import NDArray

from storesvc.format.grids import Region, part, whole
from storesvc.format.trees import Leaf, Tree
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._foreign import zarr_arrays
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.locations import LocalLocation
from storesvc_client._foreign.mount import ForeignReader
from storesvc_client._foreign.source import StepSource
from storesvc_client._foreign.zarr_arrays import (
    ArrayPlace,
    TensorStoreArray,
    ocdbt,
    open_arrays,
)
from storesvc_client._restore.assembly import Assembly
from storesvc_client.errors import DataLossError
from storesvc_proto.v1 import tree_pb2 as pb
from tests.support.examples import sampled

SHAPE = (100, 90)
CHUNK = (40, 60)
ARRAY = np.random.default_rng(0).integers(0, 2**31, SHAPE, np.int32)

LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD: dict[str, Any] = {"name": "zstd", "configuration": {"level": 1}}


def zarr3(codecs: Sequence[Any]) -> dict[str, Any]:
    grid = {"name": "regular", "configuration": {"chunk_shape": CHUNK}}
    return {"driver": "zarr3", "metadata": {"chunk_grid": grid, "codecs": [*codecs]}}


def sharded(inner: tuple[int, ...], codecs: Sequence[Any]) -> dict[str, Any]:
    shard = {"chunk_shape": inner, "codecs": [*codecs]}
    return zarr3([{"name": "sharding_indexed", "configuration": shard}])


FORMS: dict[str, dict[str, Any]] = {
    "zarr2": {
        "driver": "zarr",
        "metadata": {"chunks": CHUNK, "compressor": {"id": "zstd", "level": 1}},
    },
    "zarr3": zarr3([LITTLE, ZSTD]),
    "shards": sharded((20, 20), [LITTLE, ZSTD]),
    "blosc": {
        "driver": "zarr",
        "metadata": {"chunks": CHUNK, "compressor": {"id": "blosc"}},
    },
    "raw": {"driver": "zarr", "metadata": {"chunks": CHUNK, "compressor": None}},
}

REGIONS: dict[str, list[Region]] = {
    "whole": [whole(SHAPE)],
    "columns": [((0, 100), (at, at + 15)) for at in range(0, 90, 15)],
    "rows": [((at, at + 25), (0, 90)) for at in range(0, 100, 25)],
    "tiles": [
        ((y, y + 50), (x, x + 30)) for y in range(0, 100, 50) for x in range(0, 90, 30)
    ],
    "with gaps": [((0, 100), (0, 10)), ((0, 100), (20, 30))],
    "overlapping": [((0, 70), (0, 90)), ((30, 100), (0, 90))],
    "very many": [((0, 100), (at, at + 1)) for at in range(90)],
}


def stored(folder: Path, form: str, *, in_ocdbt: bool) -> TensorStoreArray:
    """Writes the array; returns it as a reader of a format does."""
    files = {"driver": "file", "path": f"{folder}/"}
    kvstore = ocdbt(files, "w/") if in_ocdbt else files
    written = {"driver": "ocdbt", "base": files, "path": "w/"} if in_ocdbt else files
    ts.open(
        {**FORMS[form], "kvstore": written}, create=True, dtype=ts.int32, shape=SHAPE
    ).result().write(ARRAY).result()
    place = ArrayPlace(
        name="leaf 'w'", driver=FORMS[form]["driver"], kvstore=kvstore, is_whole=True
    )
    (found,) = open_arrays(LocalLocation(folder), [place])
    return found


def restored(
    array: TensorStoreArray, folder: Path, regions: Sequence[Region]
) -> dict[Region, NDArray[Any]]:
    """Reads regions as a restore does; returns the elements of each."""
    leaf = Leaf(
        key="w",
        path_kinds="k",
        kind=pb.LEAF_KIND_ARRAY,
        dtype="int32",
        shape=SHAPE,
        chunk_shape=array.chunk_shape,
    )
    step = ForeignStep(
        step=0,
        url=f"orbax:{folder.as_uri()}",
        format="orbax",
        tree=Tree((leaf,)),
        arrays=[array],
    )
    assert step.is_local
    found: dict[Region, NDArray[Any]] = {}

    def keep(buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            found.update(zip(buffer.regions, buffer.arrays, strict=True))

    manifest = ForeignReader("run", step).manifest
    assembly = Assembly(manifest, [(0, regions)], name="run@0", place=keep)
    StepSource(step, name="run@0").read(assembly.missing, assembly)
    assembly.check_complete()
    return found


def file_reads() -> int:
    """Returns how many reads of files TensorStore has made; one looks at the size of a
    chunk."""
    name = "/tensorstore/kvstore/file/read"
    found = ts.experimental_collect_matching_metrics(name)
    values = [each["values"] for each in found if each["name"] == name]
    return sum(int(value["value"]) for each in values for value in each)


@pytest.mark.parametrize("in_ocdbt", [False, True])
@pytest.mark.parametrize("form", sampled(FORMS, every=2))
@pytest.mark.parametrize("kind", REGIONS)
def test_each_region_has_its_elements(
    kind: str, form: str, tmp_path: Path, *, in_ocdbt: bool
) -> None:
    found = restored(stored(tmp_path, form, in_ocdbt=in_ocdbt), tmp_path, REGIONS[kind])
    assert sorted(REGIONS[kind]) == sorted(found)
    for region, elements in found.items():
        np.testing.assert_array_equal(part(ARRAY, whole(SHAPE), region), elements)


@pytest.mark.parametrize("kind", REGIONS)
def test_each_region_of_plain_elements_has_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_arrays, "MIN_CHUNK_BYTES", 0)  # read from files
    found = restored(stored(tmp_path, "raw", in_ocdbt=False), tmp_path, REGIONS[kind])
    for region, elements in found.items():
        np.testing.assert_array_equal(part(ARRAY, whole(SHAPE), region), elements)


@pytest.mark.parametrize("kind", REGIONS)
def test_each_chunk_is_read_from_its_file_once(kind: str, tmp_path: Path) -> None:
    array = stored(tmp_path, "zarr2", in_ocdbt=False)
    before = file_reads()
    restored(array, tmp_path, REGIONS[kind])
    assert (3 if kind == "with gaps" else 6) * 2 == file_reads() - before


def test_a_damaged_chunk_of_several_regions_fails_the_restore(tmp_path: Path) -> None:
    array = stored(tmp_path, "zarr2", in_ocdbt=False)
    damaged = tmp_path / "1.0"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with pytest.raises(DataLossError, match=r"leaf 'w'.*damaged"):
        restored(array, tmp_path, REGIONS["columns"])
