"""Bars of the share of changed bytes in each layer, for a comparison of checkpoints.

Example:
    >>> svg = layer_bars(opened.leaves.values(), changed_shares(run.diff(100, 200)))
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from storesvc_client._pictures.keys import layers_of
from storesvc_client._pictures.leaf_colours import (
    CHANGES,
    Shares,
    changed_share,
    percent,
)
from storesvc_client._pictures.svg import (
    GREY,
    Style,
    document,
    element,
    fitted,
    note,
    text_width,
    words,
)
from storesvc_client._values.texts import count_text, natural_key, printable, size_text
from storesvc_client._values.values import Diff, LeafInfo

MOST_GROUPS: Final = 40
"""Maximum number of layers with a bar of their own."""

_ROW: Final = 20.0
_BAR: Final = 10.0
_NAME: Final = 220.0
"""Maximum width of the names."""

_REMARK: Final = 162.0
"""Width of the texts on the right of the bars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChange:
    """The leaves of a layer, and their changed bytes."""

    name: str
    leaf_count: int
    size_bytes: int
    share: float | None
    """Share of changed bytes, from 0 to 1; None: not known."""

    @property
    def changed_bytes(self) -> float:
        """Changed bytes; of an unknown change, all."""
        return self.size_bytes * (1.0 if self.share is None else self.share)


def changed_shares(diff: Diff) -> Shares:
    """Returns the share of changed chunks of the leaves that two checkpoints do not
    have in common."""
    shares: dict[str, float | None] = {}
    for one in diff.differences:
        match one.kind:
            case "unknown":
                shares[one.key] = None
            case "content" if one.chunk_count:
                shares[one.key] = one.changed_chunk_count / one.chunk_count
            case _:
                shares[one.key] = 1.0
    return shares


def layer_changes(
    leaves: Iterable[LeafInfo], changed: Shares, *, most: int = MOST_GROUPS
) -> list[LayerChange]:
    """Returns the layers with the most changed bytes in natural order, and the others
    as one.

    Args:
        leaves: Leaves of the later checkpoint.
        changed: Shares of changed chunks by key.
        most: Maximum number of layers.
    """
    by_key = {leaf.key: leaf for leaf in leaves}
    groups = defaultdict[str, list[LeafInfo]](list)
    for key, layer in layers_of(by_key).items():
        groups[layer].append(by_key[key])
    layers = [_layer(name, found, changed) for name, found in groups.items()]
    layers.sort(key=lambda one: (-one.changed_bytes, natural_key(one.name)))
    shown, left = layers[:most], layers[most:]
    shown.sort(key=lambda one: natural_key(one.name))
    if left:
        rest = [leaf for one in left for leaf in groups[one.name]]
        shown.append(_layer(f"{len(left):,} other", rest, changed))
    return shown


def layer_bars(
    leaves: Iterable[LeafInfo],
    changed: Shares,
    *,
    most: int = MOST_GROUPS,
    width: float = 720,
) -> str:
    """Returns the bars as SVG.

    Args:
        leaves: Leaves of the later checkpoint.
        changed: Shares of changed chunks by key.
        most: Maximum number of layers with a bar of their own.
        width: Width in pixels.
    """
    layers = layer_changes(leaves, changed, most=most)
    if not layers:
        return note("no leaves", width=width)
    names = [fitted(_shown(one.name), _NAME) for one in layers]
    left = max(map(text_width, names)) + 10
    body = list[str]()
    for row, (layer, name) in enumerate(zip(layers, names, strict=True)):
        body += _bar(layer, name, row * _ROW, left, width)
    total = sum(one.size_bytes for one in layers)
    known = sum(one.changed_bytes for one in layers if one.share is not None)
    label = (
        f"changed bytes by layer: {size_text(round(known))} of {size_text(total)} in "
        f"{count_text(len(layers), 'row')}"
    )
    height = len(layers) * _ROW + 4
    return document(body, label=label, width=width, height=height)


def _shown(name: str) -> str:
    """Returns the name of a layer; '' for a tree that is a single leaf."""
    return name or "''"


def _layer(name: str, leaves: Sequence[LeafInfo], changed: Shares) -> LayerChange:
    return LayerChange(
        name=name,
        leaf_count=len(leaves),
        size_bytes=sum(leaf.size_bytes for leaf in leaves),
        share=changed_share(leaves, changed),
    )


def _bar(
    layer: LayerChange, name: str, top: float, left: float, width: float
) -> Iterator[str]:
    """Yields the name of a layer, its bar and its numbers."""
    y, length = top + _ROW / 2 + 4, width - left - _REMARK
    share = "not known" if layer.share is None else percent(layer.share)
    title = (
        f"{printable(_shown(layer.name))}\n{count_text(layer.leaf_count, 'leaf')}, "
        f"{size_text(layer.size_bytes)}\n{share} changed"
    )
    bar: Style = {"x": left, "y": top + (_ROW - _BAR) / 2, "height": _BAR, "rx": 2.0}
    yield words(name, left - 10, y, text_anchor="end")
    yield element(
        "rect", title=title, **bar, width=length, fill="currentColor", fill_opacity=0.12
    )
    if layer.share is None:
        yield element("rect", **bar, width=length, fill=GREY, pointer_events="none")
    elif layer.share:
        filled = max(length * min(layer.share, 1.0), 2.0)
        colour = CHANGES[3][1]
        yield element("rect", **bar, width=filled, fill=colour, pointer_events="none")
    right = left + length
    yield words(share, right + 70, y, text_anchor="end")
    size = size_text(layer.size_bytes)
    yield words(f"of {size}", right + 76, y, fill_opacity=0.7)
