"""Texts for people: sizes, times, counts, labels and metrics, dtypes and shapes.

The command line and notebooks show the same texts. Times are in the time zone of this
machine.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import datetime
from shlex import quote
from typing import TYPE_CHECKING, Final, assert_never

if TYPE_CHECKING:
    from storesvc.format.trees import SavedSharding
    from storesvc_client._values.values import ItemInfo, LeafInfo

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
