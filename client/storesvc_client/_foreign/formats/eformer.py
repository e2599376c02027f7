"""Reads the checkpoints of eformer, which EasyDeL writes.

A step is a folder (``run-N``) with ``tensorstore_index.json``, which lists its arrays,
and ``metadata.json``, which states the step and is written last. Each array is a
folder, zarr v2. eformer's other writer makes safetensors, with the same names.

The keys of leaves are the paths of arrays: they begin with the tree, as in
``model/layers/0/kernel`` and ``tx/...``; all parts are keys of mappings. The classes of
trees are in pickles (``*_structure.json``), which are never opened; leaves that only
these hold are named in a label.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import xxhash

from storesvc_client._foreign.foreign_step import ForeignStep, UnreadItem
from storesvc_client._foreign.formats.jax_arrays import (
    IndexedArray,
    parse_index,
    parse_unread,
)
from storesvc_client._foreign.formats.safetensors import (
    find_file,
    not_read_label,
    tensor_rows,
)
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.steps import (
    METADATA,
    Row,
    array_row,
    join,
    place,
    read_metadata,
    stamp_of_folders,
    stated_steps,
    text_row,
    tree_of,
)
from storesvc_client._foreign.zarr_arrays import TensorStoreArray, open_folders
from storesvc_client.errors import DataLossError, NotFoundError

MAX_INDEX_BYTES: Final = 64 << 20
MAX_DOCUMENT_BYTES: Final = 16 << 20

_INDEX: Final = "tensorstore_index.json"
_STRUCTURE_SUFFIX: Final = "_structure.json"
_DOCUMENTS: Final[Mapping[str, str]] = {
    "config": "config.json",
    "metadata": METADATA,
    "checkpoint-metadata": "checkpoint_metadata.json",
    "training-arguments": "easydel-training-arguments.json",
}
"""File of each item."""


def open_root(location: Location) -> "EformerRoot":
    """Returns the checkpoints below a location.

    A folder without ``metadata.json``, as ``save_pretrained`` writes it for a model, is
    a step only if the location itself is that folder.
    """
    return EformerRoot(location)


class EformerRoot:
    """A ``ForeignRoot`` of eformer's checkpoints."""

    def __init__(self, location: Location) -> None:
        self._location = location

    @property
    def url(self) -> str:
        """See ``ForeignRoot``."""
        return f"eformer:{self._location.url}"

    def steps(self) -> Sequence[int]:
        """See ``ForeignRoot``."""
        return sorted(self._folders())

    def open(self, step: int) -> ForeignStep:
        """See ``ForeignRoot``."""
        folder = self._folders().get(step)
        if folder is None:
            raise NotFoundError(
                f"{self.url}: there is no finished step {step} (with {METADATA} and "
                f"{_INDEX} or safetensors)"
            )
        return _read_step(self._location, folder, step)

    def _folders(self) -> dict[int, str]:
        return stated_steps(
            self._location,
            is_finished=_is_finished,
            expected="checkpoints of eformer or EasyDeL, folders such as run-100/ with "
            f"{_INDEX} and {METADATA}",
        )


def _is_finished(folder: str, names: Sequence[str]) -> bool:
    has_arrays = _INDEX in names or find_file(names, what=folder) is not None
    return has_arrays and (METADATA in names or not folder)


def _read_step(location: Location, folder: str, step: int) -> ForeignStep:
    names = location.names(folder)
    digest = xxhash.xxh3_128()
    rows = list(_documents(location, folder, names, digest))
    time = read_metadata(location, folder).create_time if METADATA in names else None
    left_out: list[UnreadItem] = []
    if _INDEX in names:
        rows += _indexed_rows(location, folder, digest)
    else:
        tensors, left_out = tensor_rows(location, folder, digest)
        rows += tensors
    tree, ordered = tree_of(
        rows, place=place(location, folder), advice="save it again with other names"
    )
    return ForeignStep(
        step=step,
        url=f"eformer:{place(location, folder)}",
        format="eformer",
        tree=tree,
        arrays=ordered,
        create_time=time,
        labels=_labels(location, folder, names, left_out),
        digest=digest.hexdigest(),
        unread=left_out,
    )


def _indexed_rows(
    location: Location, folder: str, digest: xxhash.xxh3_128
) -> list[Row]:
    path = join(folder, _INDEX)
    index = location.read(path, limit=MAX_INDEX_BYTES)
    digest.update(index)
    entries = parse_index(index, what=place(location, path))
    paths = [entry.path for entry in entries]
    arrays = open_folders(location, folder, paths)
    digest.update(stamp_of_folders(location, folder, paths))
    return [_row(entry, array) for entry, array in zip(entries, arrays, strict=True)]


def _row(entry: IndexedArray, array: TensorStoreArray) -> Row:
    if (entry.shape, entry.dtype) != (array.shape, array.dtype):
        raise DataLossError(
            f"array {entry.path!r}: expected {entry.shape} {entry.dtype} by {_INDEX}, "
            f"got {array.shape} {array.dtype}; another save may have overwritten it"
        )
    return array_row(
        entry.path.split("/"),
        array,
        name=entry.path,
        dtype=array.dtype,
        shape=array.shape,
        chunk_shape=array.chunk_shape,
    )


def _documents(
    location: Location, folder: str, names: Sequence[str], digest: xxhash.xxh3_128
) -> Iterator[Row]:
    """Yields the items: documents next to the arrays, as they are."""
    for item, file in _DOCUMENTS.items():
        if file not in names:
            continue
        path = join(folder, file)
        data = location.read(path, limit=MAX_DOCUMENT_BYTES)
        digest.update(data)
        yield text_row(item, data, name=place(location, path))


def _labels(
    location: Location, folder: str, names: Sequence[str], left_out: list[UnreadItem]
) -> Mapping[str, str]:
    """Returns a label that names the leaves and files that are not read."""
    unread = [each.name for each in left_out]
    for name in names:
        if name.endswith(_STRUCTURE_SUFFIX):
            path = join(folder, name)
            data = location.read(path, limit=MAX_INDEX_BYTES)
            unread += parse_unread(data, what=place(location, path))
    return not_read_label("eformer", unread)
