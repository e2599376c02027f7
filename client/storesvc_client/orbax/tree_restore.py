"""Restores the tree of one item as Orbax does: into a target, or as it was saved.

A target has the structure to return. None in it, or Orbax's placeholder ``...``, is
returned unchanged, and what was saved there is not read. Everything else must be in the
checkpoint, and the checkpoint must have nothing else. In a partial restore either may
have leaves that the other lacks.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import jax
from orbax.checkpoint import RestoreArgs

from storesvc.format.keys import escape_part
from storesvc_client._pytree.leaves import NamedLeaf, named_leaves
from storesvc_client._pytree.plain_containers import nest
from storesvc_client._values.values import LeafInfo
from storesvc_client.errors import InvalidRequestError, without_advice
from storesvc_client.orbax.leaf_targets import leaf_target, saved_struct
from storesvc_client.orbax.step_errors import TreeMismatchError

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint

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

    Raises:
        TreeMismatchError: One of them has leaves that the other lacks; names them.
        MismatchError: Leaves have other shapes or types; lists each.
        InvalidRequestError: ``restore_args`` lacks a leaf.
        StoreError: As for ``OpenCheckpoint.restore``.
    """
    if target is None:
        select = [_below(place)] if place else None
        return _unwrapped(opened.restore(select=select), place)
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
    select = [_below(place)] if place else None
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
    return _unwrapped(result, place)


def tree_structs(
    opened: "OpenCheckpoint",
    place: str,
    describe: Callable[[LeafInfo], Any] = saved_struct,
) -> Any:
    """Returns the tree of an item with what describes each leaf."""
    below = _below(place)
    rows = [
        (leaf.path, leaf.path_kinds, describe(leaf))
        for leaf in opened.leaves.values()
        if not place or below.search(leaf.key)
    ]
    return _unwrapped(nest(rows), place) if rows else {}


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
            f"{opened.name} does not fit the target: {_listed([*problems, advice])}"
        )
    if left:
        _log.warning(
            "%s lacks leaves of the target, which are returned unchanged: %s",
            *(opened.name, _listed(left)),
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


def _listed(found: Sequence[str]) -> str:
    """Returns texts as one; of many the first, and the last one."""
    left = len(found) - _MAX_NAMED
    more = [f"{left} more", found[-1]] if left > 0 else []
    return "; ".join([*found[: _MAX_NAMED if more else None], *more])


def _is_skipped(value: Any) -> bool:
    return value is _SKIPPED or value is ...


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


def _unwrapped(tree: Any, place: str) -> Any:
    return tree[place] if place else tree
