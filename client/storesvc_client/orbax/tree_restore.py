"""Restores the tree of one item as Orbax does: into a target, or as it was saved.

A target has the structure to return. None in it, or Orbax's placeholder ``...``, is
returned unchanged, and what was saved there is not read. Everything else must be in the
checkpoint, and, unless the restore is partial, the checkpoint must have nothing else.
"""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax

from storesvc.format.keys import escape_part
from storesvc_client._pytree.leaves import NamedLeaf, named_leaves
from storesvc_client._pytree.plain_containers import nest
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_client.orbax.leaf_targets import leaf_target, saved_struct

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


class _Skipped:
    """Stands for None in a target: nothing is read there."""


_SKIPPED: Final = _Skipped()


def restore_tree(
    opened: "OpenCheckpoint", place: str, target: Any = None, *, partial: bool = False
) -> Any:
    """Returns the tree of an item.

    Args:
        opened: The checkpoint.
        place: First key of its leaves; "" for the whole tree.
        target: Pytree of what to return; None: as it was saved.
        partial: Whether the checkpoint may have leaves that the target lacks.

    Raises:
        MismatchError: The checkpoint does not fit the target; lists every leaf.
        StoreError: As for ``OpenCheckpoint.restore``.
    """
    if target is None:
        select = [_below(place)] if place else None
        return _unwrapped(opened.restore(select=select), place)
    marked = jax.tree.map(
        lambda x: _SKIPPED if x is None else x, target, is_leaf=lambda x: x is None
    )
    leaves, treedef = named_leaves({place: marked} if place else marked)
    skipped = [leaf.key for leaf in leaves if _is_skipped(leaf)]
    read = [leaf for leaf in leaves if not _is_skipped(leaf)]
    found = _converted(opened, place, treedef, leaves, partial=partial) if read else []
    if not read and not partial:
        _check_nothing_left(opened, place, skipped)
    values = iter(found)
    result = treedef.unflatten(
        _marker(leaf.value) if _is_skipped(leaf) else next(values) for leaf in leaves
    )
    return _unwrapped(result, place)


def tree_structs(opened: "OpenCheckpoint", place: str) -> Any:
    """Returns the tree of an item with a ``ShapeDtypeStruct`` for each array."""
    below = _below(place)
    rows = [
        (leaf.path, leaf.path_kinds, saved_struct(leaf))
        for leaf in opened.leaves.values()
        if not place or below.search(leaf.key)
    ]
    return _unwrapped(nest(rows), place) if rows else {}


def has_tree(opened: "OpenCheckpoint", place: str) -> bool:
    """Returns whether a checkpoint has leaves below a first key."""
    below = _below(place)
    return any(below.search(key) for key in opened.leaves)


def with_structure(item: Any, restore_args: Any) -> Any:
    """Returns the target of Orbax's ``PyTreeRestore``.

    Args:
        item: Structure to return; None: that of ``restore_args``.
        restore_args: Arguments for each leaf; None: leaves of ``item`` have them.

    Raises:
        InvalidRequestError: The two have other structures.
    """
    if restore_args is None or item is None:
        return item if restore_args is None else restore_args
    treedef: Any
    leaves, treedef = jax.tree.flatten(item, is_leaf=lambda x: x is None)
    try:
        given = treedef.flatten_up_to(restore_args)
    except (ValueError, TypeError) as e:
        raise InvalidRequestError(
            f"PyTreeRestore: restore_args=: expected the structure of item=, got "
            f"another: {e}"
        ) from e
    return treedef.unflatten(
        leaf if leaf is None or leaf is ... or args is None else args
        for leaf, args in zip(leaves, given, strict=True)
    )


def _converted(
    opened: "OpenCheckpoint",
    place: str,
    treedef: Any,
    leaves: Sequence[NamedLeaf],
    *,
    partial: bool,
) -> Iterator[Any]:
    """Returns the values of the leaves that are read, in their order."""
    read = [leaf for leaf in leaves if not _is_skipped(leaf)]
    targets = {}
    for leaf in read:
        saved = opened.leaves.get(leaf.key)
        if saved is not None:
            targets[leaf.key] = leaf_target(saved, leaf.value)
        elif leaf.value is None or not _is_array_like(leaf.value):
            raise MismatchError(
                f"{opened.name} does not fit the target: leaf {leaf.key!r}: expected "
                f"{type(leaf.value).__name__}, got none"
            )
    like = treedef.unflatten(
        None
        if _is_skipped(leaf)
        else targets[leaf.key].like
        if leaf.key in targets
        else leaf.value
        for leaf in leaves
    )
    restored = opened.restore(
        like=like, select=_selected(opened, place, leaves, partial=partial)
    )
    values = jax.tree.leaves(restored)
    return (
        targets[leaf.key].convert(value)
        for leaf, value in zip(read, values, strict=True)
    )


def _selected(
    opened: "OpenCheckpoint", place: str, leaves: Sequence[NamedLeaf], *, partial: bool
) -> Any:
    """Returns the patterns of the leaves to read; None: all."""
    skipped = [leaf.key for leaf in leaves if _is_skipped(leaf)]
    if partial:
        wanted = {leaf.key for leaf in leaves} - set(skipped)
        return _exactly([key for key in opened.leaves if key in wanted])
    if skipped:
        left = [key for key in _keys(opened, place) if not _is_below(key, skipped)]
        return _exactly(left)
    return [_below(place)] if place else None


def _exactly(keys: Sequence[str]) -> Any:
    """Returns patterns of exactly these keys; None if there are none, so that the
    restore names what is missing."""
    if not keys:
        return None
    return [re.compile(rf"\A(?:{'|'.join(map(re.escape, keys))})\Z")]


def _check_nothing_left(
    opened: "OpenCheckpoint", place: str, skipped: Sequence[str]
) -> None:
    left = [key for key in _keys(opened, place) if not _is_below(key, skipped)]
    if left:
        raise MismatchError(
            f"{opened.name} does not fit the target: expected no leaves, got "
            f"{', '.join(left[:5])}; use PyTreeRestore(partial_restore=True) to leave "
            "them out"
        )


def _keys(opened: "OpenCheckpoint", place: str) -> list[str]:
    below = _below(place)
    return [key for key in opened.leaves if not place or below.search(key)]


def _is_below(key: str, above: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}/") for each in above)


def _below(place: str) -> re.Pattern[str]:
    """Returns a pattern of the keys of an item."""
    return re.compile(rf"\A{re.escape(escape_part(place))}(?:/|\Z)")


def _is_skipped(leaf: NamedLeaf) -> bool:
    return leaf.value is _SKIPPED or leaf.value is ...


def _marker(value: Any) -> Any:
    return None if value is _SKIPPED else value


def _is_array_like(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, bool | int | float | complex)


def _unwrapped(tree: Any, place: str) -> Any:
    return tree[place] if place else tree
