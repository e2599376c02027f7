"""Nested containers from paths: what a restore without a target returns.

>>> nest([((), "", 1)])
1
>>> nest([(("a", 0), "ki", 1), (("a", 2), "ki", 3), (("b",), "k", 4)])
{'a': [1, None, 3], 'b': 4}
"""

from collections.abc import Iterable
from typing import Any, Final

from storesvc_client._values import PathPart
from storesvc_client.errors import MismatchError

MAX_LENGTH: Final = 1_000_000
"""Items of a list, the absent ones included: an index is a number in a key, and a
few bytes must not become gigabytes."""


def nest(leaves: Iterable[tuple[tuple[PathPart, ...], str, Any]]) -> Any:
    """Returns the tree of ``(path, path_kinds, value)`` leaves.

    Mappings and attributes become dicts, sequences lists. An item of a sequence
    that held no leaf is None. Containers that held no leaf at all are absent: a
    checkpoint holds leaves, and ``like=`` gives the structure.
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
    return _converted(root, kinds)


def _converted(node: Any, kinds: dict[int, str]) -> Any:
    if id(node) not in kinds:
        return {} if isinstance(node, dict) and not node else node
    items = {part: _converted(child, kinds) for part, child in node.items()}
    if kinds[id(node)] in "if":
        length = max(items) + 1
        if length > MAX_LENGTH:
            raise MismatchError(
                f"an index of {max(items)} is too large for a list; restore with like="
            )
        return [items.get(i) for i in range(length)]
    return items
