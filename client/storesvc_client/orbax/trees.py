"""Restores the tree of one item as Orbax does: into a target, or as it was saved.

A target has the structure to return. None in it, or Orbax's placeholder ``...``, is
returned unchanged, and what was saved there is not read. Everything else must be in the
checkpoint, and the checkpoint must have nothing else. In a partial restore either may
have leaves that the other lacks.

Orbax restores a leaf in the type, dtype and sharding that its target names, whatever
was saved; a restore of this library returns what was saved. So a leaf has two parts
here: what to ask the checkpoint for, and what to do with the value.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.tree_util import GetAttrKey
from orbax.checkpoint import ArrayRestoreArgs, RestoreArgs

from storesvc.format.dtypes import DTYPES
from storesvc.format.keys import escape_part
from storesvc_client._pytree.containers import nest
from storesvc_client._pytree.leaves import NamedLeaf, named_leaves
from storesvc_client._pytree.restore_target import (
    default_device,
    saved_placement,
    would_narrow,
)
from storesvc_client._values.models import LeafInfo
from storesvc_client.errors import InvalidRequestError, MismatchError, without_advice
from storesvc_client.orbax.step_errors import TreeMismatchError

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMetadata:
    """A tree of ``ShapeDtypeStruct``, and what the caller saved with it, as
    ``item_metadata`` of Orbax's managers returns it.

    It is a pytree with the leaves and key paths of its tree, and a target of a restore.
    Orbax's own class is private, rejects integer keys and can be unflattened only once,
    so this one has its attributes and methods instead, without ``use_zarr3``.
    """

    tree: Any
    """The containers as they were saved, with a struct for each array."""
    custom_metadata: Any = None
    """``custom_metadata`` of the argument of the save, a value of JSON; None if it had
    none."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], Any]:
        """Returns the first level of the tree, and what rebuilds it."""
        found, structure = jax.tree_util.tree_flatten_with_path(
            self.tree, is_leaf=lambda x: x is not self.tree
        )
        below = [(path[0] if path else GetAttrKey("tree"), x) for path, x in found]
        return below, (structure, json.dumps(self.custom_metadata))

    @classmethod
    def tree_unflatten(cls, rest: Any, below: Sequence[Any]) -> "TreeMetadata":
        """Returns the metadata of a first level and ``rest``."""
        structure, text = rest
        return cls(tree=structure.unflatten(below), custom_metadata=json.loads(text))

    def __getitem__(self, key: Any) -> Any:
        return self.tree[key]

    def __contains__(self, key: object) -> bool:
        return key in self.tree

    def __len__(self) -> int:
        return len(self.tree)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tree)

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns what is at a key; ``default`` if nothing is."""
        try:
            return self.tree[key]
        except (KeyError, IndexError):
            return default

    def keys(self) -> Any:
        return self.tree.keys()

    def values(self) -> Any:
        """Returns what is below the first keys of a tree that is a dict."""
        return self.tree.values()

    def items(self) -> Any:
        """Returns the first keys of a tree that is a dict, and what is below them."""
        return self.tree.items()


def plain_tree(tree: Any) -> Any:
    """Returns the tree of metadata; anything else unchanged."""
    return tree.tree if isinstance(tree, TreeMetadata) else tree


_NUMBERS: Final = (bool, int, float, complex)
_SCALAR_TYPES: Final = {
    "bool": bool,
    "int64": int,
    "float64": float,
    "complex128": complex,
}


@dataclass(frozen=True, slots=True, eq=False)
class LeafTarget:
    """Leaf to ask a checkpoint for, and how to convert the restored value."""

    like: Any
    """Leaf for ``like=``."""
    convert: Callable[[Any], Any]
    """Makes what the caller asked for of the restored value."""


def leaf_target(saved: LeafInfo, target: Any) -> LeafTarget:
    """Returns how a leaf is restored.

    Args:
        saved: The leaf in the checkpoint.
        target: An array, a ``ShapeDtypeStruct``, a number, a type, ``NumpyShapeDtype``,
            or one of Orbax's ``RestoreArgs``, which may leave all but the type open.
    """
    if isinstance(target, type):
        target = RestoreArgs(restore_type=target)
    if isinstance(target, RestoreArgs):
        return _parse_arguments(saved, target)
    if isinstance(target, _NUMBERS) and not isinstance(target, np.generic):
        return _number(saved, type(target))
    if isinstance(target, np.ndarray | np.generic):
        return _host(saved, target.shape, target.dtype)
    if hasattr(target, "sharding") and hasattr(target, "shape"):
        return _device(saved, target.shape, target.dtype, target.sharding)
    if type(target).__module__.startswith("orbax.") and hasattr(target, "shape"):
        shape, dtype = target.shape, target.dtype  # version 1's array on the host
        shape = _shape(saved) if shape is None else shape
        return _host(saved, shape, _dtype(saved) if dtype is None else dtype)
    return LeafTarget(target, _return_unchanged)


def saved_struct(saved: LeafInfo) -> Any:
    """Returns a leaf as a ``ShapeDtypeStruct`` with its saved sharding, if that fits
    the devices here; of texts and bytes their kind."""
    if saved.kind in ("text", "bytes", "integer", "unknown"):
        return saved.kind
    shape, dtype = _shape(saved), _dtype(saved)
    is_on_device = saved.kind in ("array", "prng_key")
    sharding = saved_placement(saved.sharding, saved.dtype) if is_on_device else None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def saved_target(saved: LeafInfo) -> Any:
    """Returns a leaf that is restored as it was saved: for an array on devices its
    ``saved_struct``, for others one of their kind that takes no memory."""
    is_on_device = saved.kind in ("array", "prng_key")
    return saved_struct(saved) if is_on_device else _saved_like(saved)


def _parse_arguments(saved: LeafInfo, target: RestoreArgs) -> LeafTarget:
    """Returns how a leaf is restored that Orbax's arguments describe."""
    kind, dtype = target.restore_type, target.dtype
    if kind in _NUMBERS:
        return _number(saved, kind)
    if kind is np.ndarray:
        return _host(saved, _shape(saved), _dtype(saved) if dtype is None else dtype)
    if kind not in (None, jax.Array, str):
        raise InvalidRequestError(
            f"leaf {saved.key!r}: restore_type=: expected jax.Array, np.ndarray, a "
            f"type of numbers or None, got {kind!r}"
        )
    shape, sharding = _shape(saved), None
    if isinstance(target, ArrayRestoreArgs):
        sharding = _target_sharding(target)
        shape = shape if target.global_shape is None else tuple(target.global_shape)
    elif saved.kind not in ("array", "prng_key"):
        return LeafTarget(_saved_like(saved), _return_unchanged)
    return _device(saved, shape, _dtype(saved) if dtype is None else dtype, sharding)


def _target_sharding(target: ArrayRestoreArgs) -> Any:
    if target.sharding is not None:
        to_jax = getattr(target.sharding, "to_jax_sharding", None)  # saved metadata
        return target.sharding if to_jax is None else to_jax()
    if target.mesh is not None and target.mesh_axes is not None:
        return NamedSharding(target.mesh, target.mesh_axes)
    return None


def _device(saved: LeafInfo, shape: Any, dtype: Any, sharding: Any) -> LeafTarget:
    """Returns how a leaf becomes an array on devices."""
    placement = _placement(saved, sharding)
    shape = tuple(shape)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key) or saved.kind == "prng_key":
        return LeafTarget(
            jax.ShapeDtypeStruct(shape, dtype, sharding=placement), _return_unchanged
        )
    if saved.kind in ("array", "host_array", "host_scalar"):
        if not would_narrow(saved.dtype):
            like = jax.ShapeDtypeStruct(shape, DTYPES[saved.dtype], sharding=placement)
            wanted = np.dtype(dtype)
            same = wanted == like.dtype
            return LeafTarget(
                like, _return_unchanged if same else lambda x: x.astype(wanted)
            )
        like = _host_like(shape, saved.dtype)
    elif saved.kind == "python_scalar" and shape == ():
        like = _saved_like(saved)
    else:
        return LeafTarget(jax.ShapeDtypeStruct(shape, dtype), _return_unchanged)
    return LeafTarget(
        like, lambda x: jax.device_put(np.asarray(x).astype(dtype), placement)
    )


def _placement(saved: LeafInfo, sharding: Any) -> Any:
    """Returns the sharding of a target, or the saved one if it has none."""
    sharding = getattr(sharding, "sharding", sharding)  # of a jax Format
    if sharding is not None:
        return sharding
    if saved.kind not in ("array", "prng_key") or would_narrow(saved.dtype):
        return default_device()
    found: Sharding | None = saved_placement(saved.sharding, saved.dtype)
    if found is None:
        assert saved.sharding is not None
        count = math.prod(saved.sharding.axis_sizes)
        raise MismatchError(
            f"leaf {saved.key!r}: expected the {count} devices of its saved sharding, "
            f"got {jax.device_count()}; give a sharding in the target"
        )
    return found


def _host(saved: LeafInfo, shape: Any, dtype: Any) -> LeafTarget:
    """Returns how a leaf becomes an array on the host."""
    wanted = np.dtype(dtype)
    if saved.kind == "python_scalar" and tuple(shape) == ():
        return LeafTarget(_saved_like(saved), lambda x: np.asarray(x, wanted))
    like = _host_like(tuple(shape), saved.dtype)
    return LeafTarget(like, lambda x: np.asarray(x).astype(wanted, copy=False))


def _number(saved: LeafInfo, kind: Any) -> LeafTarget:
    """Returns how a leaf becomes a Python number."""
    if saved.kind == "python_scalar":
        return LeafTarget(_saved_like(saved), kind)
    if saved.kind in ("array", "host_array", "host_scalar"):
        like = _host_like((), saved.dtype)
        return LeafTarget(like, lambda x: kind(np.asarray(x).item()))
    return LeafTarget(kind(), _return_unchanged)


def _saved_like(saved: LeafInfo) -> Any:
    """Returns a leaf of the kind that was saved, on the host."""
    match saved.kind:
        case "python_scalar":
            return _SCALAR_TYPES[saved.dtype]()
        case "text":
            return ""
        case "bytes":
            return b""
        case "integer":
            return 0
        case _:
            return _host_like(saved.shape, saved.dtype)


def _host_like(shape: tuple[int, ...], dtype: str) -> Any:
    """Returns an array of a shape that takes no memory."""
    return np.broadcast_to(np.zeros((), DTYPES[dtype]), shape)


def _shape(saved: LeafInfo) -> tuple[int, ...]:
    return saved.shape[:-1] if saved.kind == "prng_key" else saved.shape


def _dtype(saved: LeafInfo) -> Any:
    if saved.kind == "prng_key":
        made = jax.eval_shape(lambda: jax.random.key(0, impl=saved.prng_impl))
        return made.dtype
    return DTYPES[saved.dtype]


def _return_unchanged(value: Any) -> Any:
    return value


_log = logging.getLogger("storesvc_client")

_MAX_NAMED: Final = 20
"""Leaves that a message names."""

_SEQUENCE_KINDS: Final = frozenset("if")
"""Letters of ``LeafTable.path_kinds`` whose parts are places in a sequence."""


class _Skipped:
    """Stands for None in a target: nothing is read there."""


_SKIPPED: Final = _Skipped()


def restore_tree(
    opened: "OpenCheckpoint",
    place: str,
    target: Any = None,
    restore_args: Any = None,
    *,
    partial: bool = False,
) -> Any:
    """Returns the tree of an item.

    Args:
        opened: The checkpoint.
        place: First key of its leaves; "" for the whole tree.
        target: Pytree of what to return; None: as it was saved.
        restore_args: Orbax's arguments for the leaves of the target; None: the leaves
            say how they are restored.
        partial: Whether the checkpoint may have leaves that the target lacks, and the
            target some that the checkpoint lacks, which are returned unchanged.
    """
    select = [_below(place)] if place else None
    if target is None:
        return _unwrap_tree(opened.restore(select=select), place)
    leaves, treedef = _marked_leaves(target, place)
    saved = {key: opened.leaves[key] for key in _keys(opened, place)}
    skipped = {
        leaf.key for leaf in leaves if leaf.value is _SKIPPED or leaf.value is ...
    }
    read = [leaf for leaf in leaves if leaf.key in saved and leaf.key not in skipped]
    _check_structure(opened, saved, leaves, skipped, partial=partial)
    targets = {
        leaf.key: leaf_target(saved[leaf.key], given)
        for leaf, given in _with_arguments(read, restore_args, place)
    }
    like = treedef.unflatten(
        targets[leaf.key].like if leaf.key in targets else None for leaf in leaves
    )
    if len(read) < len(saved):
        select = [re.compile(rf"\A(?:{'|'.join(map(re.escape, targets))})\Z")]
    with without_advice():
        restored = opened.restore(like=like, select=select) if read else ()
    values = iter(jax.tree.leaves(restored))
    result = treedef.unflatten(
        targets[leaf.key].convert(next(values))
        if leaf.key in targets
        else None
        if leaf.value is _SKIPPED
        else leaf.value
        for leaf in leaves
    )
    return _unwrap_tree(result, place)


def tree_structs(
    opened: "OpenCheckpoint",
    place: str,
    describe: Callable[[LeafInfo], Any] = saved_struct,
) -> Any:
    """Returns the tree of an item with what describes each leaf."""
    leaves = [opened.leaves[key] for key in _keys(opened, place)]
    rows = [(leaf.path, leaf.path_kinds, describe(leaf)) for leaf in leaves]
    return _unwrap_tree(nest(rows), place) if rows else {}


def has_tree(opened: "OpenCheckpoint", place: str) -> bool:
    """Returns whether a checkpoint has leaves below a first key."""
    below = _below(place)
    return any(below.search(key) for key in opened.leaves)


def _marked_leaves(tree: Any, place: str) -> tuple[list[NamedLeaf], Any]:
    """Returns the leaves of a target below the place of its item; None is one, too."""
    marked = jax.tree.map(
        lambda x: _SKIPPED if x is None else x, tree, is_leaf=lambda x: x is None
    )
    return named_leaves({place: marked} if place else marked)


def _with_arguments(
    leaves: Sequence[NamedLeaf], restore_args: Any, place: str
) -> Iterator[tuple[NamedLeaf, Any]]:
    """Returns leaves, each with what says how it is restored."""
    given: Sequence[NamedLeaf] = leaves
    if restore_args is not None:
        given, _ = _marked_leaves(restore_args, place)
    values = {leaf.key: leaf.value for leaf in given}
    for leaf in leaves:
        if leaf.key not in values:
            raise InvalidRequestError(
                "PyTreeRestore: restore_args=: expected the structure of item=, got "
                f"nothing for leaf {leaf.key!r}; give it RestoreArgs()"
            )
        found = values[leaf.key]
        yield leaf, leaf.value if found is _SKIPPED else found


def _check_structure(
    opened: "OpenCheckpoint",
    saved: Mapping[str, LeafInfo],
    leaves: Sequence[NamedLeaf],
    skipped: Collection[str],
    *,
    partial: bool,
) -> None:
    """Rejects a target with other leaves than the checkpoint.

    In a partial restore either may have more, unless the other has something else at
    their place, or a sequence of another length.
    """
    named = {leaf.key for leaf in leaves}
    absent = [x for x in leaves if x.key not in saved and x.key not in skipped]
    extra = [x for x in saved.values() if named.isdisjoint(_ancestors(x.key))]
    left: list[str] = []
    if partial:
        extra = _find_clashes(extra, named)
        wrong = {x.key for x in absent if isinstance(x.value, RestoreArgs)}
        wrong |= {x.key for x in _find_clashes(absent, saved)}
        left = [x.key for x in absent if x.key not in wrong]
        absent = [x for x in absent if x.key in wrong]
    problems = [
        *(f"leaf {x.key!r}: in the target {_text(x.value)}, not saved" for x in absent),
        *(f"leaf {x.key!r}: saved as {_text(x)}, not in the target" for x in extra),
    ]
    if problems:
        advice = (
            "its containers have to match"
            if partial
            else "PyTreeRestore(partial_restore=True), in version 1 partial_load of a "
            "context, restores what both have"
        )
        raise TreeMismatchError(
            f"{opened.name} does not fit the target: {_join_texts([*problems, advice])}"
        )
    if left:
        _log.warning(
            "%s lacks leaves of the target, which are returned unchanged: %s",
            *(opened.name, _join_texts(left)),
        )


def _find_clashes(leaves: Sequence[Any], others: Collection[str]) -> list[Any]:
    """Returns the leaves where others have something else, or a sequence of another
    length."""
    known = {each for key in others for each in _ancestors(key)}
    found = []
    for leaf in leaves:
        keys = _ancestors(leaf.key)
        depth = next((n for n, key in enumerate(keys) if key not in known), None)
        if (
            depth is None
            or (depth > 0 and keys[depth - 1] in others)
            or leaf.path_kinds[depth] in _SEQUENCE_KINDS
        ):
            found.append(leaf)
    return found


def _ancestors(key: str) -> list[str]:
    """Returns the keys of the containers of a leaf, and its own."""
    return [*accumulate(key.split("/"), lambda above, part: f"{above}/{part}")]


def _join_texts(found: Sequence[str]) -> str:
    """Returns texts as one; of many the first, and the last one."""
    left = len(found) - _MAX_NAMED
    more = [f"{left} more", found[-1]] if left > 0 else []
    return "; ".join([*found[: _MAX_NAMED if more else None], *more])


def _text(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.shape} {leaf.dtype}"
    return type(leaf).__name__


def _keys(opened: "OpenCheckpoint", place: str) -> list[str]:
    below = _below(place)
    return [key for key in opened.leaves if not place or below.search(key)]


def _below(place: str) -> re.Pattern[str]:
    """Returns a pattern of the keys of an item."""
    return re.compile(rf"\A{re.escape(escape_part(place))}(?:/|\Z)")


def _unwrap_tree(tree: Any, place: str) -> Any:
    return tree[place] if place else tree
