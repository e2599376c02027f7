"""What objects hold: the content that a description of them is made of.

An object that is described without its content would equal any other of its class. What
is no setting stays out: addresses, and what was computed when first asked for.
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
"""A key that no attribute has."""

_MAX_TEXT: Final = 1000
"""Characters of one text; a digest stands for a longer one."""

_MAX_PLAIN: Final = 100_000
"""Values of which a digest is made."""


def _items_of(value: dict[Any, Any]) -> Any:
    """The dict that a subclass is; of a dict itself, which is too much for a document,
    its pairs."""
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
"""The content of objects of a class, and of classes that derive from it."""


def fields_of(value: Any) -> Mapping[str, Any]:
    """Returns the content of an object by name; nothing if it keeps it to itself."""
    found = _settings(value)
    if found is not None:
        return found
    if isinstance(value, (types.ModuleType, os.PathLike)):  # the rest is a cache
        return _content(value)
    fields = {**_content(value), **_attributes(value)}
    return fields or _words(value)


def is_cached(cls: type[Any], name: str) -> bool:
    """Returns whether an attribute is what a class computes when first asked for it."""
    return isinstance(
        inspect.getattr_static(cls, name, None), functools.cached_property
    )


def slots_of(cls: type[Any], value: Any = None) -> list[str]:
    """Returns the names of the slots of a class, and with an object of it only those
    that are set."""
    return [
        name
        for base in cls.__mro__
        for name, descriptor in vars(base).items()
        if isinstance(descriptor, types.MemberDescriptorType)
        and "__slots__" in vars(base)
        and (value is None or hasattr(value, name))
    ]


def bounded(text: str) -> str:
    """Returns a text, or what tells a long one from others."""
    if len(text) <= _MAX_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{len(text)} characters of digest {digest}"


def digest_of(value: Any) -> str | None:
    """Returns a digest of plain data; None where it is something else, or huge."""
    left = _MAX_PLAIN

    def encode(part: Any) -> JSON:
        nonlocal left
        left -= 1
        encoded = NOT_PLAIN if left < 0 else encode_plain(part, encode)
        if encoded is NOT_PLAIN:
            raise ValueError("no plain data")
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
        # what was computed when first asked for says nothing, and is not always there
        found |= {str(name): own[name] for name in own if not is_cached(cls, str(name))}
    return found


def _words(value: Any) -> dict[str, Any]:
    """What an object without attributes says of itself, if that is no address."""
    if hasattr(value, "__dict__"):
        return {}
    try:
        text = repr(value)
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        return {}
    return {} if _has_address(text) else {_VALUE: bounded(text)}


def _has_address(text: str) -> bool:
    return "0x" in text


def _settings(value: Any) -> Mapping[str, Any] | None:
    """What a configuration says of itself, if it does."""
    to_dict = getattr(value, "to_dict", None)
    if not isinstance(to_dict, types.MethodType):
        return None
    try:
        found = to_dict()
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
        return None  # it asks for arguments, or for more than there is
    return found if isinstance(found, Mapping) else None
