"""Compares two documents, setting by setting.

The rows of a document describe a model, one setting each, by path::

    layers/0              flax.nnx.LayerNorm
    layers/0/epsilon      1e-06
    layers/0/scale        flax.nnx.Param

Rows exclude settings of the mesh and versions of the software that wrote the document.
A tuple equals a list, and a string equals an enumeration member with that value, so a
configuration is unchanged by a round trip through JSON. None equals an absent setting,
because newer releases of flax add attributes to their layers.

A value has one text if that is short; otherwise it has parts. For messages, differences
that repeat over layers are merged.

>>> places = [f"layers/{layer}/epsilon" for layer in (0, 1, 2)]
>>> each = [Difference(place, "1e-06", "0.001") for place in places]
>>> [str(one) for one in merge_layers(each)]
['layers/{0..2}/epsilon: expected 1e-06 as saved, got 0.001']
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

from storesvc_client.trees.structure.descriptions import EXECUTION, IGNORED, named_dtype
from storesvc_client.trees.structure.encoder import MAPPINGS
from storesvc_client.trees.structure.names import (
    JSON,
    Place,
    check_json,
    escape_text,
    shown,
    structure_error,
)
from storesvc_client.trees.structure.plain import find_tag, parse_items, parse_pairs

ABSENT: Final = "nothing"
"""Text for a value that is missing on one side."""

_NUMBER: Final = re.compile(r"(?<![^/\[])\d+(?![^/@.\[\]])")
"""Part of a path that is the number of a layer or of an item."""

_PART: Final = re.compile(r"[/.@\[\]]+")


class Difference(NamedTuple):
    """One setting that differs."""

    path: str
    """Parts joined by "/"; parts of a config by "." and "[N]"."""
    saved: str
    given: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.saved} as saved, got {self.given}"


_KERNEL: Final = re.compile(r"(.*/)?attention_performer/impl(_decode)?")
"""Path of the attention kernel in EasyDeL's models, which the config selects."""

_CONFIGS: Final = frozenset({"config", "base_config", "text_config", "vision_config"})
"""Attribute names of configs that many modules share."""


_PLACEMENT: Final = frozenset(
    {"out_sharding", "sharding", "sharding_names", "sharding_rules", "mesh"}
    | {"eager_sharding"}
)
"""Metadata of a Variable that say where its value is, which a restore may change."""


def is_execution(difference: Difference) -> bool:
    """Returns whether a difference affects how or where a model is computed, not what
    it computes."""
    _, at, entry = difference.path.rpartition("@")
    if at and _PART.split(entry)[0] in _PLACEMENT:
        return True
    named = not EXECUTION.isdisjoint(_PART.split(difference.path))
    return named or _KERNEL.fullmatch(difference.path) is not None


def merge_configs(differences: Iterable[Difference]) -> list[Difference]:
    """Returns the differences with repeated ones in shared configs merged.

    Each is kept once, at its shortest path.
    """
    kept: dict[tuple[str, str, str], Difference] = {}
    for each in sorted(differences, key=lambda each: (len(each.path), each.path)):
        *above, name = _PART.split(each.path)
        shared = bool(above) and above[-1] in _CONFIGS
        kept.setdefault((name if shared else each.path, each.saved, each.given), each)
    return list(kept.values())


def merge_layers(differences: Iterable[Difference]) -> list[Difference]:
    """Returns the differences with those that repeat over layers merged into one each.

    A group that is not a product of ranges, one per part of the path, is kept
    unchanged.
    """
    groups: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
    for each in differences:
        groups[_NUMBER.sub("{}", each.path), each.saved, each.given].append(each)
    merged: list[Difference] = []
    for (pattern, saved, given), group in groups.items():
        numbers = [tuple(map(int, _NUMBER.findall(each.path))) for each in group]
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        is_whole = prod(map(len, columns)) == len(set(numbers)) == len(group)
        if len(group) == 1 or not is_whole:
            merged += group
            continue
        path = pattern
        for column in columns:
            path = path.replace("{}", _numbers(column), 1)
        merged.append(Difference(path, saved, given))
    return merged


def _numbers(column: list[int]) -> str:
    first, last = column[0], column[-1]
    if len(column) == 1:
        return str(first)
    if column == list(range(first, last + 1)):
        return f"{{{first}..{last}}}"
    return f"{{{','.join(map(str, column))}}}"


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

    def format_value(self, value: JSON, place: Place) -> str | None:
        """Returns a value as one text, or None if it needs parts."""
        if not isinstance(value, dict):
            if isinstance(value, list):
                raise structure_error(place, "a value", shown(value))
            return short(ascii(value))
        if id(value) not in self._known:
            self._known[id(value)] = self._text(value, place)
        return self._known[id(value)]

    def _text(self, value: dict[str, JSON], place: Place) -> str | None:
        tag = find_tag(value, _TEXTS)
        if tag is not None:
            return _TEXTS[tag](value, place)
        if find_tag(value, PARTS) is None:
            raise structure_error(place, "a value", shown(value))
        return self._line(value, place)

    def _line(self, value: dict[str, JSON], place: Place) -> str | None:
        """Returns the parts on one line; None if one has no text, or it is too long."""
        if find_tag(value, _MANY_LINES):
            return None
        parts = list_parts(value, place)
        texts: list[str] = []
        length = len(parts.name)
        for key, item in parts.pairs:
            text = self.format_value(item, place)
            if text is None:
                return None
            texts.append(text if isinstance(key, int) else f"{shown(key)}={text}")
            length += len(texts[-1]) + 2
            if length > MAX_TEXT:
                return None
        return f"{parts.name}({', '.join(texts)})"


def list_parts(value: JSON, place: Place) -> Parts:
    """Returns the parts of a value without a text of its own; see ``format_value``."""
    tag = find_tag(value, PARTS)
    assert tag is not None  # every other value has a text
    return PARTS[tag](value, place)


def short(text: str) -> str:
    """Returns a text shortened for messages, with a digest that keeps it distinct."""
    plain = escape_text(text[: MAX_TEXT + 1])
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


def _number_items(items: JSON, place: Place) -> list[tuple[Any, Any]]:
    return list(enumerate(parse_items(items, place)))


def _sequence(tag: str, title: str, name: str) -> Callable[[JSON, Place], Parts]:
    def parts(value: JSON, place: Place) -> Parts:
        pairs = _number_items(value[tag], place)
        return Parts(title=f"{title} of {len(pairs)}", pairs=pairs, name=name)

    return parts


def _mapping(tag: str) -> Callable[[JSON, Place], Parts]:
    return lambda value, place: _title_pairs("a dict", parse_pairs(value[tag], place))


def _order_parts(tag: str) -> Callable[[JSON, Place], Parts]:
    def parts(value: JSON, place: Place) -> Parts:
        pairs = parse_pairs(value[tag], place)
        keys = [
            key if isinstance(key, str) else json.dumps(key, sort_keys=True)
            for key, item in pairs
            if item is not None
        ]
        return _title_pairs(short(f"a dict in the order {', '.join(keys)}"), pairs)

    return parts


def _title_pairs(title: str, pairs: list[tuple[Any, Any]]) -> Parts:
    return Parts(title=title, pairs=pairs, name=title)


def _named_pairs(tag: str, key: str) -> Callable[[JSON, Place], Parts]:
    return lambda value, place: _title_pairs(
        short(_name(value[tag], place)), parse_pairs(value.get(key), place)
    )


def _named_tuple(value: JSON, place: Place) -> Parts:
    name = short(_name(value["named_tuple"], place))
    return _title_pairs(name, _number_items(value.get("items"), place))


def _partial(value: JSON, place: Place) -> Parts:
    args = [value["partial"], *parse_items(value.get("args"), place)]
    pairs = [*enumerate(args), *parse_pairs(value.get("keywords"), place)]
    title = f"partial of {len(args)} arguments"
    return Parts(title=title, pairs=pairs, name="partial")


def _opaque(value: JSON, place: Place) -> Parts:
    described = value["opaque"]
    if not isinstance(described, dict):
        raise structure_error(place, "a description", shown(described))
    end = " (cut short)" if described.get("cut") else ""
    if "digest" in described:
        end += f"{DIGEST}{_name(described['digest'], place)[:16]}"
    parts = parse_pairs(described.get("fields", []), place)
    if "array" in described:
        shape = ", ".join(map(shown, parse_items(described.get("shape"), place)))
        title = f"{ARRAY}{shown(described['array'])} ({shape}){end}"
        return _title_pairs(short(title), parts)
    name = _name(described.get("function") or described.get("class"), place)
    # A wrapper often has the name of the function that it wraps.
    title = short(f"described {name}{end}")
    return _title_pairs(title, parts)


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
    "call": _named_pairs("call", "arguments"),
    "dict": _mapping("dict"),
    "frozenset": _sequence("frozenset", "a set", "a set"),
    "linen": _named_pairs("linen", "fields"),
    "list": _sequence("list", "a sequence", ""),
    "named_tuple": _named_tuple,
    "opaque": _opaque,
    "partial": _partial,
    "set": _sequence("set", "a set", "a set"),
    "spec": _sequence("spec", "PartitionSpec", "PartitionSpec"),
    "tuple": _sequence("tuple", "a sequence", ""),
    **{tag: _mapping(tag) for tag in MAPPINGS},
    **{tag: _order_parts(tag) for tag in ("ordered_dict", "state_axes")},
}
"""Parts of a value, by tag."""

_MANY_LINES: Final = frozenset({"dict", "linen", "opaque", *MAPPINGS})


_PLACE: Final = "the structure"
ROOT: Final = "the module itself"
_NONE: Final = repr(None)

_MAX_PATH: Final = 240
"""Maximum characters of a path; a longer one is shortened to its ends and a digest."""

_MAX_ROWS: Final = 1 << 28
"""Maximum characters of all rows. A module of 100,000 small layers needs a third."""


def rows(document: JSON) -> dict[str, str]:
    """Returns the settings of a document by path; the root's path is ""."""
    return _read(document, IGNORED).texts


def differences(
    saved: JSON, target: JSON, *, ignore: Iterable[str] = ()
) -> list[Difference]:
    """Returns the differences between two documents; empty if there are none.

    Where one side has nothing, or a module of another class, deeper rows are omitted.

    Args:
        ignore: Names of attributes and settings to skip at any depth.

    Raises:
        StructureError: A document is malformed.
    """
    ignored = IGNORED | frozenset(ignore)
    ours, theirs = _row_pair(saved, target, ignored)
    found = [
        Difference(path or ROOT, text, theirs.get(path, ABSENT))
        for path, text in _outermost(ours, theirs)
    ]
    found += [
        Difference(path or ROOT, ABSENT, text)
        for path, text in _outermost(theirs, ours)
        if path not in ours
    ]
    return found


def common_differences(
    saved: JSON, target: JSON, *, ignore: Iterable[str] = ()
) -> list[Difference]:
    """Returns the differences between two documents among the settings that both have.

    For documents of two releases of flax, which add and rename attributes.
    """
    ignored = IGNORED | frozenset(ignore)
    ours, theirs = _row_pair(saved, target, ignored)
    common = {path: text for path, text in ours.items() if path in theirs}
    return [
        Difference(path or ROOT, text, theirs[path])
        for path, text in _outermost(common, theirs)
    ]


def fingerprint(document: JSON) -> str:
    """Returns 64 hexadecimal digits, equal for documents without differences."""
    digest = hashlib.sha256()
    # By path, because the order of a document is no setting.
    for row in sorted(rows(document).items()):
        if row[1] != _NONE:
            digest.update(json.dumps(row).encode())
    return digest.hexdigest()


def _row_pair(
    saved: JSON, target: JSON, ignored: frozenset[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the rows of both, without rows below a reference in either of them."""
    ours, theirs = _read(saved, ignored), _read(target, ignored)
    references = ours.references | theirs.references
    if not references:
        return ours.texts, theirs.texts
    first, second = (
        {path: text for path, text in texts.items() if not _is_below(path, references)}
        for texts in (ours.texts, theirs.texts)
    )
    return first, second


def _is_below(path: str, references: set[str]) -> bool:
    end = path.find("/")
    while end >= 0:
        if path[:end] in references:
            return True
        end = path.find("/", end + 1)
    return False


def _read(document: JSON, ignored: frozenset[str]) -> "_Rows":
    check_json(document, _PLACE)
    if not isinstance(document, dict):
        raise structure_error(_PLACE, "a document", shown(document))
    found = _Rows(ignored)
    found.add_child("", document.get("root"))
    return found


def _outermost(
    these: dict[str, str], those: dict[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields the rows that the others lack, without the rows below them."""
    above: str | None = None
    for path, text in these.items():
        if above is not None and path.startswith((f"{above}/", f"{above}@")):
            continue
        if not _is_same(those.get(path, _NONE), text):
            above = path
            yield path, text
            if not path:
                return


def _is_same(text: str, other: str) -> bool:
    """Returns whether two texts describe the same value.

    The description of an array on a device has no digest, that of a NumPy array has
    one. The same value can be either before and after a save.
    """
    if text == other:
        return True
    short, long = sorted((text, other), key=len)
    return short.startswith(ARRAY) and long.startswith(f"{short}{DIGEST}")


class _Rows:
    """Rows of one document, in document order."""

    def __init__(self, ignored: frozenset[str]) -> None:
        self.texts: dict[str, str] = {}
        self.references: set[str] = set()
        """Paths of modules that are described elsewhere in the document."""
        self._ignored = ignored
        self._paths: dict[int, str] = {}
        self._texts = Texts()
        self._repeats: dict[str, int] = {}
        self._size = 0

    def add_child(self, path: str, child: JSON) -> None:
        """Adds the rows of a module, a container or their contents."""
        tag = find_tag(child, _CHILDREN) if isinstance(child, dict) else None
        if tag is None:
            raise structure_error(
                path or _PLACE, "a module or a part of one", shown(child)
            )
        if tag == "static":
            self._add_value(path, child["static"])
        elif tag == "ref":
            self._add(path, f"the same as {self._first(path, child['ref'])}")
        else:
            self._remember(path, child)
            self._add(path, _title(path, tag, child))
            for key, item in parse_pairs(child.get(_CHILDREN[tag], []), path):
                is_metadata = tag == "variable"
                is_static = isinstance(item, dict) and "static" in item
                # settings only, never a module of that name
                if (is_metadata or is_static) and self._is_ignored(key):
                    continue
                if is_metadata:
                    self._add_value(_bound_path(f"{path}@{_key_text(key)}"), item)
                else:
                    self.add_child(_join_path(path, _child_key(key)), item)

    def _add_value(self, path: str, value: JSON) -> None:
        """Adds the row of a value, or the rows of its parts."""
        value = named_dtype(value)
        text = self._texts.format_value(value, path)
        if text is not None:
            self._add(path, text)
            return
        parts = list_parts(value, path)
        if find_tag(value, {"opaque"}) and "reference" in value["opaque"]:
            self.references.add(path)
        self._add(path, parts.title)
        for key, item in parts.pairs:
            if self._is_ignored(key):
                continue
            name = key if isinstance(key, str) else self._texts.format_value(key, path)
            self._add_value(_join_path(path, _key_text(name or "...")), item)

    def _add(self, path: str, text: str) -> None:
        own = path
        while own in self.texts:  # for example, keys 1 and "1" in one mapping
            self._repeats[path] = self._repeats.get(path, 0) + 1
            own = f"{path}'{self._repeats[path]}"
        self.texts[own] = text
        self._size += len(own) + len(text)
        if self._size > _MAX_ROWS:
            raise structure_error(_PLACE, f"settings of {_MAX_ROWS} characters", "more")

    def _is_ignored(self, key: JSON) -> bool:
        return isinstance(key, str) and key in self._ignored

    def _remember(self, path: str, child: JSON) -> None:
        index = child.get("index")
        if index is not None:
            if type(index) is not int:
                raise structure_error(path or _PLACE, "an index", shown(index))
            self._paths[index] = path

    def _first(self, path: str, index: JSON) -> str:
        if type(index) is not int or index not in self._paths:
            raise structure_error(path or _PLACE, "an earlier index", shown(index))
        return self._paths[index] or ROOT


_CHILDREN: Final = {
    "container": "items",
    "leaf": "",
    "node": "attributes",
    "ref": "",
    "static": "",
    "variable": "metadata",
}
"""Key of a child's parts, by its tag."""


def _title(path: str, tag: str, child: dict[str, JSON]) -> str:
    name = child[tag]
    if tag == "leaf":
        return "an array"
    if isinstance(name, dict):
        name = name.get("named_tuple") or next(iter(name.values()), None)
        name = name.get("class") if isinstance(name, dict) else name
    if not isinstance(name, str):
        raise structure_error(path or _PLACE, "a name", shown(name))
    if tag == "container" and name in {"list", "tuple"}:
        # A list that went through JSON may have been a tuple.
        return f"list of {len(parse_pairs(child.get('items', []), path))}"
    return short(name.replace(":", "."))


def _join_path(path: str, key: str) -> str:
    return _bound_path(f"{path}/{key}") if path else key


def _bound_path(path: str) -> str:
    if len(path) <= _MAX_PATH:
        return path
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    return f"{path[:100]}...{path[-80:]} ({digest})"


def _child_key(key: JSON) -> str:
    """Returns the text of a child's key; quotes "0", which is not the number 0."""
    is_number = isinstance(key, str) and key.lstrip("-").isdecimal()
    return short(f"'{key}'") if is_number else _key_text(key)


def _key_text(key: Any) -> str:
    text = str(key) if isinstance(key, (str, int)) else shown(key)
    return short(text.replace("%", "%25").replace("/", "%2F").replace("@", "%40"))
