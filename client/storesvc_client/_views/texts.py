"""Texts for people: sizes, times, counts, labels and metrics, dtypes and shapes.

The command line and notebooks show the same texts. Times are in the time zone of this
machine.

JSON of values follows the JSON mapping of protobuf, in storectl's ``--json`` and the
console's ``?json``: times are RFC 3339 in UTC, durations are seconds such as "90s", NaN
and the infinities are the strings "NaN", "Infinity" and "-Infinity"; complex numbers
are [real, imaginary]. Sizes are in bytes.

Texts are ordered as people do: numbers in them by value. Names that differ in a number
have one text, as in a shell.

>>> sorted(["layer_10", "layer_2"], key=natural_key)
['layer_2', 'layer_10']
>>> (series,) = numbered_series(["layer_0", "layer_1", "layer_2", "layer_8"])
>>> series.text, series.indices
('layer_{0..2,8}', (0, 1, 2, 3))

Two rules keep the drawing of a tree short and complete: a node with one child shares a
line with it (``embed/embedding``), and numbered siblings with the same keys, dtypes and
shapes are drawn once, as ``layer_{0..11}``, with their number before their content.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, groupby, pairwise, takewhile
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, TypeAlias, assert_never

if TYPE_CHECKING:
    from storesvc.format.trees import SavedSharding
    from storesvc_client._values.models import ItemInfo, LeafInfo

MICROSECONDS: Final = {
    "day": 86_400_000_000,
    "hour": 3_600_000_000,
    "minute": 60_000_000,
    "second": 1_000_000,
}
"""Units of durations, from the largest."""

_NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def duration_text(length: timedelta) -> str:
    """Returns the text of a duration in the largest unit that divides it."""
    count = length // timedelta(microseconds=1)
    for unit, size in MICROSECONDS.items():
        if count % size == 0:
            return f"{count // size} {unit if count == size else f'{unit}s'}"
    whole, parts = divmod(abs(count), MICROSECONDS["second"])
    sign = "-" if count < 0 else ""
    return f"{sign}{whole}.{parts:06d}".rstrip("0") + " seconds"


def purge_text(size_bytes: int, delay: timedelta | None, option: str) -> str:
    """Returns what deleted checkpoints cost, and the option that changes it.

    Args:
        size_bytes: Bytes that only they use; 0: unknown.
        delay: The purge delay of the run; None: it has none of its own.
        option: The option, such as "purge_delay=".
    """
    size = size_text(size_bytes) if size_bytes else "their bytes"
    length = "3 days" if delay is None else duration_text(delay)
    return f"deleted checkpoints keep {size} for {length}; {option} changes it"


def json_value(value: Any) -> Any:
    """Returns the value as JSON types."""
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in fields(value)}
        return json_value(named)
    match value:
        case Mapping():
            return {str(key): json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case timedelta():
            return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
        case complex():
            return [json_value(value.real), json_value(value.imag)]
        case float() if not math.isfinite(value):
            return _NOT_FINITE[str(value)]
        case None | bool() | int() | float():
            return value
        case _:
            return str(value)


NaturalKey: TypeAlias = tuple[object, ...]
"""A sort key; comparable with others of ``natural_key``."""

_DIGITS: Final = re.compile("([0-9]+)")


def natural_key(text: str) -> NaturalKey:
    """Returns the sort key of a text.

    Numbers are compared by length and digits: no text is converted to an integer, which
    Python rejects for very long ones. A number sorts before a letter.
    """
    pieces = _DIGITS.split(text)
    return (*map(_piece_key, range(len(pieces)), pieces),), text


def _piece_key(index: int, piece: str) -> tuple[int, str]:
    """Returns the key of a piece; digits are at the odd positions of a split."""
    if index % 2 == 0:
        return len(piece) > 0, piece
    digits = piece.lstrip("0")
    return len(digits), digits


_NAME: Final = re.compile(r"(.*?)(0*)([0-9]{1,18})([^0-9]*)", re.DOTALL)
"""A name, whose last number is the third group; without the zeros before it."""

_MOST_RANGES: Final = 4
"""Maximum ranges in the text of a series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Names that differ in a number."""

    indices: tuple[int, ...]
    """Positions of the names among all."""
    text: str
    """Text for all of them, such as "layer_{0..11}"; of a single one, its name."""


def numbered_series(names: Sequence[str]) -> list[Series]:
    """Returns the series of names, in the order of their first ones; a name without a
    number is one of its own.

    Args:
        names: Different names; numbers ascend, as ``natural_key`` sorts them.
    """
    found = [_NAME.fullmatch(name) for name in names]
    # Of 08, 09, 10, the last one has two digits for the same reason as the others.
    padded = {_padding(each) for each in found if each and each[2]}
    members: dict[object, list[int]] = defaultdict(list)
    for at, each in enumerate(found):
        if each is None:
            members[at].append(at)
            continue
        prefix, width, suffix = _padding(each)
        is_padded = (prefix, width, suffix) in padded
        members[prefix, width if is_padded else 0, suffix].append(at)
    return [
        Series(indices=tuple(those), text=_text([names[at] for at in those]))
        for those in members.values()
    ]


_Keys: TypeAlias = list[tuple[list[str], tuple[int, ...]]]
"""Parts and indices of each of some series."""


def numbered_keys(keys: Sequence[str], likeness: Sequence[object]) -> list[Series]:
    """Returns series of keys that differ in numbers of their parts, in the order of
    their first ones; ``tree`` draws such a series as one line.

    Args:
        likeness: A value of each key, which is equal for all of a series.
    """
    found: _Keys = [(key.split("/"), (at,)) for at, key in enumerate(keys)]
    for depth in range(max((len(parts) for parts, _ in found), default=0)):
        alike: dict[object, _Keys] = defaultdict(list)
        for parts, indices in found:
            around = *parts[:depth], None, *parts[depth + 1 :], len(parts) > depth
            alike[around, likeness[indices[0]]].append((parts, indices))
        found = []
        for those in alike.values():
            if len(those) == 1:
                found += those
                continue
            those.sort(key=lambda each: natural_key(each[0][depth]))
            for series in numbered_series([parts[depth] for parts, _ in those]):
                parts = list(those[series.indices[0]][0])
                parts[depth] = series.text
                members = chain.from_iterable(those[at][1] for at in series.indices)
                found.append((parts, tuple(members)))
    found.sort(key=lambda each: min(each[1]))
    return [Series(indices=indices, text="/".join(parts)) for parts, indices in found]


def _padding(found: re.Match[str]) -> tuple[str, int, str]:
    return found[1], len(found[2] + found[3]), found[4]


def _text(names: Sequence[str]) -> str:
    first = _NAME.fullmatch(names[0])
    if len(names) == 1 or first is None:
        return names[0]
    start, end = len(first[1]), len(first[4])
    digits = [name[start : len(name) - end] for name in names]
    return f"{first[1]}{{{','.join(_ranges(digits))}}}{first[4]}"


def _ranges(digits: Sequence[str]) -> Iterator[str]:
    """Yields ranges of ascending numbers; their text stays short."""
    numbers = [int(each) for each in digits]
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and len(numbers) > 2 and (step := steps.pop()) > 1:
        yield f"{digits[0]}..{digits[-1]}..{step}"
        return
    starts = [
        at
        for at, number in enumerate(numbers)
        if at == 0 or number != numbers[at - 1] + 1
    ]
    ends = [at - 1 for at in starts[1:]] + [len(numbers) - 1]
    for first, last in list(zip(starts, ends, strict=True))[:_MOST_RANGES]:
        yield digits[first] if first == last else f"{digits[first]}..{digits[last]}"
    if len(starts) > _MOST_RANGES:
        yield "…"


ENCODED: Final = frozenset({"text", "json", "bytes", "integer"})
"""Values of ``LeafInfo.kind`` of leaves that hold the bytes of an encoded value."""

ABSENT: Final = "-"
"""Text of an empty cell."""

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size_text(size_bytes: int) -> str:
    """Returns a size as text, such as "1.2 GiB"."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    exponent = min((size_bytes.bit_length() - 1) // 10, len(_UNITS))
    return f"{size_bytes / 1024**exponent:.1f} {_UNITS[exponent - 1]}"


def quota_amount_text(quota: str, amount: int) -> str:
    """Returns an amount of the quota of a name, as a size if it is one of bytes."""
    is_size = quota in ("stored_bytes", "bytes_in_flight")
    return size_text(amount) if is_size else f"{amount:,}"


def time_text(time: datetime) -> str:
    """Returns a time in the time zone of this machine."""
    return time.astimezone().isoformat(sep=" ", timespec="seconds")


def count_text(count: int, noun: str) -> str:
    """Returns "1 leaf", "2 leaves"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Returns "leaves" for "leaf"."""
    irregular = {"leaf": "leaves", "process": "processes", "entry": "entries"}
    return irregular.get(noun, f"{noun}s")


def number_text(value: complex | None) -> str:
    """Returns a number as short text; integers in full."""
    match value:
        case None:
            return ABSENT
        case bool() | int():
            return str(value)
        case float() | complex():
            return f"{value:.6g}"
        case _:
            assert_never(value)


def pairs_text(pairs: Mapping[str, str | float]) -> str:
    """Returns labels or metrics in one line, sorted by name."""
    texts = (
        f"{name}={quote(value) if isinstance(value, str) else number_text(value)}"
        for name, value in sorted(pairs.items())
    )
    return " ".join(texts) or ABSENT


def order_metrics(names: Iterable[str]) -> list[str]:
    """Returns names of metrics as they are shown: losses first.

    >>> order_metrics(["accuracy", "train/loss", "loss"])
    ['loss', 'train/loss', 'accuracy']
    """
    return sorted(
        set(names), key=lambda name: (name != "loss", "loss" not in name.lower(), name)
    )


def printable(text: str) -> str:
    """Returns the text with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def json_text(value: object, *, indent: int | None = None) -> str:
    """Returns JSON in Unicode, with unprintable characters escaped, such as those that
    reverse the direction of a line.

    >>> json_text("caf\xe9 \u202e")
    '"caf\xe9 \\\\u202e"'
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1]
        for char in text
    )


def unicode_text(text: str) -> str:
    r"""Returns the text with lone surrogates escaped, which stand for the bytes of a
    name of a file that is no UTF-8.

    >>> unicode_text("caf\xe9-\udce9")
    'café-\\udce9'
    """
    return text.encode(errors="backslashreplace").decode()


def printable_lines(text: str) -> str:
    """Returns the text as ``printable`` does, with its lines and tabs."""
    lines = ("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    return "\n".join(lines)


def key_text(leaf: "LeafInfo") -> str:
    """Returns the key; '' for a tree that is a single leaf."""
    return leaf.key or "''"


def dtype_text(leaf: "LeafInfo") -> str:
    """Returns the dtype; for PRNG keys, their implementation; for encoded values, their
    kind."""
    if leaf.kind in ENCODED:
        return leaf.kind
    return f"key<{leaf.prng_impl}>" if leaf.prng_impl else leaf.dtype


def shape_text(leaf: "LeafInfo") -> str:
    """Returns the shape; for PRNG keys, the shape of the array of keys."""
    return sizes_text(leaf.shape[:-1] if leaf.prng_impl else leaf.shape)


def item_text(item: "ItemInfo") -> str:
    """Returns the kind of an item, such as "json", or "4 x json" of four processes."""
    count = item.process_count
    return item.kind if count is None else f"{count} x {item.kind}"


def value_text(kind: str | None, size_bytes: int | None) -> str:
    """Returns kind and size of an item's value, such as "json, 25 B"."""
    if kind is None or size_bytes is None:
        return ABSENT
    return f"{kind}, {size_text(size_bytes)}"


def sizes_text(sizes: Iterable[int]) -> str:
    """Returns dimensions as text, such as "[256,128]"; "[]" for a scalar."""
    return f"[{','.join(map(str, sizes))}]"


def spec_text(sharding: "SavedSharding | None") -> str:
    """Returns a partition spec as jax prints it, such as P('fsdp', None)."""
    if sharding is None:
        return ABSENT
    axes = (
        repr(names[0] if len(names) == 1 else names) if names else "None"
        for names in sharding.spec
    )
    return f"P({', '.join(axes)})"


def mesh_text(sharding: "SavedSharding | None") -> str:
    """Returns the axes of a mesh and their sizes, such as "fsdp=16 tp=2"."""
    if sharding is None:
        return ABSENT
    axes = zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    return " ".join(f"{name}={size}" for name, size in axes) or ABSENT


Line: TypeAlias = tuple[str, str, str]
"""The drawn name of a node, its content, and its size."""

_Entry: TypeAlias = "tuple[tuple[str, ...], LeafInfo]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A subtree, or a leaf."""

    parts: tuple[str, ...]
    """Path from the parent; several parts where nodes between have no sibling."""
    leaf: "LeafInfo | None"
    children: "tuple[Node, ...]"
    size_bytes: int
    leaf_count: int
    likeness: tuple[object, ...]
    """Value that is equal for subtrees with the same keys, dtypes and shapes."""

    @property
    def name(self) -> str:
        """Path from the parent, as in a key."""
        return "/".join(self.parts) or "''"

    @property
    def content(self) -> str:
        """Content as text, such as "float32[2,3]" or "12 leaves"."""
        if self.leaf is None:
            return count_text(self.leaf_count, "leaf")
        return dtype_text(self.leaf) + shape_text(self.leaf)


def grow(leaves: "Iterable[LeafInfo]") -> tuple[Node, ...]:
    """Returns the top nodes of the tree of these leaves."""
    return _children([(tuple(leaf.key.split("/")), leaf) for leaf in leaves])


def draw(
    nodes: Sequence[Node], *, depth: int | None = None, expand: bool = False
) -> Iterator[Line]:
    """Yields the drawing line by line.

    Args:
        depth: Maximum number of levels; None: all.
    """
    alone = (Group(node=node, name=node.name, count=1) for node in nodes)
    rows = [*alone] if expand else groups(nodes)
    for row in rows:
        last = row is rows[-1]
        yield f"{'└── ' if last else '├── '}{row.name}", row.content, row.size
        if depth != 1:
            below = depth and depth - 1
            inner = draw(row.node.children, depth=below, expand=expand)
            for name, content, size in inner:
                yield f"{'    ' if last else '│   '}{name}", content, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Alike siblings that are drawn once."""

    node: Node
    """The first of them."""
    name: str
    """Name of the row, such as "layer_{0..11}/kernel"."""
    count: int

    @property
    def content(self) -> str:
        """Number and content as text, such as "12 x 3 leaves"."""
        return f"{self._times}{self.node.content}"

    @property
    def size(self) -> str:
        """Number and size as text, such as "12 x 1.2 GiB"."""
        return f"{self._times}{size_text(self.node.size_bytes)}"

    @property
    def _times(self) -> str:
        return "" if self.count == 1 else f"{self.count:,} x "


def _children(entries: Iterable[_Entry]) -> tuple[Node, ...]:
    ordered = sorted(entries, key=lambda entry: [*map(natural_key, entry[0])])
    siblings = groupby(ordered, key=lambda entry: entry[0][0])
    return tuple(_node(list(below)) for _, below in siblings)


def _node(entries: list[_Entry]) -> Node:
    paths = [path for path, _ in entries]
    ends = zip(min(paths), max(paths), strict=False)
    shared = takewhile(lambda pair: pair[0] == pair[1], ends)
    parts = tuple(part for part, _ in shared)
    leaf = entries[0][1] if len(entries) == 1 else None
    children = (
        () if leaf else _children((path[len(parts) :], leaf) for path, leaf in entries)
    )
    below = [(child.parts, child.likeness) for child in children]
    return Node(
        parts=parts,
        leaf=leaf,
        children=children,
        size_bytes=sum(leaf.size_bytes for _, leaf in entries),
        leaf_count=len(entries),
        likeness=(dtype_text(leaf), leaf.shape) if leaf else tuple(below),
    )


def groups(nodes: Sequence[Node]) -> list[Group]:
    """Returns siblings in groups, each of which is drawn once, in the order of the
    first node of each."""
    alike: dict[object, list[Node]] = {}
    for node in nodes:
        alike.setdefault((node.parts[1:], node.likeness), []).append(node)
    first_at = {id(node): at for at, node in enumerate(nodes)}
    found = [
        Group(
            node=those[series.indices[0]],
            name="/".join((series.text, *those[0].parts[1:])) or "''",
            count=len(series.indices),
        )
        for those in alike.values()
        for series in numbered_series([node.parts[0] for node in those])
    ]
    return sorted(found, key=lambda group: first_at[id(group.node)])
