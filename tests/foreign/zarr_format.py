"""A format of another project: zarr arrays that TensorStore writes and reads."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from storesvc.format.checksums import digest
from storesvc.format.grids import Region
from storesvc.format.trees import Leaf, Tree
from storesvc_client._foreign.foreign_step import ForeignArray, ForeignStep, Reading
from storesvc_client.errors import DataLossError, NotFoundError
from storesvc_proto.v1 import tree_pb2 as pb


class ZarrArray(ForeignArray):
    """Elements of a zarr array; counts the bytes that are read."""

    def __init__(self, key: str, array: Any) -> None:
        self._key = key
        self._array = array
        self.read_count = 0

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        self.read_count += 1
        part = self._array[tuple(slice(*bounds) for bounds in region)]
        # TensorStore writes into aligned memory only
        target = into if into.flags.aligned else np.empty(into.shape, into.dtype)
        future = ts.array(target, copy=False).write(part)
        return _Read(self._key, future, target, into)


class _Read:
    def __init__(
        self, key: str, future: Any, target: NDArray[Any], into: NDArray[Any]
    ) -> None:
        self._key = key
        self._future = future
        self._target = target
        self._into = into

    def result(self, timeout: float | None = None) -> None:
        try:
            self._future.result(timeout)
        except TimeoutError:
            raise
        except Exception as e:
            raise DataLossError(f"leaf {self._key!r}: {e}") from e
        if self._target is not self._into:
            self._into[...] = self._target

    def cancel(self) -> None:
        self._future.cancel()


class ZarrRoot:
    """Steps below a directory: ``STEP/KEY`` is an array, ``STEP/tree.json`` lists them;
    implements ``ForeignRoot``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = f"zarr://{path}"
        self.arrays: list[ZarrArray] = []
        """Arrays of the steps that were opened."""

    def write(
        self,
        step: int,
        arrays: Mapping[str, NDArray[Any]],
        *,
        chunks: Mapping[str, Sequence[int]] | None = None,
        metrics: Mapping[str, float] | None = None,
        compressor: Any = None,
    ) -> None:
        """Writes a step."""
        folder = self._path / str(step)
        for key, array in arrays.items():
            shape = (chunks or {}).get(key, [max(1, n) for n in array.shape])
            ts.open(
                {
                    "driver": "zarr",
                    "kvstore": {"driver": "file", "path": f"{folder / key}/"},
                    "metadata": {"chunks": [*shape], "compressor": compressor},
                },
                create=True,
                dtype=array.dtype,
                shape=array.shape,
            ).result().write(array).result()
        (folder / "tree.json").write_text(
            json.dumps({"keys": sorted(arrays), "metrics": dict(metrics or {})})
        )

    def steps(self) -> Sequence[int]:
        return sorted(int(file.parent.name) for file in self._path.glob("*/tree.json"))

    def open(self, step: int) -> ForeignStep:
        folder = self._path / str(step)
        if not (folder / "tree.json").exists():
            raise NotFoundError(f"{self.url} has no finished step {step}")
        description = json.loads((folder / "tree.json").read_text())
        arrays = [
            ZarrArray(
                key,
                ts.open(
                    {
                        "driver": "zarr",
                        "kvstore": {"driver": "file", "path": f"{folder / key}/"},
                    }
                ).result(),
            )
            for key in description["keys"]
        ]
        self.arrays += arrays
        leaves = tuple(map(_leaf, description["keys"], arrays))
        described = (folder / "tree.json").read_bytes() + b"".join(
            (folder / key / ".zarray").read_bytes() for key in description["keys"]
        )
        return ForeignStep(
            step=step,
            url=f"{self.url}/{step}",
            format="zarr",
            tree=Tree(leaves),
            arrays=arrays,
            create_time=datetime(2026, 1, 2, 3, tzinfo=UTC),
            metrics=description["metrics"],
            labels={"custom": "kept"},
            digest=digest(described).hex(),
        )


def _leaf(key: str, array: ZarrArray) -> Leaf:
    found = array._array
    return Leaf(
        key=key,
        path_kinds="k" * (key.count("/") + 1),
        kind=pb.LEAF_KIND_ARRAY,
        dtype=found.dtype.name,
        shape=tuple(found.shape),
        chunk_shape=tuple(max(1, n) for n in found.chunk_layout.read_chunk.shape or ()),
    )


def sample_arrays(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Returns arrays of several shapes, of a few kB."""
    draw = np.random.default_rng(seed)
    return {
        "odd": draw.normal(size=3).astype(np.float16),  # what follows is not aligned
        "params/dense/bias": draw.normal(size=7).astype(np.float32),
        "params/dense/kernel": draw.normal(size=(33, 17)).astype(np.float32),
        "params/empty": np.empty((0, 3), np.int32),
        "step": np.array(seed, np.int64),
    }
