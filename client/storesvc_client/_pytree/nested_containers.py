"""Builds nested containers from leaf paths, for a restore without ``like=``.

>>> nest([((), "", 1)])
1
>>> nest([(("a", 0), "ki", 1), (("a", 2), "ki", 3), (("b",), "k", 4)])
{'a': [1, None, 3], 'b': 4}
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from storesvc_client._pytree.plain_containers import TUPLE, Container
from storesvc_client._values.values import PathPart
from storesvc_client.errors import MismatchError, StructureError

INTEGER_LISTS: Final = "if"
"""Path kinds whose parent nodes become lists."""

MAX_LENGTH: Final = 1_000_000
"""Maximum absent items in all lists together, counting the last item of each list. An
index is only a number in a key; without a limit, a few bytes could allocate
gigabytes."""


def nest(
    leaves: Iterable[tuple[tuple[PathPart, ...], str, Any]],
    containers: Sequence[Container] = (),
) -> Any:
    """Returns the tree of ``(path, path_kinds, value)`` leaves.

    Mappings and attributes become dicts. Sequences become lists, or tuples where
    ``containers`` lists them. An item of a sequence that held no leaf becomes None.

    Args:
        leaves: The leaves.
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
    return _Nesting(kinds, tuples).of(root)


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

    def of(self, node: Any) -> Any:
        """Returns the container of a node."""
        if id(node) not in self._kinds:
            return {} if isinstance(node, dict) and not node else node
        items = {part: self.of(child) for part, child in node.items()}
        if self._kinds[id(node)] not in INTEGER_LISTS:
            return items
        length = max(items) + 1
        self._absent += length - len(items)
        if self._absent >= MAX_LENGTH:
            raise MismatchError(
                f"expected lists with fewer than {MAX_LENGTH} absent items, got an "
                f"index of {max(items)}; restore with like="
            )
        found = [items.get(i) for i in range(length)]
        return tuple(found) if id(node) in self._tuples else found
