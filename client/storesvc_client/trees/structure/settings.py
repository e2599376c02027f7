"""Encodes configurations as JSON: exactly, or as plain data.

``encode_settings`` keeps objects and enumerations, ``rebuild_settings`` restores them.

In addition to the objects of ``encoder``::

    {"object": "my.models:Config", "fields": [["eps", 1e-06], ...]}
    {"object": "my.models:Sizes", "base": {"dict": [...]}, "fields": []}
    {"ndarray": "float32", "shape": [2], "data": "0000803f00000040"}

An object is stored as its class and its attributes, not as the result of its
``to_dict``: many such methods lose enumerations, tuples and dtypes. It is rebuilt from
the attributes without running its constructor, so nothing is recomputed.

A stored config contains class names. Which classes they may refer to is determined by
the caller's code alone (``setting_classes``): annotations and defaults of the config's
class and constructor, ``sub_configs`` as in transformers, subclasses of these, and the
classes that they name in turn. Nothing is imported, and no name is resolved by
attribute access.

Attributes that no document can hold, such as a mesh, are described, and are missing
from the rebuilt object.

``encode_data`` keeps plain data only, for comparisons. An enumeration member becomes
its value. A value that is not plain becomes ``{"opaque": description}``, which decodes
to an ``Opaque``: code that rebuilds a configuration skips it, code that compares two
uses the description. A ``torch.dtype`` is read as its name, as in ``config.json``.

>>> encode_data({"axes": (1, 2)})
{'dict': [['axes', {'tuple': [1, 2]}]]}
>>> decode_data(encode_data({"axes": (1, 2)}))
{'axes': (1, 2)}
"""

import dataclasses
import enum
import inspect
import re
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import numpy as np
from flax import nnx

from storesvc.format.dtypes import DTYPES
from storesvc_client.trees.structure.descriptions import (
    PLACES,
    is_cached,
    list_slots,
    named_dtype,
)
from storesvc_client.trees.structure.encoder import MAPPINGS, ValueDecoder, ValueEncoder
from storesvc_client.trees.structure.names import (
    JSON,
    Place,
    Table,
    Within,
    check_json,
    iterate_objects,
    shown,
    structure_error,
)
from storesvc_client.trees.structure.plain import (
    NOT_PLAIN,
    PLAIN_TAGS,
    decode_plain,
    encode_plain,
    find_tag,
    parse_items,
    parse_pairs,
)

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
        name = class_path(cls)
        if name in found or not _may_hold_settings(cls):
            continue
        found[name] = cls
        left += derived_classes(cls)
        if not issubclass(cls, enum.Enum):
            left += _named_by(cls)
    return types.MappingProxyType(found)


def class_path(cls: type[Any]) -> str:
    """Returns ``module:qualname`` of a class."""
    return f"{cls.__module__}:{cls.__qualname__}"


def enumerations(
    document: JSON, config_class: type[Any]
) -> Mapping[str, type[enum.Enum]]:
    """Returns the enumerations of a document that are in the packages of a config's
    class.

    Configs may annotate a setting as ``str`` and hold an enumeration member equal to
    it. The lookup runs no code: only modules that are already imported are searched.
    """
    packages = {base.__module__.partition(".")[0] for base in config_class.__mro__}
    found = {}
    for value in iterate_objects(document):
        name = value.get("enum")
        if not isinstance(name, str):
            continue
        module, _, qualname = name.partition(":")
        cls = vars(sys.modules.get(module, types)).get(qualname)
        is_theirs = module.partition(".")[0] in packages - _FOREIGN
        if is_theirs and isinstance(cls, type) and issubclass(cls, enum.Enum):
            found[name] = cls
    return found


def derived_classes(cls: type[Any]) -> list[type[Any]]:
    """Returns the direct subclasses of a class."""
    return [] if cls is object else type.__subclasses__(cls)


def named_classes(annotation: Any, scope: Mapping[str, Any]) -> Iterator[type[Any]]:
    left = [annotation]
    for _ in range(_MAX_CLASSES):
        if not left:
            return
        part = left.pop()
        if isinstance(part, str):
            left += _evaluate_annotation(part, scope)
        elif isinstance(part, typing.ForwardRef):
            left += _evaluate_annotation(part.__forward_arg__, scope)
        elif isinstance(part, typing.TypeVar):
            left += [part.__bound__, *part.__constraints__]
        elif typing.get_origin(part) is typing.Literal:
            continue
        elif typing.get_origin(part) is not None or isinstance(part, types.UnionType):
            left += [typing.get_origin(part), *typing.get_args(part)]
        elif isinstance(part, type):
            yield part


def _evaluate_annotation(text: str, scope: Mapping[str, Any]) -> list[Any]:
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
            yield from _iterate_classes(value)
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            for default in (field.default, field.default_factory):
                yield from _iterate_classes(default)


def _iterate_classes(value: Any) -> Iterator[type[Any]]:
    if isinstance(value, dict):
        yield from (part for part in value.values() if isinstance(part, type))
    elif isinstance(value, type):
        yield value
    else:
        yield type(value)


def _may_hold_settings(cls: type[Any]) -> bool:
    """Returns whether objects of a class can be settings."""
    # Not of classes that run code when an object is called or finalized, such as
    # processes and files.
    if cls.__module__ in _FOREIGN or inspect.isabstract(cls):
        return False
    if issubclass(cls, enum.Enum):
        return True
    has_say = {"__del__", "__call__"}
    return all(has_say.isdisjoint(vars(base)) for base in cls.__mro__)


_PLACE: Final = "the config"
_DATA_PLACE: Final = "data"

_BASES: Final = (dict, list, tuple, set, frozenset, str, int, float)
"""Plain classes that a class of settings may derive from."""

_MAX_ARRAY_BYTES: Final = 1 << 16
"""Maximum bytes of an array in a config; a larger one is described."""

_UNKNOWN_CLASS: Final = (
    "import the module that has it, or give a factory, model=lambda: ..."
)


def encode_settings(value: Any) -> JSON:
    """Returns a config as JSON, with descriptions of parts that no document can
    hold."""
    return _SettingsEncoder().encode(value)


def class_name(document: JSON) -> str | None:
    """Returns the class name of the object in a document, or None for other values."""
    name = document.get("object") if isinstance(document, dict) else None
    return name if isinstance(name, str) else None


def rebuild_settings(document: JSON, classes: Mapping[str, type[Any]]) -> Any:
    """Returns the config of a document.

    Args:
        classes: Allowed classes of objects and enumeration members, by name.
    """
    check_json(document, _PLACE)
    return _SettingsDecoder(classes).decode(document, _PLACE)


def plain_settings(document: JSON) -> JSON:
    """Returns a document of settings as a document of plain data, for comparisons.

    An object becomes a dict of its attributes, an enumeration member its value or its
    name. A value without a plain form is described.
    """
    check_json(document, _PLACE)
    return _plain(document)


def _plain(document: JSON) -> JSON:
    document = named_dtype(document)
    if isinstance(document, list):
        return [_plain(item) for item in document]
    if not isinstance(document, dict) or "opaque" in document:
        return document
    if "object" in document:
        pairs = parse_pairs(document.get("fields", []), _PLACE)
        fields = [[key, _plain(item)] for key, item in pairs]
        base = _plain(document.get("base"))
        if base is None or not fields:
            return {"dict": fields} if base is None else base
        return {"dict": [["(value)", base], *fields]}
    if "enum" in document:
        return document.get("value") or document.get("member")
    if "ndarray" in document:
        return {"opaque": {"array": document["ndarray"], "of": document.get("data")}}
    if "named_tuple" in document:
        return {"tuple": _plain(document.get("items"))}
    mapping = next((tag for tag in MAPPINGS if tag in document), None)
    if mapping is not None:
        return {"dict": _plain(document[mapping])}
    if not any(tag in document for tag in PLAIN_TAGS):
        return {"opaque": document}
    return {key: _plain(value) for key, value in document.items()}


class _SettingsEncoder(ValueEncoder):
    """Encodes objects by their attributes."""

    def encode_object(self, value: Any) -> JSON | None:
        """Returns an object as JSON, or None if only a description can represent it."""
        if isinstance(value, (np.ndarray, jax.Array)):
            return _array(value)
        if not _is_settings(value):
            return super().encode_object(value)
        base = next((base for base in _BASES if isinstance(value, base)), None)
        known = super().encode_object(value) if base is not None else None
        if known is not None:  # for example, an OrderedDict or a NamedTuple
            return known
        document = {"object": class_path(type(value))}
        if base is not None:
            document["base"] = encode_plain(base(value), self.encode)
            if document["base"] is NOT_PLAIN:
                return None
        fields = list_attributes(value)
        return {**document, "fields": [[k, self.encode(fields[k])] for k in fields]}


def list_attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object in the order in which they were set.

    Excludes where it runs (meshes, devices) and cached properties.
    """
    cls = type(value)
    found: dict[Any, Any] = {
        name: getattr(value, name) for name in list_slots(cls, value)
    }
    found |= getattr(value, "__dict__", {})
    return {
        name: part
        for name, part in found.items()
        if isinstance(name, str)
        and not isinstance(part, PLACES)
        and not is_cached(cls, name)
    }


def _is_settings(value: Any) -> bool:
    """Returns whether a value is an object that its attributes describe completely."""
    cls = type(value)
    if cls.__module__ == "builtins" or isinstance(value, (*PLACES, *_NO_SETTINGS)):
        return False
    if isinstance(value, _BASES):
        return True
    has_attributes = hasattr(value, "__dict__") or bool(list_slots(cls))
    is_made_by_init = vars(object)["__new__"] is cls.__new__
    is_resource = hasattr(cls, "__del__")  # such as a file
    return is_made_by_init and not (is_resource or callable(value)) and has_attributes


_NO_SETTINGS: Final = (
    *(enum.Enum, type, types.ModuleType, nnx.Pytree, nnx.Variable),
    threading.Thread,
)


def _array(value: Any) -> JSON | None:
    """Returns a small array as JSON; None if it is abstract, large or of PRNG keys."""
    try:
        found = np.asarray(value)
    except Exception:  # noqa: BLE001 - jax raises many kinds for what has no value
        return None
    if found.dtype.name not in DTYPES or found.nbytes > _MAX_ARRAY_BYTES:
        return None
    data = found.astype(found.dtype.newbyteorder("<"), order="C").tobytes().hex()
    return {"ndarray": found.dtype.name, "shape": list(found.shape), "data": data}


class _SettingsDecoder(ValueDecoder):
    """Rebuilds objects of the given classes."""

    def __init__(self, classes: Mapping[str, type[Any]]) -> None:
        super().__init__(Table(dict(classes)))
        self._classes = classes

    def decode(self, value: JSON, place: Place) -> Any:
        """Returns the value of a document; see ``ValueDecoder.decode``."""
        value = named_dtype(value)
        if isinstance(value, dict) and "object" in value:
            return self._object(value, place)
        if isinstance(value, dict) and "ndarray" in value:
            return self._ndarray(value, place)
        return super().decode(value, place)

    def _object(self, value: dict[str, JSON], place: Place) -> Any:
        name = value["object"]
        if value.keys() - {"object", "base", "fields"}:
            raise structure_error(place, "one object", shown(value))
        cls = self._classes.get(name) if isinstance(name, str) else None
        if cls is None:
            raise structure_error(
                place,
                "a class that the model's config names",
                shown(name),
                _UNKNOWN_CLASS,
            )
        made = self._empty(cls, value, place)
        attributes = getattr(made, "__dict__", None)
        slots = list_slots(cls)
        for key, item in parse_pairs(value.get("fields", []), place):
            if not isinstance(key, str) or not key.isidentifier():
                raise structure_error(place, "names of attributes", shown(key))
            # A value of which a part is only described is missing.
            if any(
                "opaque" in part and named_dtype(part) is part
                for part in iterate_objects(item)
            ):
                continue
            decoded = self.decode(item, Within(place, key))
            # Stored past the class, whose own __setattr__ could run any code.
            if key in slots:
                object.__setattr__(made, key, decoded)
            elif attributes is not None:
                attributes[key] = decoded
            else:
                raise structure_error(place, f"attributes of {shown(name)}", shown(key))
        return made

    def _empty(self, cls: type[Any], value: dict[str, JSON], place: Place) -> Any:
        """Returns a new object without attributes; no constructor of its class runs."""
        base = next((base for base in _BASES if issubclass(cls, base)), None)
        if issubclass(cls, enum.Enum) or (base is None) != ("base" not in value):
            raise structure_error(
                place, "an object of settings", shown(value["object"])
            )
        if base is None:
            return self._call(lambda: object.__new__(cls), place)
        content = self.decode(value["base"], Within(place, "base"))
        if type(content) is not base:
            raise structure_error(
                place, f"a {base.__name__}", f"a {type(content).__name__}"
            )
        new: Callable[..., Any] = base.__new__
        if base in _MUTABLE:
            made = self._call(partial(new, cls), place)
            _MUTABLE[base](made, content)
            return made
        return self._call(partial(new, cls, content), place)

    def _ndarray(self, value: dict[str, JSON], place: Place) -> Any:
        name, shape = value["ndarray"], parse_items(value.get("shape"), place)
        if not isinstance(name, str) or name not in DTYPES:
            raise structure_error(place, "the name of a dtype", shown(name))
        if not all(type(n) is int and n >= 0 for n in shape):
            raise structure_error(place, "a shape", shown(shape))
        try:
            content = bytes.fromhex(value["data"])
            return np.frombuffer(content, DTYPES[name]).reshape(shape).copy()
        except (TypeError, ValueError, LookupError) as e:
            raise structure_error(place, "the bytes of an array", shown(value)) from e


_MUTABLE: Final[dict[type[Any], Callable[[Any, Any], None]]] = {
    dict: dict.update,
    list: list.extend,
    set: set.update,
}


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value of which a document holds only a description."""

    description: JSON

    def __str__(self) -> str:
        """Returns the description for messages: its name first, then its content."""
        rest = dict(self.description)
        found = [rest.pop(tag) for tag in ("function", "class", "array") if tag in rest]
        name = str(found[0]).replace(":", ".") if found else "value"
        content = ", ".join(f"{tag} {part}" for tag, part in rest.items() if part)
        return f"described {name}" + (f" ({content})" if content else "")


def encode_data(value: Any) -> JSON:
    """Returns plain data as JSON, and descriptions of other values."""
    return _DataEncoder().encode(value)


def decode_data(document: JSON) -> Any:
    """Returns the data of a document, with an ``Opaque`` for each description."""
    check_json(document, _DATA_PLACE)
    return _decode_plain_data(document, _DATA_PLACE)


def _decode_plain_data(value: JSON, place: Place) -> Any:
    decoded = decode_plain(value, place, _decode_plain_data)
    if decoded is not NOT_PLAIN:
        return decoded
    if find_tag(value, {"opaque"}) and isinstance(value["opaque"], dict):
        return Opaque(value["opaque"])
    raise structure_error(place, "plain data", shown(value))


class _DataEncoder(ValueEncoder):
    """Encodes plain data only; names of classes and functions are descriptions."""

    def encode_object(self, value: Any) -> JSON | None:
        """Returns the value of an enumeration member, or None for other objects."""
        if isinstance(value, enum.Enum):
            return encode_plain(value.value, self.encode)
        return super().encode_object(value) if self.describing else None
