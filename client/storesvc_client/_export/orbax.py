"""Writes a checkpoint as a step that Orbax opens, below a root of several steps.

``ROOT/STEP/ITEM/`` holds the tree: an OCDBT database of zarr3 arrays with checksums,
which Orbax verifies, and the documents of ``orbax_documents.py``. JSON items and texts
become JSON items of Orbax; metrics its item "metrics".

The step appears as a whole. On a disk it is written as a directory that Orbax ignores,
and renamed. In a bucket ``commit_success.txt`` comes last, without which Orbax ignores
a step. A retry removes what an unfinished export has left; ``claims.py`` keeps two
exports from completing one step.
"""

import json
import os
import re
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import whole
from storesvc.format.keys import item_of
from storesvc.format.layout import ROOT
from storesvc.format.ocdbt import view_of_arrays
from storesvc.storage.rooted_files import sync_directory
from storesvc_client._chunks.buffer_layout import Buffer
from storesvc_client._export.bucket_copies import copy_within_bucket
from storesvc_client._export.claims import MARK, ClaimedStep
from storesvc_client._export.orbax_data import (
    DATA,
    DataFiles,
    chunk_keys,
    copy_data,
    link_data,
)
from storesvc_client._export.orbax_documents import (
    JSON_HANDLERS,
    TREE_HANDLERS,
    TREE_ITEMS,
    OrbaxLeaf,
    array_metadatas,
    plan_leaves,
    shardings,
    step_metadata,
    tree_metadata,
)
from storesvc_client._export.report import Written
from storesvc_client._export.source import ExportCall, Source
from storesvc_client._export.target import (
    LocalTarget,
    OpenTarget,
    Target,
    lock,
    make_directory,
    translated,
)
from storesvc_client._values.item_values import decoded
from storesvc_client._values.progress import Meter
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    StoreError,
)
from storesvc_proto.v1 import tree_pb2 as pb

COMMITTED: Final = "commit_success.txt"
"""File that Orbax expects in a finished step, and in each of its items."""

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

    Returns:
        The files, and the items left out.

    Raises:
        InvalidRequestError: ``item`` is not a name.
        PreconditionError: Orbax cannot hold a leaf or an item, or the step exists.
        StoreError: The checkpoint could not be read, or the target not be written.
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
    """Returns the name of the item that holds the tree.

    Raises:
        InvalidRequestError: It is no name, or another item has it.
    """
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
    """Returns the rows of the items that become JSON items, and the items left out.

    Raises:
        PreconditionError: Orbax cannot hold an item, and items are not to be dropped.
    """
    rows: dict[str, int] = {}
    others: dict[str, str] = {}
    items = range(source.tree.tree_count, len(source.tree.leaves))
    for row in items if source.is_whole else ():
        leaf, found = source.leaf(row), item_of(source.leaf(row).key)
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
    return decoded(leaf.key, leaf.kind, found[0])


def _write_step(source: Source, target: Target, step: _Step, meter: Meter) -> DataFiles:
    """Writes all files of a step but the one that completes it."""
    now = time.time_ns()
    # 1. The elements, and the index of the database.
    data = _write_arrays(source, target, step, meter, now)
    # 2. The documents of the item.
    put = partial(_put_json, target)
    put(f"{step.item}/_METADATA", tree_metadata(step.leaves, source.containers))
    put(f"{step.item}/_sharding", shardings(step.leaves))
    put(f"{step.item}/array_metadatas/process_0", array_metadatas(step.leaves))
    if step.texts:
        put(f"{step.item}/_strings.json", dict(step.texts))
    # 3. The other items.
    handlers = {step.item: TREE_HANDLERS[step.layout]}
    for name, text in step.json_items.items():
        _put(target, f"{name}/{_json_file(step.layout)}", text.encode())
        handlers[name] = JSON_HANDLERS[step.layout]
    if step.metrics:
        put(f"{METRICS}/{METRICS}", dict(step.metrics))
        handlers[METRICS] = JSON_HANDLERS[step.layout]
    # 4. What makes a step of it.
    for name in handlers:
        _put(target, f"{name}/{COMMITTED}", b"Written by storesvc.\n")
    if step.layout == "v1":
        _put(target, "orbax.checkpoint", b"")
    put(
        "_CHECKPOINT_METADATA",
        step_metadata(source.info, handlers, commit_time_ns=now),
    )
    return data


def _json_file(layout: str) -> str:
    """Returns the name of the file in a JSON item."""
    return "metadata" if layout == "v0" else "data.json"


def _write_arrays(
    source: Source, target: Target, step: _Step, meter: Meter, now: int
) -> DataFiles:
    arrays = step.arrays
    sizes = [source.tree.grids[leaf.row] for leaf in arrays]
    meter.total_bytes = sum(grid.count * grid.chunk_bytes for grid in sizes)
    data = (
        link_data(source, arrays, target, step.item)
        or copy_within_bucket(source, arrays, target, step.item, meter)
        or copy_data(source, arrays, target, step.item, meter)
    )
    uuid = uuid4()
    view = view_of_arrays(
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


def _put(target: Target, path: str, data: bytes) -> None:
    with target.create(path) as file:
        file.write(data)


def _put_json(target: Target, path: str, value: Any) -> None:
    _put(target, path, json.dumps(value).encode())


@contextmanager
def _new_step(opened: OpenTarget, url: str, step: str) -> Generator[Target]:
    """Yields the folder of a step, which is complete if the block succeeds.

    Raises:
        PreconditionError: The step exists, or another export writes it.
    """
    root = opened(url)
    if root.local is not None:
        with _new_directory(root.local / step) as directory:
            yield LocalTarget(directory)
            _put(LocalTarget(directory), COMMITTED, b"Written by storesvc.\n")
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
    claimed.complete(COMMITTED, b"Written by storesvc.\n")


@contextmanager
def _new_directory(place: Path) -> Generator[Path]:
    """Yields a directory that is renamed to `place` if the block succeeds."""
    part = place.with_name(place.name + UNFINISHED)
    with translated(str(place)):
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
