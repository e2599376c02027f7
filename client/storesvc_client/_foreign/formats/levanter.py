"""Reads the checkpoints of levanter (marin).

A step is a folder (``step-N``) with ``metadata.json``, which is written last and states
the step. Its arrays are in an OCDBT database in the folder, zarr3, with the parts of
their path joined by "/"; older ones are zarr v2, a folder each. Source:
``levanter/tensorstore_serialization.py`` and ``checkpoint.py`` of
marin-community/marin. The parts were joined by "." before and split there, so the
path of a field with a "." in its name has two parts.
"""

from functools import partial
from typing import Final

import xxhash

from storesvc_client._foreign.foreign_step import ForeignRoot, ForeignStep
from storesvc_client._foreign.locations import Location
from storesvc_client._foreign.steps import (
    METADATA,
    FolderRoot,
    join,
    make_step,
    place,
    read_metadata,
    stamp_folders,
    stated_steps,
    text_row,
)
from storesvc_client._foreign.zarr_arrays import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TensorStoreArray,
    database_base,
    find_arrays,
    list_keys,
    ocdbt,
    open_folders,
    open_keys,
)
from storesvc_client.errors import DataLossError

_ZARR_JSON: Final = "zarr.json"


def open_root(location: Location) -> ForeignRoot:
    """Returns the checkpoints below a location, such as the folder of a run."""
    find = partial(
        stated_steps,
        is_finished=lambda _, names: METADATA in names,
        expected=f"checkpoints of levanter, folders such as step-100/ with {METADATA}",
    )
    absent = f"finished step {{step}} (with {METADATA})"
    return FolderRoot(location, "levanter", find=find, read=_read_step, absent=absent)


def _read_step(location: Location, folder: str, step: int) -> ForeignStep:
    metadata = read_metadata(location, folder)
    digest = xxhash.xxh3_128(metadata.data)
    if MANIFEST in location.names(folder):
        manifest = join(folder, MANIFEST)
        digest.update(location.read(manifest, limit=MAX_MANIFEST_BYTES))
        paths, arrays = _open_database(location, folder)
    else:
        paths = find_arrays(location, folder)
        arrays = open_folders(location, folder, paths)
        digest.update(stamp_folders(location, folder, paths))
    if not paths:
        raise DataLossError(
            f"{place(location, folder)}: expected arrays, found none; use another "
            "checkpoint"
        )
    rows = [
        array.row(path.split("/") if path else [], name=path)
        for path, array in zip(paths, arrays, strict=True)
    ]
    rows.append(text_row("metadata", metadata.data, name=METADATA))
    return make_step(
        location,
        folder,
        rows,
        step=step,
        format="levanter",
        create_time=metadata.create_time,
        digest=digest.hexdigest(),
    )


def _open_database(
    location: Location, folder: str
) -> tuple[list[str], list[TensorStoreArray]]:
    base = database_base(location, folder)
    with location.opening():
        keys = list_keys(ocdbt(base), what=place(location, folder))
    paths = [
        key.removesuffix(_ZARR_JSON).removesuffix("/")
        for key in keys
        if key == _ZARR_JSON or key.endswith(f"/{_ZARR_JSON}")
    ]
    return paths, open_keys(location, base, [(path, path) for path in paths])
