"""Extracts the content of objects for their descriptions.

Without its content, an object would equal any other object of its class. Addresses and
cached attributes are not settings and are excluded.
"""

import collections
import dataclasses
import decimal
import fractions
import functools
import hashlib
import inspect
import json
import operator
import os
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

from storesvc_client.trees.structure.limits import JSON
from storesvc_client.trees.structure.plain import NOT_PLAIN, encode_plain

_VALUE: Final = "(value)"
"""Key that cannot be an attribute name."""

_MAX_TEXT: Final = 1000
"""Maximum characters of one text; a longer one is replaced by a digest."""

_MAX_PLAIN: Final = 100_000
"""Maximum values that go into a digest."""


def _items_of(value: dict[Any, Any]) -> Any:
    """Returns a dict subclass as a dict, and a plain dict, too large for a document, as
    pairs."""
    pairs = dict.items(value)
    return list(pairs) if type(value) is dict else dict(pairs)


_BY_BASE: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (types.ModuleType, lambda value: value.__name__),
    (re.Pattern, lambda value: (value.pattern, value.flags)),
    (slice, lambda value: (value.start, value.stop, value.step)),
    ((range, complex, decimal.Decimal, fractions.Fraction), repr),
    (os.PathLike, os.fspath),
    (
        (operator.itemgetter, operator.attrgetter, operator.methodcaller),
        lambda value: value.__reduce__()[1],
    ),
    ((bytearray, memoryview), bytes),
    (collections.deque, lambda value: (list(value), value.maxlen)),
    (
        collections.defaultdict,
        lambda value: (dict(dict.items(value)), value.default_factory),
    ),
    (types.MappingProxyType, dict),
    (dict, _items_of),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: list(tuple.__iter__(value))),
    ((set, frozenset), lambda value: sorted(value, key=repr)),
    (str, str.__str__),
    (bytes, lambda value: bytes.__getitem__(value, slice(None))),
    (int, lambda value: bounded(hex(int.__index__(value)))),
    (float, float.__float__),
)
"""Functions that return the content of objects, by base class."""


def fields_of(value: Any) -> Mapping[str, Any]:
    """Returns the content of an object by name; empty if it exposes none."""
    found = _settings(value)
    if found is not None:
        return found
    if isinstance(value, (types.ModuleType, os.PathLike)):  # the rest is a cache
        return _content(value)
    fields = {**_content(value), **_attributes(value)}
    return fields or _words(value)


def is_cached(cls: type[Any], name: str) -> bool:
    """Returns whether an attribute of a class is a cached property."""
    return isinstance(
        inspect.getattr_static(cls, name, None), functools.cached_property
    )


def slots_of(cls: type[Any], value: Any = None) -> list[str]:
    """Returns the names of a class's slots; with an object, only the slots that are
    set."""
    return [
        name
        for base in cls.__mro__
        for name, descriptor in vars(base).items()
        if isinstance(descriptor, types.MemberDescriptorType)
        and "__slots__" in vars(base)
        and (value is None or hasattr(value, name))
    ]


def bounded(text: str) -> str:
    """Returns a text, or its length and digest if it is long."""
    if len(text) <= _MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(text)} characters of digest {digest}"


def digest_of(value: Any) -> str | None:
    """Returns a digest of plain data, or None for other or very large values."""
    left = _MAX_PLAIN

    def encode(part: Any) -> JSON:
        nonlocal left
        left -= 1
        encoded = NOT_PLAIN if left < 0 else encode_plain(part, encode)
        if encoded is NOT_PLAIN:
            raise ValueError("not plain data")
        return encoded

    try:
        text = json.dumps(encode(value), sort_keys=True)
    except (ValueError, RecursionError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _content(value: Any) -> dict[str, Any]:
    for base, content in _BY_BASE:
        if isinstance(value, base):
            return {_VALUE: content(value)}
    return {}


def _attributes(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
    found: dict[str, Any] = {}
    cls = type(value)
    found |= {name: getattr(value, name) for name in slots_of(cls, value)}
    own = getattr(value, "__dict__", None)
    if isinstance(own, Mapping):
        # A cached property is set only after its first use, so it is no setting.
        found |= {str(name): own[name] for name in own if not is_cached(cls, str(name))}
    return found


def _words(value: Any) -> dict[str, Any]:
    """Returns the repr of an object without attributes, unless it has an address."""
    if hasattr(value, "__dict__"):
        return {}
    try:
        text = repr(value)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        return {}
    return {} if "0x" in text else {_VALUE: bounded(text)}


def _settings(value: Any) -> Mapping[str, Any] | None:
    """Returns the settings of a configuration's ``to_dict``, if it has one."""
    to_dict = getattr(value, "to_dict", None)
    if not isinstance(to_dict, types.MethodType):
        return None
    try:
        found = to_dict()
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        return None  # it needs arguments, or attributes that are missing
    return found if isinstance(found, Mapping) else None
