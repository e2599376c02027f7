"""Encodes static attributes of modules as JSON: plain data, names, calls, descriptions.

In addition to the objects of ``plain``::

    {"function": "jax.nn:gelu"}   {"class": "flax.nnx:Param"}
    {"partial": {"function": "jax.nn:gelu"}, "args": [], "keywords": [["a", true]]}
    {"call": "jax.nn.initializers:normal", "arguments": [["stddev", 0.02]]}
    {"enum": "jax.lax:Precision", "member": "HIGHEST"}
    {"linen": "my.models:Block", "fields": [["features", 8]]}
    {"opaque": {"class": "my.models:Config", "fields": [["eps", 1e-06]]}}

The last is a hole: the description of a value that only a template can supply.
"""

import dataclasses
import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import flax.linen as nn
from flax import nnx
from flax.core import FrozenDict
from flax.errors import FlaxError
from flax.typing import HashableMapping

from storesvc_client.trees.structure import initializers
from storesvc_client.trees.structure.allowed_names import Table, name_of
from storesvc_client.trees.structure.descriptions import (
    MAX_DESCRIBED,
    MAX_PARTS,
    describe,
    reported_name,
    truncated_description,
)
from storesvc_client.trees.structure.limits import JSON, MAX_BITS, MAX_NESTED
from storesvc_client.trees.structure.plain import (
    NOT_PLAIN,
    SCALARS,
    decode_pairs,
    decode_plain,
    encode_plain,
    in_order,
    items_of,
    tag_of,
)
from storesvc_client.trees.structure.structure_errors import (
    GIVE_CODE,
    Place,
    Within,
    shown,
    structure_error,
)

MAPPINGS: Final[dict[str, Callable[[dict[Any, Any]], Any]]] = {
    "frozen_dict": FrozenDict,
    "mapping": HashableMapping,
    "ordered_dict": OrderedDict,
    "state": nnx.State,
    "state_axes": nnx.StateAxes,
}
"""Mapping types other than dict, by tag."""

FAILURES: Final = (
    *(TypeError, ValueError, AttributeError, LookupError),
    *(RuntimeError, AssertionError, OverflowError, FlaxError),
)
"""Exceptions that flax raises for unexpected input."""

_MAPPING_TAGS: Final[dict[Any, str]] = {
    FrozenDict: "frozen_dict",
    HashableMapping: "mapping",
    OrderedDict: "ordered_dict",
    nnx.State: "state",
    nnx.StateAxes: "state_axes",
}


class ValueEncoder:
    """Encodes the static values of one structure."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, JSON]] = {}
        self._busy: set[int] = set()
        self._described = 0
        self._parts = 0

    @property
    def describing(self) -> bool:
        """True while parts of a description are encoded."""
        return self._described > 0

    def encode(self, value: Any) -> JSON:
        """Returns a value as JSON."""
        kind = type(value)
        if kind in SCALARS and not (kind is int and value.bit_length() > MAX_BITS):
            return value
        if self._described:
            return self._encode_part(value)
        # Thousands of layers share their settings. The cache keeps the value alive, so
        # its id stays unique.
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, self._guarded(value))
        return known[1]

    def _encode_part(self, value: Any) -> JSON:
        self._parts += 1
        if self._parts > MAX_PARTS:
            return {"opaque": truncated_description(value)}
        return self._guarded(value)

    def _guarded(self, value: Any) -> JSON:
        """Encodes a value once; a value that contains itself is described by its
        class."""
        if id(value) in self._busy:
            return {"opaque": {"class": reported_name(type(value))}}
        if len(self._busy) >= MAX_NESTED:
            return {"opaque": truncated_description(value)}
        self._busy.add(id(value))
        try:
            return self._encode(value)
        finally:
            self._busy.discard(id(value))

    def _encode(self, value: Any) -> JSON:
        encoded = encode_plain(value, self.encode)
        if encoded is NOT_PLAIN:
            encoded = self.encode_object(value)
        missing = encoded is None or encoded is NOT_PLAIN
        return self._opaque(value) if missing else encoded

    def encode_object(self, value: Any) -> JSON | None:
        """Returns an object as JSON, or None if only a description can represent it."""
        if isinstance(value, enum.Enum):
            return self._enum(value)
        tag = _MAPPING_TAGS.get(type(value))
        if tag is not None:
            pairs = [[self.encode(k), self.encode(v)] for k, v in value.items()]
            ordered = tag in {"ordered_dict", "state_axes"}
            return {tag: pairs if ordered else in_order(pairs)}
        if isinstance(value, tuple) and isinstance(getattr(value, "_fields", 0), tuple):
            items = [self.encode(item) for item in value]
            return {"named_tuple": name_of(type(value)), "items": items}
        if isinstance(value, nn.Module):
            return self._linen(value)
        if isinstance(value, type):
            return {"class": name_of(value)}
        if type(value) is functools.partial:
            return {
                "partial": self.encode(value.func),
                "args": [self.encode(item) for item in value.args],
                "keywords": self._pairs(value.keywords),
            }
        return self._function(value) if callable(value) else None

    def _enum(self, value: enum.Enum) -> JSON:
        encoded = {"enum": name_of(type(value)), "member": value.name}
        # A configuration that went through JSON has only the string.
        return {**encoded, "value": value.value} if isinstance(value, str) else encoded

    def _linen(self, value: nn.Module) -> JSON:
        fields = {
            f.name: getattr(value, f.name)
            for f in dataclasses.fields(value)
            if f.init and f.name != "parent"
        }
        return {"linen": name_of(type(value)), "fields": self._pairs(fields)}

    def _function(self, value: Any) -> JSON | None:
        if name := name_of(value):
            return {"function": name}
        call = initializers.call_of(value)
        if call is None:
            return None
        return {"call": call[0], "arguments": self._pairs(call[1])}

    def _pairs(self, fields: Mapping[str, Any]) -> list[JSON]:
        return [[key, self.encode(fields[key])] for key in sorted(fields)]

    def _opaque(self, value: Any) -> JSON:
        if self._described >= MAX_DESCRIBED:
            return {"opaque": truncated_description(value)}
        if not self._described:
            self._parts = 0
        self._described += 1
        try:
            return {"opaque": describe(value, self.encode)}
        finally:
            self._described -= 1


class ValueDecoder:
    """Decodes static values; resolves names in a table."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._decoders: dict[str, Callable[[JSON, Place], Any]] = {
            "call": self._initializer,
            "class": self._class,
            "enum": self._enum,
            "function": self._function,
            "linen": self._linen,
            "named_tuple": self._named_tuple,
            "opaque": self._opaque,
            "partial": self._partial,
        }

    def decode(self, value: JSON, place: Place) -> Any:
        """Returns the value of a document.

        Raises:
            StructureError: It is malformed, names something not allowed, or is a hole.
        """
        decoded = decode_plain(value, place, self.decode)
        if decoded is not NOT_PLAIN:
            return decoded
        tag = tag_of(value, _KEYS)
        if tag is None or value.keys() - _KEYS[tag]:
            raise structure_error(place, "a value", shown(value))
        if tag in MAPPINGS:
            pairs = decode_pairs(value[tag], place, self.decode)
            return self._call(functools.partial(MAPPINGS[tag], pairs), place)
        return self._decoders[tag](value, place)

    def _class(self, value: JSON, place: Place) -> Any:
        return self._table.any_class(value["class"], place)

    def _function(self, value: JSON, place: Place) -> Any:
        return self._table.function(value["function"], place)

    def _enum(self, value: JSON, place: Place) -> Any:
        cls = self._table.enum_class(value["enum"], place)
        member = value.get("member")
        if not isinstance(member, str) or member not in cls.__members__:
            raise structure_error(place, f"a member of {value['enum']}", shown(member))
        return cls.__members__[member]

    def _named_tuple(self, value: JSON, place: Place) -> Any:
        cls = self._table.named_tuple(value["named_tuple"], place)
        items = items_of(value.get("items"), place)
        if len(items) != len(cls._fields):
            raise structure_error(place, f"{len(cls._fields)} items", f"{len(items)}")
        # Not cls(*items): the constructor of a subclass may run any code.
        return tuple.__new__(
            cls, [self.decode(item, Within(place, i)) for i, item in enumerate(items)]
        )

    def _linen(self, value: JSON, place: Place) -> Any:
        cls: Any = self._table.linen_class(value["linen"], place)
        fields = self._keywords(value.get("fields"), place)
        known = {f.name for f in dataclasses.fields(cls) if f.init} - {"parent"}
        if unknown := fields.keys() - known:
            raise structure_error(
                place, f"fields of {value['linen']}", shown(min(unknown))
            )
        return self._call(functools.partial(cls, **fields), place)

    def _partial(self, value: JSON, place: Place) -> Any:
        function = self.decode(value["partial"], place)
        if not callable(function) or isinstance(function, type):
            raise structure_error(place, "a function", f"a {type(function).__name__}")
        args = items_of(value.get("args"), place)
        decoded = [self.decode(item, Within(place, i)) for i, item in enumerate(args)]
        keywords = self._keywords(value.get("keywords"), place)
        return functools.partial(function, *decoded, **keywords)

    def _initializer(self, value: JSON, place: Place) -> Any:
        name = value["call"]
        if name != initializers.WITH_METADATA and (
            not isinstance(name, str) or name not in initializers.FACTORIES
        ):
            raise structure_error(
                place, "a factory of jax.nn.initializers", shown(name)
            )
        arguments = self._keywords(value.get("arguments"), place)
        return self._call(functools.partial(initializers.call, name, arguments), place)

    def _opaque(self, value: JSON, place: Place) -> Any:
        described = value["opaque"]
        if not isinstance(described, dict):
            raise structure_error(place, "a description", shown(described))
        named = (described.get(key) for key in ("function", "class", "array"))
        name = next((shown(name) for name in named if name is not None), "an object")
        raise structure_error(
            place,
            "a value that a document can hold",
            f"only the description of {name}",
            GIVE_CODE,
        )

    def _keywords(self, value: JSON, place: Place) -> dict[str, Any]:
        keywords = decode_pairs(value, place, self.decode)
        for key in keywords:
            if not isinstance(key, str):
                raise structure_error(
                    place, "names of arguments", f"a {type(key).__name__}"
                )
        return keywords

    def _call(self, function: Callable[[], Any], place: Place) -> Any:
        try:
            return function()
        except FAILURES as e:
            raise structure_error(
                place, "arguments that fit", f"{type(e).__name__}: {e}"
            ) from e


_KEYS: Final[dict[str, set[str]]] = {
    "call": {"call", "arguments"},
    "class": {"class"},
    "enum": {"enum", "member", "value"},
    "function": {"function"},
    "linen": {"linen", "fields"},
    "named_tuple": {"named_tuple", "items"},
    "opaque": {"opaque"},
    "partial": {"partial", "args", "keywords"},
    **{tag: {tag} for tag in MAPPINGS},
}
"""Allowed keys of each object of a document, by its tag."""
