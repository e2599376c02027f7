"""Decides the names and documents of an Orbax checkpoint. Pure.

Source of the format: orbax-checkpoint 0.12, ``_src/metadata/tree.py``, ``sharding.py``,
``array_metadata.py`` and ``step_metadata_serialization.py``. An array is named by the
texts of its path, joined by "."; that is not injective, so two leaves of one name are
rejected. Indices of lists are sequence keys, everything else is a dict key: Orbax
returns integer keys of dicts as texts, and tuples as lists, unless a target is given.
"""

import json
import math
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from storesvc.format.dtypes import NEWER, zarr_data_type
from storesvc.format.keys import split_key
from storesvc.format.ocdbt import ZarrArray
from storesvc.format.trees import SavedSharding
from storesvc_client._export.source import Source
from storesvc_client._export.tensors import exported_dtype
from storesvc_client._values.item_values import Container
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import PreconditionError
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
    """Returns the selected leaves as Orbax names them, in the order of their keys.

    Raises:
        PreconditionError: Orbax cannot hold a leaf, or two leaves have one name.
    """
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
    """Returns ``_METADATA``.

    Args:
        leaves: The leaves.
        containers: The containers that no leaf shows.
    """
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
    """Returns ``_CHECKPOINT_METADATA``.

    Args:
        info: The checkpoint; its labels become custom metadata.
        item_handlers: Class of each item's handler, as a text.
        commit_time_ns: Nanoseconds since the epoch.
    """
    created = int(info.create_time.timestamp() * 1e9)
    return {
        "item_handlers": dict(item_handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": created,
        "commit_timestamp_nsecs": commit_time_ns,
        "custom_metadata": dict(info.labels),
    }
