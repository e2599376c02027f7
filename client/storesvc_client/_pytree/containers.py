"""Builds nested containers from leaf paths, with a document for what they do not show.

A checkpoint holds leaves, and their paths show the dicts and lists above them. A
separate document records the positions of None, empty containers and tuples, so that a
restore without ``like=`` returns them. It is stored as ``LeafTable.structure`` if the
tree has no other document, and lists type, key and path kinds of each container. A
named tuple without fields, such as ``optax.EmptyState()``, is an empty dict, as one
with fields becomes a dict. Other nodes are not described.

>>> nest([((), "", 1)])
1
>>> nest([(("a", 0), "ki", 1), (("a", 2), "ki", 3), (("b",), "k", 4)])
{'a': [1, None, 3], 'b': 4}
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey, tree_flatten_with_path

from storesvc.format.trees import MAX_STRUCTURE_BYTES
from storesvc_client._items.values import (
    EMPTY,
    TUPLE,
    Container,
    pack_container_document,
)
from storesvc_client._pytree.leaves import KeyCache
from storesvc_client._values.models import PathPart
from storesvc_client.errors import MismatchError, StructureError, UnsupportedLeafError

_LEAVES: Final = (int, float, complex, str, bytes, np.ndarray, np.generic, jax.Array)
"""Types of most leaves; skipped without asking jax for children."""

INTEGER_LISTS: Final = "if"
"""Path kinds whose parent nodes become lists."""

MAX_ABSENT_ITEMS: Final = 1_000_000
"""Maximum absent items in all lists together, counting the last item of each list. An
index is only a number in a key; without a limit, a few bytes could allocate
gigabytes."""


def pack_containers(tree: Any) -> tuple[bytes, tuple[str, ...]]:
    """Returns the document of a pytree, and the containers that it cannot describe.

    Returns:
        The document, b"" if the leaves show everything or if it would be larger than
        ``MAX_STRUCTURE_BYTES``; and ``key: class`` for each outermost container that a
        restore without ``like=`` returns as a dict or list.
    """
    found: list[Container] = []
    unknown: list[str] = []
    keys = KeyCache()
    left: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while left:
        path, node = left.pop()
        what = _what(node)
        if what:
            try:
                found.append(Container(what, *keys.find(path)))
            except UnsupportedLeafError:
                continue  # such a key cannot be written, and no leaf is below it
        children = list(_children(node))
        if (children or what) and not _is_plain(node):
            try:
                key = keys.find(path)[0] or "the tree itself"
            except UnsupportedLeafError:
                key = "a container"
            unknown.append(f"{key}: {type(node).__name__}")
        left += [
            ((*path, *below), child)
            for below, child in children
            if not isinstance(child, _LEAVES)
        ]
    packed = pack_container_document(found)
    if len(packed) <= MAX_STRUCTURE_BYTES:
        return packed, tuple(unknown)
    return b"", (f"{len(found)} tuples and empty containers", *unknown)


def _is_plain(node: Any) -> bool:
    """Returns whether a node is restored unchanged."""
    if type(node) is dict:
        return all(type(key) in (str, int) for key in node)
    return type(node) in EMPTY


def _what(node: Any) -> str:
    """Returns the name of a container that leaf paths do not show, else ""."""
    kind = type(node)
    if kind in EMPTY and not node:
        return EMPTY[kind]
    if _is_empty_named_tuple(node):
        return EMPTY[dict]
    return TUPLE if kind is tuple else ""


def _is_empty_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields") and not node


def _children(node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """Returns the children of a node with their relative paths.

    For other node types these are the nearest plain containers or leaves. A leaf has no
    children.
    """
    kind = type(node)
    if kind is dict:
        return (((DictKey(key),), child) for key, child in node.items())
    if kind in (list, tuple):
        return (((SequenceKey(i),), child) for i, child in enumerate(node))
    found = tree_flatten_with_path(
        node, is_leaf=lambda x: type(x) in EMPTY or _is_empty_named_tuple(x)
    )[0]
    return ((below, child) for below, child in found if below)


def nest(
    leaves: Iterable[tuple[tuple[PathPart, ...], str, Any]],
    containers: Sequence[Container] = (),
) -> Any:
    """Returns the tree of ``(path, path_kinds, value)`` leaves.

    Mappings and attributes become dicts. Sequences become lists, or tuples where
    ``containers`` lists them. An item of a sequence that held no leaf becomes None.

    Args:
        containers: The None values, empty containers and tuples that the leaves do not
            show. Containers without leaves that are not listed are omitted.

    Raises:
        MismatchError: A list is too long.
        StructureError: The containers contradict the leaves or each other.
    """
    root: dict[PathPart, Any] = {}
    kinds: dict[int, str] = {}
    for path, path_kinds, value in leaves:
        if not path:
            return value
        node = root
        for part, kind in zip(path[:-1], path_kinds[:-1], strict=True):
            kinds[id(node)] = kind
            node = node.setdefault(part, {})
        kinds[id(node)] = path_kinds[-1]
        node[path[-1]] = value
    for each in containers:
        if each.what != TUPLE:
            if not each.path:
                return each.value
            _put(root, kinds, each)
    tuples = {id(_node(root, each)) for each in containers if each.what == TUPLE}
    return _Nesting(kinds, tuples).make_container(root)


def _put(root: dict[PathPart, Any], kinds: dict[int, str], each: Container) -> None:
    """Inserts None or an empty container at its path."""
    node: Any = root
    for part, kind in zip(each.path, each.path_kinds, strict=True):
        is_list = kind in INTEGER_LISTS
        if type(node) is not dict or (
            (kinds.setdefault(id(node), kind) in INTEGER_LISTS) != is_list
        ):
            raise _contradiction(each)
        above, node = node, node.setdefault(part, {})
    if type(node) is not dict or node:
        raise _contradiction(each)
    above[part] = each.value


def _node(root: dict[PathPart, Any], each: Container) -> Any:
    """Returns the node of a tuple, or None if no leaf of it is restored."""
    node: Any = root
    for part in each.path:
        node = node.get(part) if type(node) is dict else None
    return node


def _contradiction(each: Container) -> StructureError:
    return StructureError(
        "the checkpoint's document of containers contradicts its leaves: expected a "
        f"container at {each.key!r}, got another node; restore with like="
    )


class _Nesting:
    """Converts nodes to containers."""

    def __init__(self, kinds: dict[int, str], tuples: set[int]) -> None:
        self._kinds = kinds
        self._tuples = tuples
        self._absent = 0
        """Items absent from lists so far."""

    def make_container(self, node: Any) -> Any:
        if id(node) not in self._kinds:
            return {} if isinstance(node, dict) and not node else node
        items = {part: self.make_container(child) for part, child in node.items()}
        if self._kinds[id(node)] not in INTEGER_LISTS:
            return items
        length = max(items) + 1
        self._absent += length - len(items)
        if self._absent >= MAX_ABSENT_ITEMS:
            raise MismatchError(
                f"expected lists with fewer than {MAX_ABSENT_ITEMS} absent items, got "
                f"an index of {max(items)}; restore with like="
            )
        found = [items.get(i) for i in range(length)]
        return tuple(found) if id(node) in self._tuples else found
