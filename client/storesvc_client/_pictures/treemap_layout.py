"""Places the leaves of a checkpoint in a treemap: groups by path, areas by bytes.

Groups are divided by area, the largest first, as long as there are rectangles left and
the parts can be seen. A group that is not divided is one tile; children that are too
small or too many share a tile of their group, the rest. The children of one group have
areas in proportion to their bytes; between groups, headers and margins take a little.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from storesvc_client._pictures.rectangles import Rectangle, divided
from storesvc_client._values.texts import count_text, natural_key
from storesvc_client._values.values import LeafInfo

HEADER: Final = 17.0
"""Height of the header of a group."""

_EDGE: Final = 2.0
_THIN_EDGE: Final = 1.0
_HEADED_WIDTH: Final = 64.0
_HEADED_HEIGHT: Final = 48.0
"""Smallest size of a group with a header."""

_LEVELS: Final = 3
"""Maximum number of headers within each other."""

_LEAST_AREA: Final = 36.0
"""Area in square pixels below which children are not drawn one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A rectangle of a leaf, of a group that is not divided, or of a rest."""

    place: Rectangle
    key: str
    """Key of the leaf or of the group; for a rest, of the group that it belongs to."""
    name: str
    """The last parts of the key, or "other"."""
    leaves: tuple[LeafInfo, ...]
    size_bytes: int
    is_rest: bool
    opens: str
    """Name of the group without a header whose largest tile it is; "" for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group that is divided into tiles, below its header."""

    place: Rectangle
    key: str
    name: str
    leaf_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tiles and groups; a group comes before the groups within it."""

    tiles: tuple[Tile, ...]
    groups: tuple[Group, ...]
    empty_count: int
    """Leaves without bytes, which have no area."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Leaves whose keys begin with the same parts."""

    name: str
    depth: int
    """Number of parts that the keys share."""
    leaves: "Sequence[tuple[list[str], LeafInfo]]"
    size_bytes: int
    is_rest: bool = False

    @property
    def is_divisible(self) -> bool:
        return len(self.leaves) > 1 and not self.is_rest

    @property
    def key(self) -> str:
        return "/".join(self.leaves[0][0][: self.depth])


def place_tiles(leaves: Iterable[LeafInfo], whole: Rectangle, *, most: int) -> Layout:
    """Returns the layout of a treemap.

    Args:
        leaves: Leaves with their sizes.
        whole: Place of the treemap.
        most: Maximum number of tiles and groups together.
    """
    every = [*leaves]
    seen = [(leaf.key.split("/"), leaf) for leaf in every if leaf.size_bytes]
    tiles, groups = list[Tile](), list[Group]()
    root = _Part("", 0, seen, sum(leaf.size_bytes for _, leaf in seen))
    waiting = [(-whole.area, 0, 0, root, whole, "")] if seen else []
    waiting_bytes, number = root.size_bytes, 0
    while waiting:
        _, _, level, part, place, opens = heappop(waiting)
        free = most - len(tiles) - len(groups) - len(waiting)
        share = free * part.size_bytes // max(waiting_bytes, 1)
        waiting_bytes -= part.size_bytes
        children, depth = _children(part) if part.is_divisible else ([], part.depth)
        is_headed = level > 0 and _fits_header(place, level)
        inner = _inner(place, is_top=level == 0, is_headed=is_headed)
        chosen = _chosen(children, depth, inner.area, share - is_headed)
        if len(chosen) < 2:
            tiles.append(_tile(part, place, opens))
            continue
        if is_headed:
            groups.append(_group(part, depth, place))
        # the largest tile of the outermost group without a header has its name
        opens = "" if is_headed else opens or part.name
        places = divided(inner, [child.size_bytes for child in chosen])
        for child, at in zip(chosen, places, strict=True):
            number += 1
            below = level + is_headed if level else 1
            heappush(waiting, (-at.area, number, below, child, at, opens))
            waiting_bytes += child.size_bytes
            opens = ""
    return Layout(
        tiles=tuple(tiles), groups=tuple(groups), empty_count=len(every) - len(seen)
    )


def _children(part: _Part) -> tuple[list[_Part], int]:
    """Returns the children, largest first, and the depth at which the keys differ."""
    depth = part.depth
    first, last = (
        min(path for path, _ in part.leaves),
        max(path for path, _ in part.leaves),
    )
    while first[depth : depth + 1] == last[depth : depth + 1] and depth < len(first):
        depth += 1
    below: dict[str, list[tuple[list[str], LeafInfo]]] = {}
    for entry in part.leaves:
        path = entry[0]
        below.setdefault(path[depth] if depth < len(path) else "", []).append(entry)
    children = [
        _Part(name, depth + 1, found, sum(leaf.size_bytes for _, leaf in found))
        for name, found in below.items()
    ]
    children.sort(key=lambda child: -child.size_bytes)
    return children, depth


def _chosen(
    children: Sequence[_Part], depth: int, area: float, share: int
) -> list[_Part]:
    """Returns the children that get rectangles, largest first: those that can be seen,
    as many as the share allows, and a rest of the others; none of none."""
    if not children:
        return []
    total = sum(child.size_bytes for child in children)
    seen = sum(child.size_bytes * area >= _LEAST_AREA * total for child in children)
    chosen = [*children]
    if not seen == len(children) <= share:
        kept = max(min(seen, share - 1), 0)
        chosen, left = chosen[:kept], chosen[kept:]
        entries = [entry for child in left for entry in child.leaves]
        size = sum(child.size_bytes for child in left)
        is_rest = len(left) > 1
        chosen.append(
            _Part("other", depth, entries, size, is_rest=True) if is_rest else left[0]
        )
    return sorted(chosen, key=lambda one: (-one.size_bytes, natural_key(one.name)))


def _fits_header(place: Rectangle, level: int) -> bool:
    return (
        level <= _LEVELS
        and place.width >= _HEADED_WIDTH
        and place.height >= _HEADED_HEIGHT
    )


def _inner(place: Rectangle, *, is_top: bool, is_headed: bool) -> Rectangle:
    """Returns the place for the children of a group."""
    if is_top:
        return place
    if is_headed:
        return place.inside(top=HEADER, edge=_EDGE)
    is_wide = min(place.width, place.height) > 12 * _THIN_EDGE
    edge = _THIN_EDGE if is_wide else 0.0
    return place.inside(top=edge, edge=edge)


def _tile(part: _Part, place: Rectangle, opens: str) -> Tile:
    leaves = tuple(leaf for _, leaf in part.leaves)
    key, name = part.key, part.name or count_text(len(leaves), "leaf")
    if len(leaves) == 1:
        path = part.leaves[0][0]
        key, name = leaves[0].key, "/".join(path[max(part.depth - 1, 0) :])
    return Tile(
        place=place,
        key=key,
        name=name,
        leaves=leaves,
        size_bytes=part.size_bytes,
        is_rest=part.is_rest,
        opens=opens,
    )


def _group(part: _Part, depth: int, place: Rectangle) -> Group:
    path = part.leaves[0][0]
    return Group(
        place=place,
        key="/".join(path[:depth]),
        name="/".join(path[part.depth - 1 : depth]),
        leaf_count=len(part.leaves),
        size_bytes=part.size_bytes,
    )
