"""Writes a checkpoint as a step that Orbax opens, below a root of several steps.

``ROOT/STEP/ITEM/`` holds the tree: an OCDBT database of zarr3 arrays with checksums,
which Orbax verifies, and the documents that describe it. JSON items and texts become
JSON items of Orbax; metrics its item "metrics".

The step appears as a whole. On a disk it is written as a directory that Orbax ignores,
and renamed. In a bucket ``commit_success.txt`` comes last, without which Orbax ignores
a step. A retry removes what an unfinished export has left; a ``ClaimedStep`` keeps two
exports from completing one step.

A stored chunk is a chunk of Zarr with its CRC-32C, which Orbax verifies when it reads.
So the data files are taken as they are, with a small index, unless leaves are left out
or cast: by hard links on the disk of the target, or by copies within a bucket, which
copies them itself. No byte of an array then passes through this process, and an object
is complete when it appears. Where that cannot be, chunks are read, verified, and
written to new files in the same form.

Source of the format: orbax-checkpoint 0.12, ``_src/metadata/tree.py``, ``sharding.py``,
``array_metadata.py`` and ``step_metadata_serialization.py``. An array is named by the
texts of its path, joined by "."; that is not injective, so two leaves of one name are
rejected. Indices of lists are sequence keys, everything else is a dict key: Orbax
returns integer keys of dicts as texts, and tuples as lists, unless a target is given.
"""

import errno
import json
import logging
import math
import os
import re
import struct
import time
from base64 import urlsafe_b64encode
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from storesvc.format.checksums import crc32c
from storesvc.format.chunks import ChunkLocations
from storesvc.format.dtypes import (
    CHECKSUM_BYTES,
    DTYPES,
    NEWER,
    chunk_key,
    zarr_data_type,
)
from storesvc.format.grids import Grid, whole
from storesvc.format.keys import parse_item_key, split_key
from storesvc.format.layout import ROOT
from storesvc.format.ocdbt import ZarrArray, view_arrays
from storesvc.format.trees import Leaf, SavedSharding
from storesvc.storage import rooted_files
from storesvc.storage.rooted_files import sync_directory
from storesvc_client._export.elements import (
    ExportCall,
    Piece,
    Source,
    Written,
    cast_array,
    raw_bytes,
    read_in_order,
    read_pieces,
)
from storesvc_client._export.safetensors import exported_dtype
from storesvc_client._export.target import (
    MARK,
    ClaimedStep,
    LocalTarget,
    NewFile,
    NewFolder,
    OpenTarget,
    RefusedCopyError,
    RemoteTarget,
    lock,
    make_directory,
    translate_os_errors,
)
from storesvc_client._items.values import Container, decode_value
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.models import Checkpoint
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    PreconditionError,
    StoreError,
)
from storesvc_proto.v1 import tree_pb2 as pb

TREE_ITEMS: Final = {"v0": "default", "v1": "state"}
"""Default name of the item that holds the tree, by layout."""

TREE_HANDLERS: Final = {
    "v0": (
        "orbax.checkpoint._src.handlers.standard_checkpoint_handler."
        "StandardCheckpointHandler"
    ),
    "v1": (
        "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"
    ),
}
JSON_HANDLERS: Final = {
    "v0": (
        "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
    ),
    "v1": "orbax.checkpoint.experimental.v1._src.handlers.json_handler.JsonHandler",
}

_VALUE_TYPES: Final = {
    pb.LEAF_KIND_ARRAY: "jax.Array",
    pb.LEAF_KIND_PRNG_KEY: "jax.Array",
    pb.LEAF_KIND_HOST_ARRAY: "np.ndarray",
    pb.LEAF_KIND_HOST_SCALAR: "np.ndarray",
    pb.LEAF_KIND_PYTHON_SCALAR: "scalar",
    pb.LEAF_KIND_TEXT: "string",
}

_WIDE: Final = frozenset({"int64", "uint64", "float64", "complex128"})
"""dtypes that jax narrows unless ``jax_enable_x64`` is set."""

_EMPTY: Final = {"none": "None", "{}": "Dict", "[]": "List", "()": "Tuple"}
"""Type of each container that no leaf shows."""

_SEQUENCE, _DICT = 1, 2
"""Types of keys."""

_SEQUENCE_KINDS: Final = "if"
"""Path kinds whose parents are lists or tuples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxLeaf:
    """A leaf of the checkpoint."""

    row: int
    stored: Leaf
    keys: tuple[str, ...]
    value_type: str
    dtype: str

    @property
    def name(self) -> str:
        """Name of the array that holds its elements."""
        return ".".join(self.keys)


def plan_leaves(source: Source, *, cast: str | None) -> list[OrbaxLeaf]:
    """Returns the selected leaves as Orbax names them, in the order of their keys."""
    source.check_rejected(
        [(row, text) for row in source.rows if (text := _fault(source, row, cast))]
    )
    leaves = [_describe_leaf(row, source.leaf(row), cast) for row in source.rows]
    source.check_names(
        ((leaf.row, leaf.name) for leaf in leaves),
        " in Orbax, which joins the parts of a path by '.'",
    )
    return leaves


def _fault(source: Source, row: int, cast: str | None) -> str | None:
    """Returns why Orbax cannot hold a leaf; None if it can."""
    leaf = source.leaf(row)
    value_type = _VALUE_TYPES.get(leaf.kind)
    remedy = "leave it out with select= (--select)"
    if value_type is None:
        return (
            "expected an array, a number, a PRNG key or a text, got the kind "
            f"{source.kind(row)}, which Orbax cannot hold; {remedy}"
        )
    if value_type == "scalar" and leaf.dtype == "complex128":
        return (
            "expected a bool, int or float, got a complex number of Python, which "
            f"Orbax does not restore; {remedy}"
        )
    dtype = exported_dtype(leaf, cast)
    if zarr_data_type(dtype) != dtype and dtype not in NEWER:
        return f"expected a dtype that Orbax restores, got {dtype}; {remedy}"
    keys = split_key(leaf.key)
    name = ".".join(keys)
    if not keys or (value_type == "string" and not {"/", "~"}.isdisjoint(name)):
        return f"expected a path that Orbax can name, got {keys}; {remedy}"
    return None


def _describe_leaf(row: int, leaf: Leaf, cast: str | None) -> OrbaxLeaf:
    """Returns a leaf that Orbax can hold."""
    value_type, dtype = _VALUE_TYPES[leaf.kind], exported_dtype(leaf, cast)
    if value_type == "jax.Array" and dtype in _WIDE and leaf.sharding is None:
        # Another project wrote it, or one device held it. Orbax would restore an array
        # of jax, and jax would drop bits without a word.
        value_type = "np.ndarray"
    return OrbaxLeaf(
        row=row,
        stored=leaf,
        keys=split_key(leaf.key),
        value_type=value_type,
        dtype=dtype,
    )


def tree_metadata(
    leaves: Sequence[OrbaxLeaf], containers: Sequence[Container]
) -> dict[str, Any]:
    """Returns ``_METADATA``."""
    entries = [
        _entry(leaf.keys, leaf.stored.path_kinds, leaf.value_type, is_empty=False)
        for leaf in leaves
    ]
    entries += [
        _entry(split_key(each.key), each.path_kinds, _EMPTY[each.what], is_empty=True)
        for each in containers
        if each.what in _EMPTY
    ]
    return {
        "tree_metadata": dict(sorted(entries)),
        "use_ocdbt": True,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _entry(
    keys: tuple[str, ...], path_kinds: str, value_type: str, *, is_empty: bool
) -> tuple[str, dict[str, Any]]:
    key_metadata = [
        {"key": key, "key_type": _SEQUENCE if kind in _SEQUENCE_KINDS else _DICT}
        for key, kind in zip(keys, path_kinds, strict=True)
    ]
    return str(keys), {
        "key_metadata": key_metadata,
        "value_metadata": {"value_type": value_type, "skip_deserialize": is_empty},
    }


def shardings(leaves: Sequence[OrbaxLeaf]) -> dict[str, str]:
    """Returns ``_sharding``: the sharding of each array by its encoded name.

    A leaf that was not sharded over several devices is restored on the first device
    unless the restore has a target; a sharded one on all devices, if there are as many.
    """
    return {
        urlsafe_b64encode(leaf.name.encode()).decode(): json.dumps(
            _describe_sharding(leaf.stored.sharding)
        )
        for leaf in leaves
        if leaf.value_type == "jax.Array"
    }


def _describe_sharding(saved: SavedSharding | None) -> dict[str, Any]:
    if saved is None or math.prod(saved.axis_sizes) == 1:
        return {
            "sharding_type": "NamedSharding",
            "shape": [1],
            "axis_names": ["device"],
            "partition_spec": [],
            "device_mesh": {"mesh": [{"id": 0}]},
        }
    return {
        "sharding_type": "NamedSharding",
        "shape": list(saved.axis_sizes),
        "axis_names": list(saved.axis_names),
        "partition_spec": [
            list(axes) if len(axes) > 1 else next(iter(axes), None)
            for axes in saved.spec
        ],
    }


def array_metadatas(leaves: Sequence[OrbaxLeaf]) -> dict[str, Any]:
    """Returns ``array_metadatas/process_0``, which names typed PRNG keys."""
    found = [
        {
            "array_metadata": {
                "param_name": leaf.name,
                "write_shape": list(leaf.stored.chunk_shape),
                "chunk_shape": list(leaf.stored.chunk_shape),
                "ext_metadata": (
                    {"random_key_impl": leaf.stored.prng_impl}
                    if leaf.stored.prng_impl
                    else None
                ),
            }
        }
        for leaf in leaves
        if leaf.value_type == "jax.Array"
    ]
    return {"array_metadatas": found}


def step_metadata(
    info: Checkpoint, item_handlers: Mapping[str, str], *, commit_time_ns: int
) -> dict[str, Any]:
    """Returns ``_CHECKPOINT_METADATA``."""
    created = int(info.create_time.timestamp() * 1e9)
    return {
        "item_handlers": dict(item_handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": created,
        "commit_timestamp_nsecs": commit_time_ns,
        "custom_metadata": dict(info.labels),
    }


DATA: Final = "d/"
"""Folder of the data files in an item, as TensorStore names it."""

DATA_FILE_BYTES: Final = 1 << 30
"""Size from which the next chunk begins a new data file."""

_NOT_LINKABLE: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES}
)
"""Errors of a link to another disk, or on a disk without hard links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFiles:
    """The data files of an item, and the chunks in them."""

    places: ChunkLocations
    """Location of each chunk, relative to the item."""
    linked_bytes: int = 0
    """Bytes of the files that are hard links."""
    copied_bytes: int = 0
    """Bytes of the files that the bucket copied itself."""


AT_ONCE: Final = 64
"""Files that are copied at the same time; between them, the progress advances."""

_log = logging.getLogger("storesvc_client")

COMMITTED: Final = "commit_success.txt"
"""File that Orbax expects in a finished step, and in each of its items."""

_COMMITTED_TEXT: Final = b"Written by storesvc.\n"

METRICS: Final = "metrics"
"""Item of Orbax that holds the metrics of a step."""

UNFINISHED: Final = ".orbax-checkpoint-tmp-storesvc"
"""Suffix of the directory of an unfinished step; Orbax ignores such names."""

_ITEM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def write_orbax(call: ExportCall) -> Written:
    """Writes the selected leaves, the items and the metrics; the target of the call is
    the root, which may hold other steps."""
    source, meter, layout = call.source, call.meter, call.request.layout or "v0"
    leaves = plan_leaves(source, cast=call.cast)
    rows, dropped = _find_json_rows(source, drop_items=call.request.drop_items)
    item = call.request.item or TREE_ITEMS[layout]
    _check_item(source, item, rows)
    texts = {
        leaf.name: _read_value(source, leaf.row, meter)
        for leaf in leaves
        if leaf.value_type == "string"
    }
    values = {each: _read_value(source, row, meter) for each, row in rows.items()}
    with _new_step(call.open, call.where, str(source.info.step)) as target:
        step = _Step(
            source=source,
            target=target,
            meter=meter,
            layout=layout,
            item=item,
            leaves=leaves,
            texts=texts,
            json_items=values,
        )
        data = step.write()
    return Written(
        files=tuple(f"{source.info.step}/{each}" for each in (item, *rows)),
        size_bytes=sum(
            math.prod(leaf.stored.shape) * DTYPES[leaf.dtype].itemsize
            for leaf in leaves
        ),
        linked_bytes=data.linked_bytes,
        copied_bytes=data.copied_bytes,
        dropped_items=dropped,
    )


def _check_item(source: Source, name: str, others: Mapping[str, int]) -> None:
    """Rejects a name for the item of the tree that is none, or that of another item."""
    taken = {*others, *([METRICS] if source.info.metrics else [])}
    other = f", other than {', '.join(sorted(taken))}" if taken else ""
    if not _ITEM.fullmatch(name) or name in taken:
        raise InvalidRequestError(
            f"export of {source.name}: item=: expected at most 63 letters, digits, '-' "
            f"and '_', the first a letter or a digit{other}, got {name!r}"
        )


def _find_json_rows(
    source: Source, *, drop_items: bool
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Returns the rows of the items that become JSON items, and the items left out."""
    rows: dict[str, int] = {}
    others: dict[str, str] = {}
    items = range(source.tree.tree_count, len(source.tree.leaves))
    for row in items if source.is_whole else ():
        leaf, found = source.leaf(row), parse_item_key(source.leaf(row).key)
        if found.process is not None:
            others[found.item] = "a value of each process"
        elif leaf.kind not in (pb.LEAF_KIND_JSON, pb.LEAF_KIND_TEXT):
            others[found.item] = "bytes"
        elif found.item == METRICS and source.info.metrics:
            others[found.item] = "the name of the item that holds the metrics"
        else:
            rows[found.item] = row
    if others and not drop_items:
        name, what = next(iter(sorted(others.items())))
        raise PreconditionError(
            f"export of {source.name}: item {name!r}: expected JSON or a text, which "
            f"Orbax holds as a JSON item, got {what}; pass drop_items=True "
            f"(--drop-items) to leave out {', '.join(sorted(others))}"
        )
    return rows, tuple(sorted(others))


def _read_value(source: Source, row: int, meter: Meter) -> Any:
    """Returns the value of a text or of JSON."""
    leaf, data = source.leaf(row), b""
    if leaf.shape[0]:
        piece = Piece(row, whole(leaf.shape))
        data = read_pieces(source, [piece], meter)[piece].tobytes()
    return decode_value(leaf.key, leaf.kind, data)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step that is being written."""

    source: Source
    target: NewFolder
    meter: Meter
    layout: str
    item: str
    """Name of the item that holds the tree."""
    leaves: Sequence[OrbaxLeaf]
    texts: Mapping[str, str]
    """Value of each text leaf, by name."""
    json_items: Mapping[str, Any]
    """Value of each other item."""

    def write(self) -> DataFiles:
        """Writes all files of the step but the one that completes it."""
        source, leaves, now = self.source, self.leaves, time.time_ns()
        # 1. The elements, and the index of the database.
        data = self._write_arrays(now)
        # 2. The documents of the item.
        self._put(f"{self.item}/_METADATA", tree_metadata(leaves, source.containers))
        self._put(f"{self.item}/_sharding", shardings(leaves))
        self._put(f"{self.item}/array_metadatas/process_0", array_metadatas(leaves))
        if self.texts:
            self._put(f"{self.item}/_strings.json", self.texts)
        # 3. The other items.
        handlers = {self.item: TREE_HANDLERS[self.layout]}
        file = "metadata" if self.layout == "v0" else "data.json"
        for name, value in self.json_items.items():
            self._put(f"{name}/{file}", value)
            handlers[name] = JSON_HANDLERS[self.layout]
        if source.info.metrics:
            self._put(f"{METRICS}/{METRICS}", dict(source.info.metrics))
            handlers[METRICS] = JSON_HANDLERS[self.layout]
        # 4. What makes a step of it.
        for name in handlers:
            _put(self.target, f"{name}/{COMMITTED}", _COMMITTED_TEXT)
        if self.layout == "v1":
            _put(self.target, "orbax.checkpoint", b"")
        about = step_metadata(source.info, handlers, commit_time_ns=now)
        self._put("_CHECKPOINT_METADATA", about)
        return data

    def _put(self, path: str, value: Any) -> None:
        _put(self.target, path, json.dumps(value).encode())

    @cached_property
    def _arrays(self) -> list[tuple[OrbaxLeaf, Grid]]:
        """The leaves that are arrays, with their chunks."""
        return [
            (leaf, leaf.stored.grid)
            for leaf in self.leaves
            if leaf.value_type != "string"
        ]

    def _write_arrays(self, now: int) -> DataFiles:
        arrays, data = self._arrays, None
        self.meter.total_bytes = sum(
            grid.count * grid.chunk_bytes for _, grid in arrays
        )
        # A stored file has all leaves, as they were saved.
        is_cast = any(leaf.dtype != leaf.stored.dtype for leaf, _ in arrays)
        if self.source.is_whole and not is_cast:
            data = self._link_files() or self._copy_within_bucket()
        data = data or self._write_chunks()
        uuid = uuid4()
        view = view_arrays(
            [
                ZarrArray(
                    name=leaf.name,
                    shape=leaf.stored.shape,
                    chunk_shape=leaf.stored.chunk_shape,
                    dtype=leaf.dtype,
                    data_type=leaf.dtype,
                )
                for leaf, _ in arrays
            ],
            [
                chunk_key(leaf.name, grid.index(at))
                for leaf, grid in arrays
                for at in range(grid.count)
            ],
            data.places,
            node_file=f"{DATA}{uuid.hex}",
            uuid=uuid.bytes,
            commit_time_ns=now,
        )
        if view.nodes:
            _put(self.target, f"{self.item}/{DATA}{uuid.hex}", b"".join(view.nodes))
        _put(self.target, f"{self.item}/{ROOT}", view.root)
        return data

    @cached_property
    def _stored(self) -> ChunkLocations:
        """Location of each chunk in the data files of the store."""
        rows = [leaf.row for leaf, _ in self._arrays]
        return self.source.places.take(self.source.ordinals(rows))

    @cached_property
    def _renamed(self) -> ChunkLocations:
        """Location of each chunk in these files as the item names them."""
        names = (DATA + name.replace("/", "-") for name in self._stored.files)
        return replace(self._stored, files=tuple(names))

    def _remove_data(self) -> None:
        self.target.remove(f"{self.item}/{DATA.rstrip('/')}")

    def _link_files(self) -> DataFiles | None:
        """Links the data files that hold the leaves; returns None, without a link left,
        if the files cannot be linked."""
        root, pool = self.target.local, self.source.pool
        if root is None or pool is None:
            return None
        folder, places, size = root / self.item, self._stored, 0
        with translate_os_errors(str(folder)):
            make_directory(folder / DATA)
            for file in np.unique(places.file).tolist():
                name = places.files[file]
                size += self._check_size(pool, name, int(places.ends[file]))
                link = folder / self._renamed.files[file]
                try:
                    os.link(pool / name, link, follow_symlinks=False)
                except OSError as e:
                    if e.errno not in _NOT_LINKABLE:
                        raise
                    self._remove_data()
                    return None
            sync_directory(folder / DATA)
        return DataFiles(places=self._renamed, linked_bytes=size)

    def _check_size(self, pool: Path, name: str, end: int) -> int:
        """Returns the size of a data file; rejects one that is missing or shorter than
        `end`."""
        try:
            descriptor = rooted_files.open_file(pool, name)
        except FileNotFoundError:
            size = -1
        else:
            size = os.fstat(descriptor).st_size
            os.close(descriptor)
        if size < end:
            got = "no file" if size < 0 else f"{size} bytes"
            raise DataLossError(
                f"export of {self.source.name}: data file {pool / name}: expected at "
                f"least {end} bytes, got {got}; export another checkpoint",
                reason="CORRUPT_DATA",
            )
        return size

    def _copy_within_bucket(self) -> DataFiles | None:
        """Copies the data files that hold the leaves; returns None, without a copy
        left, if the bucket does not copy them. Then their chunks are read, which also
        finds out what is damaged."""
        pool, target = self.source.bucket_pool, self.target
        if isinstance(target, ClaimedStep):
            target = target.find_bucket_target()
        if (
            pool is None
            or not isinstance(target, RemoteTarget)
            or not target.place.shares_bucket(pool.storage)
        ):
            return None
        places, names = self._stored, self._renamed.files
        lengths = np.bincount(places.file, places.length, len(places.files))
        used = np.unique(places.file).tolist()
        try:
            for start in range(0, len(used), AT_ONCE):
                batch = used[start : start + AT_ONCE]
                with self.meter.phase("write"):
                    target.copy_objects(
                        pool.storage,
                        [f"{pool.path}{places.files[file]}" for file in batch],
                        [f"{self.item}/{names[file]}" for file in batch],
                    )
                self.meter.add(int(lengths[batch].sum()))
        except RefusedCopyError as e:
            self._undo_copies(str(e))
            return None
        sizes = target.sizes(f"{self.item}/{DATA.rstrip('/')}") if used else {}
        found = {file: sizes.get(names[file].removeprefix(DATA), 0) for file in used}
        if any(found[file] < places.ends[file] for file in used):
            self._undo_copies("a data file is too short")
            return None
        return DataFiles(places=self._renamed, copied_bytes=sum(found.values()))

    def _undo_copies(self, reason: str) -> None:
        _log.warning(
            "export of %s: its data files are read and written, because the bucket did "
            "not copy them: %s",
            *(self.source.name, reason),
        )
        self._remove_data()

    def _write_chunks(self) -> DataFiles:
        """Writes the chunks of the leaves to new data files."""
        rows: list[tuple[str, int, int]] = []
        with ExitStack() as stack:
            file: NewFile | None = None
            name, at = "", 0
            for data in self._read_chunks():
                if file is None or at >= DATA_FILE_BYTES:
                    stack.close()  # completes the previous file
                    name, at = f"{DATA}{uuid4().hex}", 0
                    file = stack.enter_context(
                        self.target.create(f"{self.item}/{name}")
                    )
                tail = struct.pack("<I", crc32c(data))
                with self.meter.phase("write"):
                    file.write(data)
                    file.write(tail)
                size = len(data) + CHECKSUM_BYTES
                rows.append((name, at, size))
                at += size
                self.meter.add(size)
        return DataFiles(places=ChunkLocations.of_rows(rows))

    def _read_chunks(self) -> Iterator[memoryview]:
        """Yields the elements of each chunk, as Zarr stores them: those at the far
        edges are padded with zeros."""
        pieces = (
            Piece(leaf.row, grid.region(at))
            for leaf, grid in self._arrays
            for at in range(grid.count)
        )
        arrays = read_in_order(self.source, pieces, self.meter)
        for leaf, grid in self._arrays:
            place = self.source.describe(leaf.row)
            for _ in range(grid.count):
                array = cast_array(next(arrays), leaf.dtype, place)
                yield raw_bytes(_pad_array(array, leaf.stored.chunk_shape))


def _pad_array(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if array.shape == shape:
        return array
    padded = np.zeros(shape, array.dtype)
    padded[tuple(map(slice, array.shape))] = array
    return padded


def _put(target: NewFolder, path: str, data: bytes) -> None:
    with target.create(path) as file:
        file.write(data)


@contextmanager
def _new_step(opened: OpenTarget, url: str, step: str) -> Generator[NewFolder]:
    """Yields the folder of a step, which is complete if the block succeeds."""
    root = opened(url)
    if root.local is not None:
        with _new_directory(root.local / step) as directory:
            yield LocalTarget(directory)
            _put(LocalTarget(directory), COMMITTED, _COMMITTED_TEXT)
        return
    target = root.below(step)
    names = target.names()
    if names and (COMMITTED in names or MARK not in names):
        raise _exists(target.url)
    claimed = ClaimedStep(target)
    for name in names:  # of an export that has failed
        if name != MARK:
            target.remove(name)
    yield claimed
    claimed.complete(COMMITTED, _COMMITTED_TEXT)


@contextmanager
def _new_directory(place: Path) -> Generator[Path]:
    """Yields a directory that is renamed to `place` if the block succeeds."""
    part = place.with_name(place.name + UNFINISHED)
    with translate_os_errors(str(place)):
        if place.exists():
            raise _exists(str(place))
        make_directory(part)
        descriptor = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            lock(descriptor, part, place)
            remains = LocalTarget(part)
            for name in remains.names():  # of an export that was killed
                remains.remove(name)
            try:
                yield part
                part.rename(place)
            except BaseException:
                # Its links would keep data files that the store has deleted.
                with suppress(StoreError):
                    remains.remove("")
                raise
            sync_directory(place.parent)
        finally:
            os.close(descriptor)


def _exists(place: str) -> PreconditionError:
    return PreconditionError(
        f"{place} exists; remove it, or choose another target: a step is never replaced"
    )
