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
from storesvc.format.grids import whole
from storesvc.format.keys import parse_item_key, split_key
from storesvc.format.layout import ROOT
from storesvc.format.ocdbt import ZarrArray, view_arrays
from storesvc.format.trees import SavedSharding
from storesvc.storage import rooted_files
from storesvc.storage.rooted_files import sync_directory
from storesvc_client._chunks.buffers import Buffer
from storesvc_client._export.elements import (
    ExportCall,
    Piece,
    Source,
    Written,
    cast_array,
    raw_bytes,
    read_in_order,
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
    name: str
    keys: tuple[str, ...]
    path_kinds: str
    value_type: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    sharding: SavedSharding | None
    prng_impl: str | None

    @property
    def array(self) -> ZarrArray:
        """The array that holds its elements."""
        return ZarrArray(
            name=self.name,
            shape=self.shape,
            chunk_shape=self.chunk_shape,
            dtype=self.dtype,
            data_type=self.dtype,
        )


def plan_leaves(source: Source, *, cast: str | None) -> list[OrbaxLeaf]:
    """Returns the selected leaves as Orbax names them, in the order of their keys."""
    source.check_rejected(
        [(row, text) for row in source.rows if (text := _fault(source, row, cast))]
    )
    by_name: dict[str, OrbaxLeaf] = {}
    for row in source.rows:
        found = _leaf(source, row, cast)
        other = by_name.setdefault(found.name, found)
        if other is not found:
            raise PreconditionError(
                f"{source.describe(row)}: expected a name of its own in Orbax, which "
                f"joins the parts of a path by '.', got {found.name!r}, which leaf "
                f"{source.leaf(other.row).key!r} has; leave one out with "
                "select= (--select)"
            )
    return list(by_name.values())


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


def _leaf(source: Source, row: int, cast: str | None) -> OrbaxLeaf:
    """Returns a leaf that Orbax can hold."""
    leaf = source.leaf(row)
    value_type = _VALUE_TYPES[leaf.kind]
    dtype = exported_dtype(leaf, cast)
    keys = split_key(leaf.key)
    if value_type == "jax.Array" and dtype in _WIDE and leaf.sharding is None:
        # Another project wrote it, or one device held it. Orbax would restore an array
        # of jax, and jax would drop bits without a word.
        value_type = "np.ndarray"
    return OrbaxLeaf(
        row=row,
        name=".".join(keys),
        keys=keys,
        path_kinds=leaf.path_kinds,
        value_type=value_type,
        dtype=dtype,
        shape=leaf.shape,
        chunk_shape=leaf.chunk_shape,
        sharding=leaf.sharding,
        prng_impl=leaf.prng_impl,
    )


def tree_metadata(
    leaves: Sequence[OrbaxLeaf], containers: Sequence[Container]
) -> dict[str, Any]:
    """Returns ``_METADATA``."""
    entries = [
        _entry(leaf.keys, leaf.path_kinds, leaf.value_type, is_empty=False)
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
        urlsafe_b64encode(leaf.name.encode()).decode(): json.dumps(_sharding(leaf))
        for leaf in leaves
        if leaf.value_type == "jax.Array"
    }


def _sharding(leaf: OrbaxLeaf) -> dict[str, Any]:
    saved = leaf.sharding
    if saved is None or math.prod(saved.axis_sizes) == 1:
        return {
            "sharding_type": "NamedSharding",
            "shape": [1],
            "axis_names": ["device"],
            "partition_spec": [],
            "device_mesh": {"mesh": [{"id": 0}]},
        }
    spec: list[Any] = []
    for axes in saved.spec:
        match axes:
            case ():
                spec.append(None)
            case (axis,):
                spec.append(axis)
            case _:
                spec.append(list(axes))
    return {
        "sharding_type": "NamedSharding",
        "shape": list(saved.axis_sizes),
        "axis_names": list(saved.axis_names),
        "partition_spec": spec,
    }


def array_metadatas(leaves: Sequence[OrbaxLeaf]) -> dict[str, Any]:
    """Returns ``array_metadatas/process_0``, which names typed PRNG keys."""
    found = [
        {
            "array_metadata": {
                "param_name": leaf.name,
                "write_shape": list(leaf.chunk_shape),
                "chunk_shape": list(leaf.chunk_shape),
                "ext_metadata": (
                    {"random_key_impl": leaf.prng_impl} if leaf.prng_impl else None
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


def chunk_keys(source: Source, leaves: Sequence[OrbaxLeaf]) -> list[str]:
    """Returns the key of each chunk of the leaves."""
    return [
        chunk_key(leaf.name, grid.index(at))
        for leaf, grid in ((leaf, source.tree.grids[leaf.row]) for leaf in leaves)
        for at in range(grid.count)
    ]


def with_names(places: ChunkLocations) -> ChunkLocations:
    """Returns the locations of chunks in data files that are taken as they are, with
    the names of the files in an item."""
    names = tuple(DATA + name.replace("/", "-") for name in places.files)
    return replace(places, files=names)


def link_data(
    source: Source, leaves: Sequence[OrbaxLeaf], target: NewFolder, item: str
) -> DataFiles | None:
    """Links the data files that hold the leaves; returns None, without a link left, if
    the files cannot be linked."""
    folder = target.local
    if folder is None or source.pool is None:
        return None
    places = source.places.take(source.ordinals([leaf.row for leaf in leaves]))
    links = with_names(places)
    used, ends = np.unique(places.file), places.ends
    size = 0
    with translate_os_errors(f"{folder / item}"):
        make_directory(folder / item / DATA)
        for file in used.tolist():
            source_path = source.pool / places.files[file]
            link = folder / item / links.files[file]
            size += _checked_size(source, places.files[file], int(ends[file]))
            try:
                os.link(source_path, link, follow_symlinks=False)
            except OSError as e:
                if e.errno not in _NOT_LINKABLE:
                    raise
                target.remove(f"{item}/{DATA.rstrip('/')}")
                return None
        sync_directory(folder / item / DATA)
    return DataFiles(places=links, linked_bytes=size)


def _checked_size(source: Source, name: str, end: int) -> int:
    """Returns the size of a data file; rejects one that is missing or shorter than
    `end`."""
    assert source.pool is not None
    try:
        descriptor = rooted_files.open_file(source.pool, name)
    except FileNotFoundError:
        size = -1
    else:
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
    if size < end:
        got = "no file" if size < 0 else f"{size} bytes"
        raise DataLossError(
            f"export of {source.name}: data file {source.pool / name}: expected at "
            f"least {end} bytes, got {got}; export another checkpoint",
            reason="CORRUPT_DATA",
        )
    return size


def copy_data(
    source: Source,
    leaves: Sequence[OrbaxLeaf],
    target: NewFolder,
    item: str,
    meter: Meter,
) -> DataFiles:
    """Writes the chunks of the leaves to new data files."""
    rows: list[tuple[str, int, int]] = []
    with ExitStack() as stack:
        file: NewFile | None = None
        name, at = "", 0
        for data in _chunks(source, leaves, meter):
            if file is None or at >= DATA_FILE_BYTES:
                stack.close()  # completes the previous file
                name, at = f"{DATA}{uuid4().hex}", 0
                file = stack.enter_context(target.create(f"{item}/{name}"))
            tail = struct.pack("<I", crc32c(data))
            with meter.phase("write"):
                file.write(data)
                file.write(tail)
            rows.append((name, at, len(data) + CHECKSUM_BYTES))
            at += len(data) + CHECKSUM_BYTES
            meter.add(len(data) + CHECKSUM_BYTES)
    return DataFiles(places=ChunkLocations.of_rows(rows))


def _chunks(
    source: Source, leaves: Sequence[OrbaxLeaf], meter: Meter
) -> Iterator[memoryview]:
    """Yields the elements of each chunk, as Zarr stores them: those at the far edges
    are padded with zeros."""
    grids = [source.tree.grids[leaf.row] for leaf in leaves]
    pieces = (
        Piece(leaf.row, grid.region(at))
        for leaf, grid in zip(leaves, grids, strict=True)
        for at in range(grid.count)
    )
    arrays = read_in_order(source, pieces, meter)
    for leaf, grid in zip(leaves, grids, strict=True):
        for _ in range(grid.count):
            array = cast_array(next(arrays), leaf.dtype, source.describe(leaf.row))
            yield raw_bytes(_pad_array(array, leaf.chunk_shape, leaf.dtype))


def _pad_array(array: NDArray[Any], shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    if array.shape == shape:
        return array
    padded = np.zeros(shape, DTYPES[dtype])
    padded[tuple(map(slice, array.shape))] = array
    return padded


AT_ONCE: Final = 64
"""Files that are copied at the same time; between them, the progress advances."""

_log = logging.getLogger("storesvc_client")


def copy_within_bucket(
    source: Source,
    leaves: Sequence[OrbaxLeaf],
    target: NewFolder,
    item: str,
    meter: Meter,
) -> DataFiles | None:
    """Copies the data files that hold the leaves; returns None, without a copy left, if
    the bucket does not copy them. Then the caller reads them, which also finds out what
    is damaged."""
    pool = source.bucket_pool
    if isinstance(target, ClaimedStep):
        target = target.find_bucket_target()
    if (
        pool is None
        or not isinstance(target, RemoteTarget)
        or not target.place.shares_bucket(pool.storage)
    ):
        return None
    places = source.places.take(source.ordinals([leaf.row for leaf in leaves]))
    copies = with_names(places)
    lengths = np.bincount(places.file, places.length, len(places.files))
    used = np.unique(places.file).tolist()
    try:
        for start in range(0, len(used), AT_ONCE):
            batch = used[start : start + AT_ONCE]
            with meter.phase("write"):
                target.copy_objects(
                    pool.storage,
                    [f"{pool.path}{places.files[file]}" for file in batch],
                    [f"{item}/{copies.files[file]}" for file in batch],
                )
            meter.add(int(lengths[batch].sum()))
    except RefusedCopyError as e:
        _undo(source, target, item, str(e))
        return None
    sizes = target.sizes(f"{item}/{DATA.rstrip('/')}") if used else {}
    found = {file: sizes.get(copies.files[file].removeprefix(DATA), 0) for file in used}
    if any(found[file] < places.ends[file] for file in used):
        _undo(source, target, item, "a data file is too short")
        return None
    return DataFiles(places=copies, copied_bytes=sum(found.values()))


def _undo(source: Source, target: NewFolder, item: str, reason: str) -> None:
    """Removes the copies, and logs why."""
    _log.warning(
        "export of %s: its data files are read and written, because the bucket did "
        "not copy them: %s",
        source.name,
        reason,
    )
    target.remove(f"{item}/{DATA.rstrip('/')}")


COMMITTED: Final = "commit_success.txt"
"""File that Orbax expects in a finished step, and in each of its items."""

_COMMITTED_TEXT: Final = b"Written by storesvc.\n"

METRICS: Final = "metrics"
"""Item of Orbax that holds the metrics of a step."""

UNFINISHED: Final = ".orbax-checkpoint-tmp-storesvc"
"""Suffix of the directory of an unfinished step; Orbax ignores such names."""

_ITEM: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step, besides the elements of its arrays."""

    item: str
    layout: str
    leaves: Sequence[OrbaxLeaf]
    texts: Mapping[str, str]
    """Value of each text leaf, by name."""
    json_items: Mapping[str, str]
    """JSON text of each other item."""
    metrics: Mapping[str, float]

    @property
    def arrays(self) -> list[OrbaxLeaf]:
        return [leaf for leaf in self.leaves if leaf.value_type != "string"]


def write_orbax(
    call: ExportCall, *, layout: str, item: str | None, drop_items: bool
) -> tuple[Written, Sequence[str]]:
    """Writes the selected leaves, the items and the metrics.

    Args:
        call: The export; its target is the root, which may hold other steps.
        layout: "v0" or "v1".
        item: Name of the item that holds the tree; None for that of the layout.
        drop_items: Leaves out items that Orbax cannot hold, which are rejected
            otherwise.
    """
    source, meter = call.source, call.meter
    leaves = plan_leaves(source, cast=call.cast)
    rows, dropped = _json_rows(source, drop_items=drop_items)
    name = _item_name(source, item or TREE_ITEMS[layout], rows)
    step = _Step(
        item=name,
        layout=layout,
        leaves=leaves,
        texts={
            leaf.name: _value(source, leaf.row, meter)
            for leaf in leaves
            if leaf.value_type == "string"
        },
        json_items={
            each: json.dumps(_value(source, row, meter)) for each, row in rows.items()
        },
        metrics=source.info.metrics,
    )
    with _new_step(call.opened, call.where, str(source.info.step)) as target:
        data = _write_step(source, target, step, meter)
    size = sum(
        source.tree.grids[leaf.row].leaf_bytes
        // DTYPES[source.leaf(leaf.row).dtype].itemsize
        * DTYPES[leaf.dtype].itemsize
        for leaf in leaves
    )
    files = tuple(f"{source.info.step}/{each}" for each in (name, *rows))
    return (
        Written(
            files=files,
            size_bytes=size,
            linked_bytes=data.linked_bytes,
            copied_bytes=data.copied_bytes,
        ),
        dropped,
    )


def _item_name(source: Source, name: str, others: Mapping[str, int]) -> str:
    """Rejects a name for the item of the tree that is none, or that of another item."""
    taken = {*others, *([METRICS] if source.info.metrics else [])}
    other = f", other than {', '.join(sorted(taken))}" if taken else ""
    if not _ITEM.fullmatch(name) or name in taken:
        raise InvalidRequestError(
            f"export of {source.name}: item=: expected at most 63 letters, digits, '-' "
            f"and '_', the first a letter or a digit{other}, got {name!r}"
        )
    return name


def _json_rows(
    source: Source, *, drop_items: bool
) -> tuple[dict[str, int], Sequence[str]]:
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


def _value(source: Source, row: int, meter: Meter) -> Any:
    """Returns the value of a text or of JSON."""
    leaf = source.leaf(row)
    found = [b""]

    def place(buffer: Buffer) -> None:
        found[0] = buffer.arrays[0].tobytes()

    if leaf.shape[0]:
        source.read([(row, [whole(leaf.shape)])], place, meter)
    return decode_value(leaf.key, leaf.kind, found[0])


def _write_step(
    source: Source, target: NewFolder, step: _Step, meter: Meter
) -> DataFiles:
    """Writes all files of a step but the one that completes it."""
    now = time.time_ns()
    # 1. The elements, and the index of the database.
    data = _write_arrays(source, target, step, meter, now)
    # 2. The documents of the item.

    def put(path: str, value: Any) -> None:
        _put(target, path, json.dumps(value).encode())

    put(f"{step.item}/_METADATA", tree_metadata(step.leaves, source.containers))
    put(f"{step.item}/_sharding", shardings(step.leaves))
    put(f"{step.item}/array_metadatas/process_0", array_metadatas(step.leaves))
    if step.texts:
        put(f"{step.item}/_strings.json", dict(step.texts))
    # 3. The other items.
    handlers = {step.item: TREE_HANDLERS[step.layout]}
    file = "metadata" if step.layout == "v0" else "data.json"
    for name, text in step.json_items.items():
        _put(target, f"{name}/{file}", text.encode())
        handlers[name] = JSON_HANDLERS[step.layout]
    if step.metrics:
        put(f"{METRICS}/{METRICS}", dict(step.metrics))
        handlers[METRICS] = JSON_HANDLERS[step.layout]
    # 4. What makes a step of it.
    for name in handlers:
        _put(target, f"{name}/{COMMITTED}", _COMMITTED_TEXT)
    if step.layout == "v1":
        _put(target, "orbax.checkpoint", b"")
    put(
        "_CHECKPOINT_METADATA", step_metadata(source.info, handlers, commit_time_ns=now)
    )
    return data


def _write_arrays(
    source: Source, target: NewFolder, step: _Step, meter: Meter, now: int
) -> DataFiles:
    arrays = step.arrays
    sizes = [source.tree.grids[leaf.row] for leaf in arrays]
    meter.total_bytes = sum(grid.count * grid.chunk_bytes for grid in sizes)
    data = None
    # A stored file has all leaves, as they were saved.
    is_cast = any(leaf.dtype != source.leaf(leaf.row).dtype for leaf in arrays)
    if source.is_whole and not is_cast:
        data = link_data(source, arrays, target, step.item)
        data = data or copy_within_bucket(source, arrays, target, step.item, meter)
    data = data or copy_data(source, arrays, target, step.item, meter)
    uuid = uuid4()
    view = view_arrays(
        [leaf.array for leaf in arrays],
        chunk_keys(source, arrays),
        data.places,
        node_file=f"{DATA}{uuid.hex}",
        uuid=uuid.bytes,
        commit_time_ns=now,
    )
    if view.nodes:
        _put(target, f"{step.item}/{DATA}{uuid.hex}", b"".join(view.nodes))
    _put(target, f"{step.item}/{ROOT}", view.root)
    return data


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
