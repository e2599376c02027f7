"""Documents of checkpoints and leaves, as ``storectl stat --json`` and the console show
them, and what the runs of a namespace or a store use."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from storesvc_client._views.texts import ABSENT, dtype_text, json_value, mesh_text

if TYPE_CHECKING:
    from storesvc_client import (
        Checkpoint,
        Client,
        DataLossError,
        ForeignCheckpoint,
        LeafInfo,
        NotFoundError,
        OpenCheckpoint,
        Run,
        Tag,
        Usage,
    )

_CALLS: Final = 8
"""Maximum calls at a time: each reads the index of one run."""


def list_usages(
    client: "Client",
    namespace: str | None,
    on_damage: "Callable[[DataLossError], object]",
) -> "list[Usage]":
    """Returns what each run uses, by name, also runs that have only uploads.

    Args:
        on_damage: Called with the error of each damaged record of a run or an upload.
    """
    from storesvc_client import DataLossError, NotFoundError

    def read_usage(name: str) -> "Usage | DataLossError | None":
        try:
            return client.run(name).usage()
        except DataLossError as e:  # one of its records is damaged
            return e
        except NotFoundError:  # its first save was aborted in the meantime
            return None

    names = {run.name for run in client.runs(namespace, on_damage=on_damage)}
    names |= {upload.run for upload in client.uploads(namespace, on_damage=on_damage)}
    usages: list[Usage] = []
    with ThreadPoolExecutor(_CALLS, "storesvc-usage") as pool:
        for found in pool.map(read_usage, sorted(names)):
            if isinstance(found, DataLossError):
                on_damage(found)
            elif found is not None:
                usages.append(found)
    return usages


def sum_usages(usages: "Sequence[Usage]") -> dict[str, int]:
    """Returns what runs use together, by the names of ``Usage``."""
    names = (
        *("checkpoint_count", "deleted_checkpoint_count", "upload_count"),
        *("logical_bytes", "stored_bytes", "distinct_bytes", "file_count"),
    )
    return {name: sum(getattr(usage, name) for usage in usages) for name in names}


def checkpoint_document(
    checkpoint: "Checkpoint",
    opened: "OpenCheckpoint | None",
    *,
    tags: "Sequence[Tag]",
    base_step: int | None,
) -> dict[str, Any]:
    """Returns the document of a checkpoint; without contents if it is deleted."""
    document: dict[str, Any] = json_value(checkpoint)
    document |= {
        "tags": [tag.name for tag in tags],
        "base_step": base_step,
        "shared_bytes": checkpoint.stored_bytes - checkpoint.own_bytes,
    }
    return document if opened is None else document | contents(opened)


def deleted_checkpoint(run: "Run", error: "NotFoundError") -> "Checkpoint":
    """Returns the deleted checkpoint that an error names.

    Raises:
        NotFoundError: The error, if it names none, or one that was purged since.
    """
    if error.reason == "CHECKPOINT_DELETED":
        for checkpoint in run.checkpoints(deleted=True):
            if checkpoint.uid == error.metadata["uid"]:
                return checkpoint
    raise error


def contents(opened: "OpenCheckpoint | ForeignCheckpoint") -> dict[str, Any]:
    """Returns the kinds, dtypes and meshes of the leaves, the model and the items."""
    leaves = opened.leaves.values()
    return {
        "kinds": Counter(leaf.kind for leaf in leaves),
        "dtypes": Counter(map(dtype_text, leaves)),
        "meshes": sorted({mesh_text(leaf.sharding) for leaf in leaves} - {ABSENT}),
        "model": _model(opened.document),
        "items": [json_value(opened.items.info(name)) for name in opened.items],
    }


def leaf_document(leaf: "LeafInfo") -> dict[str, Any]:
    document: dict[str, Any] = json_value(leaf)
    return document | {"chunk_grid": chunk_grid(leaf)}


def chunk_grid(leaf: "LeafInfo") -> list[int]:
    """Returns the number of chunks along each dimension."""
    pairs = zip(leaf.shape, leaf.chunk_shape, strict=True)
    return [-(-size // chunk) for size, chunk in pairs]


def find_base_step(run: "Run", checkpoint: "Checkpoint") -> int | None:
    """Returns the step whose chunks a checkpoint may share; None if there is none, or
    if the record of its upload is gone."""
    from storesvc_client.errors import (
        NotFoundError,  # loads gRPC, which --help need not
    )

    try:
        return run.uploads.get(checkpoint.uid).base_step
    except NotFoundError:
        return None


def _model(structure: bytes) -> dict[str, Any] | None:
    """Returns the model that a checkpoint describes; None without a description."""
    if not structure:
        return None
    from storesvc_client._items.values import unpack_document

    fields = unpack_document(structure)
    return {name: fields.get(name) for name in ("model", "versions", "config")}
