"""Finds the classes whose objects a config may contain.

A stored config contains class names. Which classes they may refer to is determined by
the caller's code alone: annotations and defaults of the config's class and constructor,
``sub_configs`` as in transformers, subclasses of these, and the classes that they name
in turn. Nothing is imported, and no name is resolved by attribute access.
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
"""Maximum classes that one config may refer to."""

_DOTTED: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")

_FOREIGN: Final = frozenset(
    {"abc", "builtins", "collections", "dataclasses", "types", "typing"}
)
"""Modules whose classes hold no settings, or are handled separately."""


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
    """Returns the enumerations of a document that are in the packages of a config's
    class.

    Configs may annotate a setting as ``str`` and hold an enumeration member equal to
    it. The lookup runs no code: only modules that are already imported are searched.

    Args:
        document: The encoded config.
        config_class: Class of the config; the packages of its bases count, too.
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
    """Returns the direct subclasses of a class."""
    return [] if cls is object else type.__subclasses__(cls)


def named_classes(annotation: Any, scope: Mapping[str, Any]) -> Iterator[type[Any]]:
    """Yields the classes that an annotation names.

    Args:
        annotation: Annotation of an attribute or parameter; names in a string are
            looked up in ``scope``.
        scope: The globals of the annotation's module.
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
    """Returns the objects that the names in an annotation string refer to.

    The string is the caller's own code. It is not evaluated, because it may name
    objects that are imported for type checkers only.
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
    """Yields the classes of a class's attributes, arguments, parts and defaults."""
    for base in cls.__mro__:
        scope = vars(sys.modules.get(base.__module__, types))
        for annotation in inspect.get_annotations(base).values():
            yield from named_classes(annotation, scope)
        init = base.__dict__.get("__init__")
        if isinstance(init, types.FunctionType):
            for annotation in init.__annotations__.values():
                yield from named_classes(annotation, init.__globals__)
            keyword_defaults = (init.__kwdefaults__ or {}).values()
            for default in [*(init.__defaults__ or ()), *keyword_defaults]:
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


def _may_hold_settings(cls: type[Any]) -> bool:
    """Returns whether objects of a class can be settings.

    Excludes classes that run code when an object is called or finalized, such as
    processes and files.
    """
    if cls.__module__ in _FOREIGN or inspect.isabstract(cls):
        return False
    if issubclass(cls, enum.Enum):
        return True
    has_say = {"__del__", "__call__"}
    return all(has_say.isdisjoint(vars(base)) for base in cls.__mro__)
