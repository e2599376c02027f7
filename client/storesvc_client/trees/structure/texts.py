"""Values of a document in words, for comparing and for messages.

A value has one text, if a short one says all; else it has parts.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from storesvc_client.trees.structure.limits import JSON
from storesvc_client.trees.structure.plain import items_of, pairs_of, tag_of
from storesvc_client.trees.structure.refusals import Place, refusal, shown
from storesvc_client.trees.structure.values import MAPPINGS

MAX_TEXT: Final = 400
"""Characters of one text; a longer value is told by its parts."""

Parts: TypeAlias = tuple[str, list[tuple[Any, Any]]]
"""A title, and the parts by key."""


def text_of(value: JSON, place: Place) -> str | None:
    """Returns a value as one text; None if it needs parts.

    Raises:
        StructureError: The value is malformed.
    """
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise refusal(place, "a value", shown(value))
        return _short(ascii(value))
    tag = tag_of(value, _TEXTS)
    if tag is not None:
        return _TEXTS[tag](value, place)
    if tag_of(value, PARTS) is None:
        raise refusal(place, "a value", shown(value))
    return _line(value, place)


def parts_of(value: JSON, place: Place) -> Parts:
    """Returns the parts of a value that has no text of its own; raises as it."""
    tag = tag_of(value, PARTS)
    assert tag is not None  # all else has a text
    return PARTS[tag](value, place)


def _short(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text[: MAX_TEXT // 2]}... ({len(text)} characters, {digest[:16]})"


def _line(value: JSON, place: Place) -> str | None:
    """The parts on one line; None if that is long, or a part has no text.

    It stops where the line is full: a value nested deeply is tried at each level.
    """
    if tag_of(value, _MANY_LINES):
        return None
    title, parts = parts_of(value, place)
    texts: list[str] = []
    length = len(title)
    for key, item in parts:
        text = text_of(item, place)
        if text is None:
            return None
        texts.append(text if isinstance(key, int) else f"{shown(key)}={text}")
        length += len(texts[-1]) + 2
        if length > MAX_TEXT:
            return None
    name = "" if title in _UNNAMED else title
    return f"{name}({', '.join(texts)})"


def _name(value: JSON, place: Place) -> str:
    if not isinstance(value, str):
        raise refusal(place, "a name", shown(value))
    return value.replace(":", ".")


def _named_text(tag: str) -> Callable[[JSON, Place], str]:
    return lambda value, place: _short(_name(value[tag], place))


def _enum_text(value: JSON, place: Place) -> str:
    if isinstance(value.get("value"), str):  # what JSON leaves of it
        return _short(ascii(value["value"]))
    member = _name(value.get("member"), place)
    return _short(f"{_name(value['enum'], place)}.{member}")


def _scalar_text(value: JSON, place: Place) -> str:
    data = _name(value.get("data"), place)
    return _short(f"{_name(value['scalar'], place)} of bytes {data}")


def _numbered(items: JSON, place: Place) -> list[tuple[Any, Any]]:
    return list(enumerate(items_of(items, place)))


def _sequence(tag: str, title: str) -> Callable[[JSON, Place], Parts]:
    return lambda value, place: (title, _numbered(value[tag], place))


def _mapping(tag: str) -> Callable[[JSON, Place], Parts]:
    return lambda value, place: ("a dict", pairs_of(value[tag], place))


def _call(value: JSON, place: Place) -> Parts:
    return _name(value["call"], place), pairs_of(value.get("arguments"), place)


def _linen(value: JSON, place: Place) -> Parts:
    return _name(value["linen"], place), pairs_of(value.get("fields"), place)


def _named_tuple(value: JSON, place: Place) -> Parts:
    return _name(value["named_tuple"], place), _numbered(value.get("items"), place)


def _partial(value: JSON, place: Place) -> Parts:
    args = [value["partial"], *items_of(value.get("args"), place)]
    return "partial", [*enumerate(args), *pairs_of(value.get("keywords"), place)]


def _opaque(value: JSON, place: Place) -> Parts:
    described = value["opaque"]
    if not isinstance(described, dict):
        raise refusal(place, "a description", shown(described))
    if "array" in described:
        shape = ", ".join(map(shown, items_of(described.get("shape"), place)))
        return f"an array {shown(described['array'])} ({shape})", []
    name = _name(described.get("function") or described.get("class"), place)
    return name, pairs_of(described.get("fields", []), place)


_TEXTS: Final[dict[str, Callable[[JSON, Place], str]]] = {
    "bytes": lambda value, _: _short(f"bytes {shown(value['bytes'])}"),
    "class": _named_text("class"),
    "dtype": _named_text("dtype"),
    "ellipsis": lambda *_: "...",
    "enum": _enum_text,
    "float": _named_text("float"),
    "function": _named_text("function"),
    "scalar": _scalar_text,
}

PARTS: Final[dict[str, Callable[[JSON, Place], Parts]]] = {
    "call": _call,
    "dict": _mapping("dict"),
    "frozenset": _sequence("frozenset", "a set"),
    "linen": _linen,
    "list": _sequence("list", "a sequence"),
    "named_tuple": _named_tuple,
    "opaque": _opaque,
    "partial": _partial,
    "set": _sequence("set", "a set"),
    "spec": _sequence("spec", "PartitionSpec"),
    "tuple": _sequence("tuple", "a sequence"),
    **{tag: _mapping(tag) for tag in MAPPINGS},
}
"""The values that have parts, by tag."""

_MANY_LINES: Final = frozenset({"dict", "linen", "opaque", *MAPPINGS})
_UNNAMED: Final = frozenset({"a sequence"})
