"""The classes that a config may have objects of: those that its own class names.

A stored config names the classes of its parts. What such a name may lead to is decided
by the caller's code alone: annotations and defaults of the config's class and of its
constructor, ``sub_configs`` as transformers has them, what derives from any of these,
and what they name in turn. Nothing is imported, and no name is walked.
"""

import dataclasses
import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

from storesvc_client.trees.structure.limits import JSON

__all__ = [
    "derived_classes",
    "enumerations",
    "name_of_class",
    "named_classes",
    "setting_classes",
]

_MAX_CLASSES: Final = 5000
"""Classes that one config leads to."""

_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")

_FOREIGN: Final = frozenset(
    {"abc", "builtins", "collections", "dataclasses", "types", "typing"}
)
"""Modules whose classes hold no settings, or stand for themselves."""


def setting_classes(config_class: type[Any]) -> Mapping[str, type[Any]]:
    """Returns the classes of a config and of its parts, by ``module:qualname``."""
    found: dict[str, type[Any]] = {}
    left = [config_class]
    while left and len(found) < _MAX_CLASSES:
        cls = left.pop()
        name = name_of_class(cls)
        if name in found or not _may_hold_settings(cls):
            continue
        found[name] = cls
        left += derived_classes(cls)
        if not issubclass(cls, enum.Enum):
            left += _named_by(cls)
    return types.MappingProxyType(found)


def name_of_class(cls: type[Any]) -> str:
    """Returns ``module:qualname`` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def enumerations(
    document: JSON, config_class: type[Any]
) -> Mapping[str, type[enum.Enum]]:
    """Returns the enumerations that a document names, of the packages that a config's
    class and its bases are of.

    Configs annotate a setting as a text, and hold a member that equals it. To look one
    up runs no code: its module must be imported already.

    Args:
        document: The config, encoded.
        config_class: Its class.
    """
    packages = {base.__module__.partition(".")[0] for base in config_class.__mro__}
    found = {}
    for name in _enumeration_names(document):
        module, _, qualname = name.partition(":")
        cls = vars(sys.modules.get(module, types)).get(qualname)
        is_theirs = module.partition(".")[0] in packages - _FOREIGN
        if is_theirs and isinstance(cls, type) and issubclass(cls, enum.Enum):
            found[name] = cls
    return found


def _enumeration_names(document: JSON) -> set[str]:
    names = set()
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            if isinstance(value.get("enum"), str):
                names.add(value["enum"])
            left += value.values()
        elif isinstance(value, list):
            left += value
    return names


def derived_classes(cls: type[Any]) -> list[type[Any]]:
    """Returns the classes that derive from one directly."""
    return [] if cls is object else type.__subclasses__(cls)


def named_classes(annotation: Any, scope: Mapping[str, Any]) -> Iterator[type[Any]]:
    """Yields the classes that an annotation names.

    Args:
        annotation: Of an attribute or parameter; of texts, those that name something of
            the scope.
        scope: The globals of the module that it stands in.
    """
    left = [annotation]
    for _ in range(_MAX_CLASSES):
        if not left:
            return
        part = left.pop()
        if isinstance(part, str):
            left += _evaluated(part, scope)
        elif isinstance(part, typing.ForwardRef):
            left += _evaluated(part.__forward_arg__, scope)
        elif isinstance(part, typing.TypeVar):
            left += [part.__bound__, *part.__constraints__]
        elif typing.get_origin(part) is typing.Literal:
            continue
        elif typing.get_origin(part) is not None or isinstance(part, types.UnionType):
            left += [typing.get_origin(part), *typing.get_args(part)]
        elif isinstance(part, type):
            yield part


def _evaluated(text: str, scope: Mapping[str, Any]) -> list[Any]:
    """The objects that the names in an annotation text refer to, within the scope.

    The text is the caller's own code; it is not evaluated, as it may name what is only
    imported for type checkers.
    """
    found = []
    for dotted in _DOTTED.findall(text):
        first, *rest = dotted.split(".")
        value = scope.get(first)
        for name in rest:
            value = getattr(value, name, None)
        found.append(value)
    return [value for value in found if value is not None and value is not text]


def _named_by(cls: type[Any]) -> Iterator[type[Any]]:
    """The classes that a class names: of attributes, arguments, parts and defaults."""
    for base in cls.__mro__:
        scope = vars(sys.modules.get(base.__module__, types))
        for annotation in inspect.get_annotations(base).values():
            yield from named_classes(annotation, scope)
        init = base.__dict__.get("__init__")
        if isinstance(init, types.FunctionType):
            for annotation in init.__annotations__.values():
                yield from named_classes(annotation, init.__globals__)
            for default in [*(init.__defaults__ or ()), *_kwdefaults(init)]:
                yield type(default)
        for value in base.__dict__.values():
            yield from _classes_of(value)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            for default in (field.default, field.default_factory):
                yield from _classes_of(default)


def _classes_of(value: Any) -> Iterator[type[Any]]:
    if isinstance(value, dict):
        yield from (part for part in value.values() if isinstance(part, type))
    elif isinstance(value, type):
        yield value
    else:
        yield type(value)


def _kwdefaults(init: types.FunctionType) -> list[Any]:
    return list((init.__kwdefaults__ or {}).values())


def _may_hold_settings(cls: type[Any]) -> bool:
    """Whether objects of a class can be settings: never what has a say when it is made
    or ends, such as a process or a file."""
    if cls.__module__ in _FOREIGN or inspect.isabstract(cls):
        return False
    if issubclass(cls, enum.Enum):
        return True
    has_say = {"__del__", "__call__"}
    return all(has_say.isdisjoint(vars(base)) for base in cls.__mro__)
