"""Compares two documents, setting by setting.

The rows of a document describe a model, one setting each, by path::

    layers/0              flax.nnx.LayerNorm
    layers/0/epsilon      1e-06
    layers/0/scale        flax.nnx.Param

Rows exclude settings of the mesh and versions of the software that wrote the document.
A tuple equals a list, and a string equals an enumeration member with that value, so a
configuration is unchanged by a round trip through JSON. None equals an absent setting,
because newer releases of flax add attributes to their layers.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

from storesvc_client.trees.structure.descriptions import IGNORED, named_dtype
from storesvc_client.trees.structure.difference_texts import ABSENT, Difference
from storesvc_client.trees.structure.limits import JSON, check_json
from storesvc_client.trees.structure.plain import pairs_of, tag_of
from storesvc_client.trees.structure.structure_errors import shown, structure_error
from storesvc_client.trees.structure.value_texts import (
    ARRAY,
    DIGEST,
    Texts,
    parts_of,
    short,
)

_PLACE: Final = "the structure"
ROOT: Final = "the module itself"
_NONE: Final = repr(None)

_MAX_PATH: Final = 240
"""Maximum characters of a path; a longer one is shortened to its ends and a digest."""

_MAX_ROWS: Final = 1 << 28
"""Maximum characters of all rows. A module of 100,000 small layers needs a third."""


def rows(document: JSON) -> dict[str, str]:
    """Returns the settings of a document by path; the root's path is "".

    Raises:
        StructureError: The document is malformed.
    """
    return _read(document, IGNORED).texts


def differences(
    saved: JSON, target: JSON, *, ignore: Iterable[str] = ()
) -> list[Difference]:
    """Returns the differences between two documents; empty if there are none.

    Where one side has nothing, or a module of another class, deeper rows are omitted.

    Args:
        saved: Document of a checkpoint.
        target: Document of the module to compare with.
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

    Args:
        saved: See ``differences``.
        target: See ``differences``.
        ignore: See ``differences``.

    Raises:
        StructureError: A document is malformed.
    """
    ignored = IGNORED | frozenset(ignore)
    ours, theirs = _row_pair(saved, target, ignored)
    common = {path: text for path, text in ours.items() if path in theirs}
    return [
        Difference(path or ROOT, text, theirs[path])
        for path, text in _outermost(common, theirs)
    ]


def fingerprint(document: JSON) -> str:
    """Returns 64 hexadecimal digits that are equal for documents without differences.

    Raises:
        StructureError: The document is malformed.
    """
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
        tag = tag_of(child, _CHILDREN) if isinstance(child, dict) else None
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
            self._add_parts(path, tag, child)

    def _add_parts(self, path: str, tag: str, child: JSON) -> None:
        for key, item in pairs_of(child.get(_CHILDREN[tag], []), path):
            is_value = tag == "variable" or (
                isinstance(item, dict) and "static" in item
            )
            # settings only, never a module of that name
            if is_value and self._is_ignored(key):
                continue
            if tag == "variable":
                self._add_value(_bounded(f"{path}@{_key_text(key)}"), item)
            else:
                self.add_child(_joined(path, _child_key(key)), item)

    def _add_value(self, path: str, value: JSON) -> None:
        """Adds the row of a value, or the rows of its parts."""
        value = named_dtype(value)
        text = self._texts.text_of(value, path)
        if text is not None:
            self._add(path, text)
            return
        parts = parts_of(value, path)
        if tag_of(value, {"opaque"}) and "reference" in value["opaque"]:
            self.references.add(path)
        self._add(path, parts.title)
        for key, item in parts.pairs:
            if not self._is_ignored(key):
                self._add_value(_joined(path, self._value_key(key, path)), item)

    def _add(self, path: str, text: str) -> None:
        own = path
        while own in self.texts:  # for example, keys 1 and "1" in one mapping
            self._repeats[path] = self._repeats.get(path, 0) + 1
            own = f"{path}'{self._repeats[path]}"
        self.texts[own] = text
        self._size += len(own) + len(text)
        if self._size > _MAX_ROWS:
            raise structure_error(_PLACE, f"settings of {_MAX_ROWS} characters", "more")

    def _value_key(self, key: JSON, path: str) -> str:
        text = key if isinstance(key, str) else self._texts.text_of(key, path)
        return _key_text(text or "...")

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
        return f"list of {len(pairs_of(child.get('items', []), path))}"
    return short(name.replace(":", "."))


def _joined(path: str, key: str) -> str:
    return _bounded(f"{path}/{key}") if path else key


def _bounded(path: str) -> str:
    if len(path) <= _MAX_PATH:
        return path
    digest = hashlib.sha256(path.encode()).hexdigest()[:16]
    return f"{path[:100]}...{path[-80:]} ({digest})"


def _child_key(key: JSON) -> str:
    """Returns the text of a child's key.

    The string "0" and the number 0 are different keys in state trees, so it is quoted.
    """
    is_number = isinstance(key, str) and key.lstrip("-").isdecimal()
    return short(f"'{key}'") if is_number else _key_text(key)


def _key_text(key: Any) -> str:
    text = str(key) if isinstance(key, (str, int)) else shown(key)
    return short(text.replace("%", "%25").replace("/", "%2F").replace("@", "%40"))
