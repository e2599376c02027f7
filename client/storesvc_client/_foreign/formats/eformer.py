"""Reads the checkpoints of eformer, which EasyDeL writes.

A step is a folder (``run-N``) with ``tensorstore_index.json`` and ``metadata.json``,
which states the step and is written last. The index lists path, shape and dtype of each
array, by prefix (``prefixes``, written for EasyDeL's model and optimizer), or in one
list (``arrays``). Each array is a folder, zarr v2. eformer's other writer makes
safetensors, with the same names. Source: ``eformer/serialization/serialization.py``.

The keys of leaves are the paths of arrays: they begin with the tree, as in
``model/layers/0/kernel`` and ``tx/...``; all parts are keys of mappings. The classes of
trees are in pickles (``*_structure.json``), which are never opened; leaves that only
these hold are named in a label.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import xxhash

from storesvc_client._foreign.bounded_json import integers, parse_object
from storesvc_client._foreign.foreign_step import ForeignRoot, ForeignStep, UnreadItem
from storesvc_client._foreign.formats.safetensors import (
    find_file,
    not_read_label,
    tensor_rows,
)
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.steps import (
    METADATA,
    FolderRoot,
    Row,
    join,
    make_step,
    place,
    read_metadata,
    relative_path,
    stamp_folders,
    stated_steps,
    text_row,
)
from storesvc_client._foreign.zarr_arrays import open_folders
from storesvc_client.errors import DataLossError, PreconditionError

MAX_INDEX_BYTES: Final = 64 << 20
MAX_DOCUMENT_BYTES: Final = 16 << 20

_INDEX: Final = "tensorstore_index.json"
_FORMAT: Final = "tensorstore"
_STRUCTURE_SUFFIX: Final = "_structure.json"
_DOCUMENTS: Final[Mapping[str, str]] = {
    "config": "config.json",
    "metadata": METADATA,
    "checkpoint-metadata": "checkpoint_metadata.json",
    "training-arguments": "easydel-training-arguments.json",
}
"""File of each item, which is stored unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexedArray:
    """One entry of an index."""

    path: str
    """Folder of the array, below that of the step."""
    shape: tuple[int, ...]
    dtype: str


def _parse_index(data: bytes, *, what: str) -> list[_IndexedArray]:
    """Returns the arrays of a step, which ``tensorstore_index.json`` lists."""
    fields = parse_object(data, what=what)
    if fields.get("format") != _FORMAT:
        raise PreconditionError(
            f"{what}: expected the format {_FORMAT!r}, got "
            f"{ascii(fields.get('format'))[:80]}"
        )
    prefixes = fields.get("prefixes", {})
    if not isinstance(prefixes, dict):
        raise DataLossError(f"{what}: expected the arrays by prefix in prefixes")
    found = list(_entries(fields.get("arrays", []), "", f"{what}, arrays"))
    for prefix, entries in prefixes.items():
        found += _entries(entries, prefix, f"{what}, prefixes[{prefix[:80]!r}]")
    if not found:
        raise DataLossError(f"{what}: expected arrays, got none")
    return found


def _entries(entries: Any, prefix: str, what: str) -> Iterator[_IndexedArray]:
    if not isinstance(entries, list):
        raise DataLossError(f"{what}: expected a list of arrays")
    for n, entry in enumerate(entries):
        at = f"{what}[{n}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise DataLossError(f"{at}: expected path, shape and dtype")
        path = relative_path(entry.get("path"), what=f"{at}, path")
        above = prefix.split(".") if prefix else []
        if path.split("/")[: len(above)] != above:
            raise DataLossError(
                f"{at}: expected a path below {prefix!r}, got {path[:200]!r}"
            )
        yield _IndexedArray(
            path=path,
            shape=integers(entry.get("shape"), what=f"{at}, shape"),
            dtype=entry["dtype"],
        )


def open_root(location: Location) -> ForeignRoot:
    """Returns the checkpoints below a location.

    A folder without ``metadata.json``, as ``save_pretrained`` writes it for a model, is
    a step only if the location itself is that folder.
    """
    return FolderRoot(
        location,
        "eformer",
        find=partial(
            stated_steps,
            is_finished=_is_finished,
            expected="checkpoints of eformer or EasyDeL, folders such as run-100/ with "
            f"{_INDEX} and {METADATA}",
        ),
        read=_read_step,
        absent=f"finished step {{step}} (with {METADATA} and {_INDEX} or safetensors)",
    )


def _is_finished(folder: str, names: Sequence[str]) -> bool:
    has_arrays = _INDEX in names or find_file(names, what=folder) is not None
    return has_arrays and (METADATA in names or not folder)


def _read_step(location: Location, folder: str, step: int) -> ForeignStep:
    names = location.names(folder)
    digest = xxhash.xxh3_128()
    rows: list[Row] = []
    for item, file in _DOCUMENTS.items():
        if file in names:
            path = join(folder, file)
            data = location.read(path, limit=MAX_DOCUMENT_BYTES)
            digest.update(data)
            rows.append(text_row(item, data, name=place(location, path)))
    time = read_metadata(location, folder).create_time if METADATA in names else None
    left_out: list[UnreadItem] = []
    if _INDEX in names:
        rows += _indexed_rows(location, folder, digest)
    else:
        tensors, left_out = tensor_rows(location, folder, digest)
        rows += tensors
    return make_step(
        location,
        folder,
        rows,
        step=step,
        format="eformer",
        create_time=time,
        labels=_labels(location, folder, names, left_out),
        digest=digest.hexdigest(),
        unread=left_out,
    )


def _indexed_rows(
    location: Location, folder: str, digest: xxhash.xxh3_128
) -> Iterator[Row]:
    path = join(folder, _INDEX)
    index = location.read(path, limit=MAX_INDEX_BYTES)
    digest.update(index)
    entries = _parse_index(index, what=place(location, path))
    paths = [entry.path for entry in entries]
    arrays = open_folders(location, folder, paths)
    digest.update(stamp_folders(location, folder, paths))
    for entry, array in zip(entries, arrays, strict=True):
        array.check_form(entry.path, entry.shape, entry.dtype, f" by {_INDEX}")
        yield array.row(entry.path.split("/"), name=entry.path)


def _labels(
    location: Location, folder: str, names: Sequence[str], left_out: list[UnreadItem]
) -> Mapping[str, str]:
    """Returns a label that names the files that are not read, and the leaves that a
    ``*_structure.json`` holds as pickles, which are never opened."""
    unread = [each.name for each in left_out]
    for name in names:
        if not name.endswith(_STRUCTURE_SUFFIX):
            continue
        path = join(folder, name)
        what = place(location, path)
        fields = parse_object(location.read(path, limit=MAX_INDEX_BYTES), what=what)
        keys, pickles = fields.get("leaf_keys_full"), fields.get("nonarray_payload")
        if not isinstance(keys, list) or not isinstance(pickles, dict):
            raise DataLossError(f"{what}: expected leaf_keys_full and nonarray_payload")
        unread += [
            str(keys[int(n)]) if n.isdigit() and int(n) < len(keys) else n[:80]
            for n in pickles
        ]
    return not_read_label("eformer", unread)
