"""Texts of a document's values, for comparisons and messages.

A value has one text if that is short; otherwise it has parts.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from storesvc_client.trees.structure.limits import JSON
from storesvc_client.trees.structure.plain import items_of, pairs_of, tag_of
from storesvc_client.trees.structure.structure_errors import (
    Place,
    escaped,
    shown,
    structure_error,
)
from storesvc_client.trees.structure.values import MAPPINGS

MAX_TEXT: Final = 200
"""Maximum characters of one text; a longer value is described by its parts."""


ARRAY: Final = "an array "
DIGEST: Final = " of digest "
"""Start of an array's text, and the text in front of its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A value that has parts."""

    title: str
    """Text of the value's own row. It has no count of parts if an absent part equals
    None."""
    pairs: list[tuple[Any, Any]]
    name: str
    """Text in front of the parts if they are shown on one line."""


class Texts:
    """Cached texts of the values of one document, which must stay alive."""

    def __init__(self) -> None:
        # Without the cache, a deeply nested value would be rendered once per level.
        self._known: dict[int, str | None] = {}

    def text_of(self, value: JSON, place: Place) -> str | None:
        """Returns a value as one text, or None if it needs parts.

        Raises:
            StructureError: The value is malformed.
        """
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise structure_error(place, "a value", shown(value))
            return short(ascii(value))
        if id(value) not in self._known:
            self._known[id(value)] = self._text(value, place)
        return self._known[id(value)]

    def _text(self, value: dict[str, JSON], place: Place) -> str | None:
        tag = tag_of(value, _TEXTS)
        if tag is not None:
            return _TEXTS[tag](value, place)
        if tag_of(value, PARTS) is None:
            raise structure_error(place, "a value", shown(value))
        return self._line(value, place)

    def _line(self, value: dict[str, JSON], place: Place) -> str | None:
        """Returns the parts on one line; None if it is too long or a part has no
        text."""
        if tag_of(value, _MANY_LINES):
            return None
        parts = parts_of(value, place)
        texts: list[str] = []
        length = len(parts.name)
        for key, item in parts.pairs:
            text = self.text_of(item, place)
            if text is None:
                return None
            texts.append(text if isinstance(key, int) else f"{shown(key)}={text}")
            length += len(texts[-1]) + 2
            if length > MAX_TEXT:
                return None
        return f"{parts.name}({', '.join(texts)})"


def parts_of(value: JSON, place: Place) -> Parts:
    """Returns the parts of a value that has no text of its own; see ``text_of``."""
    tag = tag_of(value, PARTS)
    assert tag is not None  # every other value has a text
    return PARTS[tag](value, place)


def short(text: str) -> str:
    """Returns a text shortened for messages, with a digest that keeps it distinct."""
    plain = escaped(text[: MAX_TEXT + 1])
    if len(plain) <= MAX_TEXT:
        return plain
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{plain[: MAX_TEXT // 2]}... ({len(text)} characters, {digest[:16]})"


def _name(value: JSON, place: Place) -> str:
    if not isinstance(value, str):
        raise structure_error(place, "a name", shown(value))
    return value.replace(":", ".")


def _named_text(tag: str) -> Callable[[JSON, Place], str]:
    return lambda value, place: short(_name(value[tag], place))


def _enum_text(value: JSON, place: Place) -> str:
    if isinstance(value.get("value"), str):  # the form that JSON keeps
        return short(ascii(value["value"]))
    member = _name(value.get("member"), place)
    return short(f"{_name(value['enum'], place)}.{member}")


def _scalar_text(value: JSON, place: Place) -> str:
    data = _name(value.get("data"), place)
    return short(f"{_name(value['scalar'], place)} of bytes {data}")


def _numbered(items: JSON, place: Place) -> list[tuple[Any, Any]]:
    return list(enumerate(items_of(items, place)))


def _sequence(tag: str, title: str, name: str) -> Callable[[JSON, Place], Parts]:
    def parts(value: JSON, place: Place) -> Parts:
        pairs = _numbered(value[tag], place)
        return Parts(title=f"{title} of {len(pairs)}", pairs=pairs, name=name)

    return parts


def _mapping(tag: str) -> Callable[[JSON, Place], Parts]:
    return lambda value, place: _titled("a dict", pairs_of(value[tag], place))


def _ordered(tag: str) -> Callable[[JSON, Place], Parts]:
    def parts(value: JSON, place: Place) -> Parts:
        pairs = pairs_of(value[tag], place)
        keys = [
            key if isinstance(key, str) else json.dumps(key, sort_keys=True)
            for key, item in pairs
            if item is not None
        ]
        return _titled(short(f"a dict in the order {', '.join(keys)}"), pairs)

    return parts


def _titled(title: str, pairs: list[tuple[Any, Any]]) -> Parts:
    return Parts(title=title, pairs=pairs, name=title)


def _call(value: JSON, place: Place) -> Parts:
    name = short(_name(value["call"], place))
    return _titled(name, pairs_of(value.get("arguments"), place))


def _linen(value: JSON, place: Place) -> Parts:
    name = short(_name(value["linen"], place))
    return _titled(name, pairs_of(value.get("fields"), place))


def _named_tuple(value: JSON, place: Place) -> Parts:
    name = short(_name(value["named_tuple"], place))
    return _titled(name, _numbered(value.get("items"), place))


def _partial(value: JSON, place: Place) -> Parts:
    args = [value["partial"], *items_of(value.get("args"), place)]
    pairs = [*enumerate(args), *pairs_of(value.get("keywords"), place)]
    title = f"partial of {len(args)} arguments"
    return Parts(title=title, pairs=pairs, name="partial")


def _opaque(value: JSON, place: Place) -> Parts:
    described = value["opaque"]
    if not isinstance(described, dict):
        raise structure_error(place, "a description", shown(described))
    end = " (cut short)" if described.get("cut") else ""
    if "digest" in described:
        end += f"{DIGEST}{_name(described['digest'], place)[:16]}"
    parts = pairs_of(described.get("fields", []), place)
    if "array" in described:
        shape = ", ".join(map(shown, items_of(described.get("shape"), place)))
        title = f"{ARRAY}{shown(described['array'])} ({shape}){end}"
        return _titled(short(title), parts)
    name = _name(described.get("function") or described.get("class"), place)
    # A wrapper often has the name of the function that it wraps.
    title = short(f"described {name}{end}")
    return _titled(title, parts)


_TEXTS: Final[dict[str, Callable[[JSON, Place], str]]] = {
    "bytes": lambda value, place: short(f"bytes {_name(value['bytes'], place)}"),
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
    "frozenset": _sequence("frozenset", "a set", "a set"),
    "linen": _linen,
    "list": _sequence("list", "a sequence", ""),
    "named_tuple": _named_tuple,
    "opaque": _opaque,
    "partial": _partial,
    "set": _sequence("set", "a set", "a set"),
    "spec": _sequence("spec", "PartitionSpec", "PartitionSpec"),
    "tuple": _sequence("tuple", "a sequence", ""),
    **{tag: _mapping(tag) for tag in MAPPINGS},
    **{tag: _ordered(tag) for tag in ("ordered_dict", "state_axes")},
}
"""Parts of a value, by tag."""

_MANY_LINES: Final = frozenset({"dict", "linen", "opaque", *MAPPINGS})
