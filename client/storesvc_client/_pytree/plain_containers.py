"""Containers that leaves do not show: None, what is empty, and tuples.

A checkpoint holds leaves, and their paths show the dicts and lists above them. A
document beside them says where None, empty containers and tuples were, so that a
restore without ``like=`` returns them. It is kept as ``LeafTable.structure`` where the
tree has no other document: for each of them what it is and its path, as leaves have
them. Other nodes, such as named tuples, are not described.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.tree_util import DictKey, SequenceKey, tree_flatten_with_path

from storesvc.format.keys import INTEGER_KINDS, fits_key, split_key
from storesvc.format.trees import MAX_STRUCTURE_BYTES
from storesvc_client._pytree.leaves import Names
from storesvc_client._values.documents import CONTAINERS, pack_document, unpack_document
from storesvc_client._values.values import PathPart
from storesvc_client.errors import StructureError, UnsupportedLeafError

TUPLE: Final = "tuple"
"""A tuple that is not empty: its items are described by themselves."""

_EMPTY: Final[dict[type, str]] = {
    type(None): "none",
    dict: "{}",
    list: "[]",
    tuple: "()",
}
_LEAVES: Final = (int, float, complex, np.ndarray, np.generic, jax.Array)
"""Kinds of most leaves, which need not be asked what is in them."""

_MADE: Final = {name: kind for kind, name in _EMPTY.items() if kind is not type(None)}


@dataclass(frozen=True, slots=True)
class Container:
    """One None, empty container or tuple."""

    what: str
    key: str
    path_kinds: str

    @property
    def path(self) -> tuple[PathPart, ...]:
        """Its path, as that of a leaf."""
        parts = zip(split_key(self.key), self.path_kinds, strict=True)
        return tuple(
            int(text) if kind in INTEGER_KINDS else text for text, kind in parts
        )

    @property
    def value(self) -> Any:
        """A new one, where it is None or empty."""
        return _MADE[self.what]() if self.what in _MADE else None


def pack_containers(tree: Any) -> tuple[bytes, tuple[str, ...]]:
    """Returns the document of a pytree, and the containers that it does not describe.

    Returns:
        The document; b"" where the leaves show all, or where it would be larger than a
        document may be. And ``key: class`` of each outermost container that comes back
        as a dict or list unless a restore has ``like=``.
    """
    foreign: list[str] = []
    found = _containers(tree, foreign)
    rows = [[each.what, each.key, each.path_kinds] for each in found]
    if not rows:
        return b"", tuple(foreign)
    packed = CONTAINERS + pack_document({"containers": sorted(rows)})
    if len(packed) <= MAX_STRUCTURE_BYTES:
        return packed, tuple(foreign)
    return b"", (f"{len(rows)} tuples and empty containers", *foreign)


def unpack_containers(document: bytes) -> list[Container]:
    """Returns what a document describes; nothing where it is another one.

    Raises:
        StructureError: It is malformed.
    """
    if not document.startswith(CONTAINERS):
        return []
    fields = unpack_document(document.removeprefix(CONTAINERS))
    try:
        rows = fields["containers"]
        found = [Container(what, key, kinds) for what, key, kinds in rows]
        for each in found:
            if each.what not in (TUPLE, *_EMPTY.values()):
                raise ValueError(f"{each.what!r} is no container")
            if not fits_key(each.path_kinds, each.key):
                raise ValueError(f"{each.path_kinds!r} does not fit {each.key!r}")
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise StructureError(
            f"the document of its containers is malformed ({e}); restore with like="
        ) from e
    return found


def _containers(tree: Any, foreign: list[str]) -> Iterator[Container]:
    """Yields what a document describes; what it does not, it adds to ``foreign``."""
    names = Names()
    left: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while left:
        path, node = left.pop()
        what = _what(node)
        if what:
            try:
                yield Container(what, *names.of(path))
            except UnsupportedLeafError:
                continue  # no leaf is below such a key, and it cannot be written
        children = list(_children(node))
        if children and not _is_plain(node):
            foreign.append(f"{_key(names, path)}: {type(node).__name__}")
        left += [
            ((*path, *below), child)
            for below, child in children
            if not isinstance(child, _LEAVES)
        ]


def _is_plain(node: Any) -> bool:
    """Whether a node comes back as it was: a dict does with texts and integers."""
    if type(node) is dict:
        return all(type(key) in (str, int) for key in node)
    return type(node) in _EMPTY


def _key(names: Names, path: tuple[Any, ...]) -> str:
    """The key of a container, for a message."""
    try:
        return names.of(path)[0] or "the tree itself"
    except UnsupportedLeafError:
        return "a container"


def _what(node: Any) -> str:
    """What a node is, where leaves do not show it; "" where they do."""
    kind = type(node)
    if kind in _EMPTY and not node:
        return _EMPTY[kind]
    return TUPLE if kind is tuple else ""


def _children(node: Any) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """What is in a node, with the paths to it; of nodes of other kinds, what is plain
    again, or a leaf. A leaf has nothing in it."""
    kind = type(node)
    if kind is dict:
        return (((DictKey(key),), child) for key, child in node.items())
    if kind in (list, tuple):
        return (((SequenceKey(i),), child) for i, child in enumerate(node))
    found = tree_flatten_with_path(node, is_leaf=lambda x: type(x) in _EMPTY)[0]
    return ((below, child) for below, child in found if below)
