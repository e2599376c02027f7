"""Encodes a GraphDef as a document.

A document is a tree of modules, independent of the flax release that made the
GraphDef::

    {"format": "storesvc.structure/1", "flax": "0.12.8", "root":
      {"node": "flax.nnx:Linear",
       "attributes": [["bias", {"variable": "flax.nnx:Param", "metadata": []}],
                      ["use_bias", {"static": true}], ...],
       "data": [["bias", true], ["use_bias", false], ...]}}

A child is one of: ``node`` (a module), ``variable``, ``leaf`` (a bare array),
``container`` (a list, dict, ... that holds any of these), ``static`` (a value) or
``ref``, a reference to an earlier child with that ``index``, which is shared or an
ancestor. Attributes are in flax's sort order, so leaves keep their order.

The values of static attributes are plain data, names, calls or descriptions. In
addition to the objects of ``plain``::

    {"function": "jax.nn:gelu"}   {"class": "flax.nnx:Param"}
    {"partial": {"function": "jax.nn:gelu"}, "args": [], "keywords": [["a", true]]}
    {"call": "jax.nn.initializers:normal", "arguments": [["stddev", 0.02]]}
    {"enum": "jax.lax:Precision", "member": "HIGHEST"}
    {"linen": "my.models:Block", "fields": [["features", 8]]}
    {"opaque": {"class": "my.models:Config", "fields": [["eps", 1e-06]]}}

The last is a hole: the description of a value that only a template can supply. A call
is that of an initializer, a closure that jax creates. It has no importable name, but
all closures of one factory share one code object, which identifies the factory. Its
arguments are the captured variables.

Metadata of Variables has a form that is the same in all flax releases: default entries
are omitted, and ``out_sharding`` is the name for what older releases call
``sharding_names``.

The node list of a GraphDef changes between flax releases, but the module that it
describes does not. Therefore a structure is read from a skeleton module, which has
placeholders for leaves, and decoded by building one and letting flax split it.
"""

import dataclasses
import enum
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, Final, TypeAlias

import flax
import flax.linen as nn
import jax
import jax.nn.initializers as init
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from flax.errors import FlaxError
from flax.typing import HashableMapping
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from storesvc_client.errors import UnsupportedLeafError
from storesvc_client.trees.structure.descriptions import (
    MAX_DESCRIBED,
    MAX_PARTS,
    describe,
    is_cached,
    reported_name,
    truncated_description,
)
from storesvc_client.trees.structure.names import (
    GIVE_CODE,
    JSON,
    MAX_BITS,
    MAX_LEVELS,
    MAX_NESTED,
    Place,
    Table,
    Within,
    qualified_name,
    shown,
    structure_error,
)
from storesvc_client.trees.structure.plain import (
    NOT_PLAIN,
    SCALARS,
    decode_pairs,
    decode_plain,
    encode_plain,
    find_tag,
    in_order,
    parse_items,
)

DEFAULTS: Final[Mapping[str, Any]] = {
    "eager_sharding": True,
    "hijax": False,
    "mutable": True,
    "ref": False,
}
"""Default metadata of a Variable."""

_REQUIRED: Final = frozenset(nnx.Variable(np.zeros(())).get_metadata())
"""Metadata that the installed flax release requires of each Variable."""

_OLD_SHARDING: Final = "sharding_names"
_SHARDING: Final = "out_sharding"
_NATIVE_SHARDING: Final = (
    _SHARDING if hasattr(nnx.Variable, _OLD_SHARDING) else _OLD_SHARDING
)
"""Name in the installed flax release; newer ones keep the old name as a property."""


def portable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata with the names of documents, without defaults."""
    return {
        portable_name(key): value
        for key, value in metadata.items()
        if not (key in DEFAULTS and value is DEFAULTS[key])
    }


def native(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata for ``Variable.from_metadata`` of the installed flax release."""
    defaults = {key: value for key, value in DEFAULTS.items() if key in _REQUIRED}
    known = {
        native_name(key): value
        for key, value in metadata.items()
        if key in _REQUIRED or key not in DEFAULTS
    }
    return {**defaults, **known}


def portable_name(key: str) -> str:
    """Returns the name of a metadata entry in documents."""
    return _SHARDING if key == _OLD_SHARDING else key


def native_name(key: str) -> str:
    """Returns the name of a metadata entry in the installed flax release."""
    return _NATIVE_SHARDING if key == _SHARDING else key


STATE: Final = "_pytree__state"
NODES: Final = "_pytree__nodes"
"""Attributes that flax adds to modules: the setup state, and which attributes are
data."""

RESERVED: Final = "_pytree__"
"""Prefix of attribute names that flax reserves."""

Leaf: TypeAlias = "np.ndarray[Any, Any]"


def placeholder() -> Leaf:
    """Returns a new leaf, identified by its id."""
    return np.zeros((), np.float32)


def make_skeleton(graphdef: "nnx.GraphDef[Any]") -> tuple[Any, list[Leaf]]:
    """Returns a module of a structure, and the placeholders in it."""
    leaves = [placeholder() for _ in range(graphdef.num_leaves)]
    return nnx.merge(graphdef, nnx.State(dict(enumerate(leaves)))), leaves


def with_placeholders(root: Any) -> Any:
    """Returns a module with placeholders for arrays that flax 0.12.3 treats as static.

    These are attributes of abstract modules that are not in a Variable.
    """
    queue, seen = [root], {id(root)}
    while queue:
        parts = _parts(queue.pop())
        for key, value in parts.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                parts[key] = placeholder()
            elif id(value) not in seen:
                seen.add(id(value))
                queue.append(value)
    return root


def _parts(value: Any) -> dict[Any, Any]:
    """Returns the parts of a container, or a module's own dict, to be modified."""
    if isinstance(value, nnx.Pytree):
        return vars(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, (dict, nnx.State)) else {}


@cache
def _has_int_keys(cls: Any) -> bool:
    return bool(getattr(cls, "_pytree__has_int_keys", False))


def stored_key(cls: Any, key: int | str) -> int | str:
    """Returns the key of an attribute in the installed flax release."""
    return str(key) if _has_int_keys(cls) else key


def portable_key(cls: Any, key: Any) -> Any:
    """Returns the key of an attribute, the same in all flax releases."""
    has_int_keys = _has_int_keys(cls)
    is_int = isinstance(key, str) and key.isdecimal() and key.isascii()
    return int(key) if has_int_keys and is_int and str(int(key)) == key else key


@dataclass(frozen=True, slots=True, kw_only=True)
class Factory:
    """A function of jax that creates initializers."""

    name: str
    make: Callable[..., Any]
    parameters: frozenset[str]


def _factory(make: Callable[..., Any]) -> Factory:
    return Factory(
        name=f"jax.nn.initializers:{make.__name__}",
        make=make,
        parameters=frozenset(inspect.signature(make).parameters),
    )


_SAMPLES: Final[tuple[tuple[Callable[..., Any], Any], ...]] = (
    (init.constant, init.constant(0)),
    (init.delta_orthogonal, init.delta_orthogonal()),
    (init.normal, init.normal()),
    (init.orthogonal, init.orthogonal()),
    (init.truncated_normal, init.truncated_normal()),
    (init.uniform, init.uniform()),
    # Also creates lecun, he, kaiming, glorot and xavier initializers.
    (init.variance_scaling, init.variance_scaling(1.0, "fan_in", "normal")),
)

FACTORIES: Final[Mapping[str, Factory]] = MappingProxyType(
    {made.name: made for made in (_factory(make) for make, _ in _SAMPLES)}
)
"""The only functions that decoding calls, by name."""

_BY_CODE: Final[Mapping[CodeType, Factory]] = MappingProxyType(
    {sample.__code__: _factory(make) for make, sample in _SAMPLES}
)

WITH_METADATA: Final = "flax.nnx:with_metadata"
"""Factory of ``nnx.with_partitioning``; its arguments are metadata."""

_with_metadata: Any = nnx.with_metadata(init.zeros, tag=0)
_WITH_METADATA_CODE: Final = _with_metadata.__code__
_INITIALIZER: Final = "initializer"


def initializer_call(function: Any) -> tuple[str, dict[str, Any]] | None:
    """Returns the factory and arguments of an initializer, or None if it has no
    factory."""
    if not isinstance(function, FunctionType):
        return None
    contents = (cell.cell_contents for cell in function.__closure__ or ())
    cells = dict(zip(function.__code__.co_freevars, contents, strict=True))
    if function.__code__ is _WITH_METADATA_CODE:
        return _metadata_call(cells)
    factory = _BY_CODE.get(function.__code__)
    if factory is None:
        return None
    arguments = {k: v for k, v in cells.items() if k in factory.parameters}
    dtype = inspect.signature(function).parameters["dtype"].default
    if dtype is not None and "dtype" in factory.parameters:
        arguments["dtype"] = dtype
    return factory.name, arguments


def _metadata_call(cells: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    initializer, metadata = cells.pop(_INITIALIZER), cells.pop("metadata")
    if any(cells.values()):  # hooks are functions of the user
        return None
    portable = {portable_name(key): value for key, value in metadata.items()}
    return WITH_METADATA, {_INITIALIZER: initializer, **portable}


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Returns the initializer that a factory creates.

    Raises:
        KeyError: There is no factory with that name.
        TypeError: The factory does not accept these arguments.
    """
    if name == WITH_METADATA:
        initializer = arguments.pop(_INITIALIZER, None)
        hooks = any(k.startswith("on_") or k.endswith("_hooks") for k in arguments)
        if not callable(initializer) or hooks:
            raise TypeError("expected an initializer and its metadata")
        native = {native_name(key): value for key, value in arguments.items()}
        return nnx.with_metadata(initializer, **native)
    factory = FACTORIES[name]
    if unknown := arguments.keys() - factory.parameters:
        raise TypeError(f"unexpected arguments {sorted(unknown)}")
    return factory.make(**arguments)


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

_MAPPING_TAGS: Final[dict[Any, str]] = {cls: tag for tag, cls in MAPPINGS.items()}


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
        kind = type(value)
        if kind in SCALARS and not (kind is int and value.bit_length() > MAX_BITS):
            return value
        if self._described:
            self._parts += 1
            if self._parts > MAX_PARTS:
                return {"opaque": truncated_description(value)}
            return self._encode_guarded(value)
        # Thousands of layers share their settings. The cache keeps the value alive, so
        # its id stays unique.
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, self._encode_guarded(value))
        return known[1]

    def _encode_guarded(self, value: Any) -> JSON:
        """Encodes a value; describes one that contains itself by its class."""
        if id(value) in self._busy:
            return {"opaque": {"class": reported_name(type(value))}}
        if len(self._busy) >= MAX_NESTED:
            return {"opaque": truncated_description(value)}
        self._busy.add(id(value))
        try:
            encoded = encode_plain(value, self.encode)
            if encoded is NOT_PLAIN:
                encoded = self.encode_object(value)
            missing = encoded is None or encoded is NOT_PLAIN
            return self._opaque(value) if missing else encoded
        finally:
            self._busy.discard(id(value))

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
            return {"named_tuple": qualified_name(type(value)), "items": items}
        if isinstance(value, nn.Module):
            return self._linen(value)
        if isinstance(value, type):
            return {"class": qualified_name(value)}
        if type(value) is functools.partial:
            return {
                "partial": self.encode(value.func),
                "args": [self.encode(item) for item in value.args],
                "keywords": self._pairs(value.keywords),
            }
        return self._function(value) if callable(value) else None

    def _enum(self, value: enum.Enum) -> JSON:
        encoded = {"enum": qualified_name(type(value)), "member": value.name}
        # A configuration that went through JSON has only the string.
        return {**encoded, "value": value.value} if isinstance(value, str) else encoded

    def _linen(self, value: nn.Module) -> JSON:
        fields = {
            f.name: getattr(value, f.name)
            for f in dataclasses.fields(value)
            if f.init and f.name != "parent"
        }
        return {"linen": qualified_name(type(value)), "fields": self._pairs(fields)}

    def _function(self, value: Any) -> JSON | None:
        if name := qualified_name(value):
            return {"function": name}
        call = initializer_call(value)
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
            "class": lambda v, place: table.find_class(
                v["class"], place, object, "a class"
            ),
            "enum": self._enum,
            "function": lambda v, place: table.function(v["function"], place),
            "linen": self._linen,
            "named_tuple": self._named_tuple,
            "opaque": self._opaque,
            "partial": self._partial,
        }

    def decode(self, value: JSON, place: Place) -> Any:
        decoded = decode_plain(value, place, self.decode)
        if decoded is not NOT_PLAIN:
            return decoded
        tag = find_tag(value, _KEYS)
        if tag is None or value.keys() - _KEYS[tag]:
            raise structure_error(place, "a value", shown(value))
        if tag in MAPPINGS:
            pairs = decode_pairs(value[tag], place, self.decode)
            return self._call(functools.partial(MAPPINGS[tag], pairs), place)
        return self._decoders[tag](value, place)

    def _enum(self, value: JSON, place: Place) -> Any:
        cls = self._table.find_class(value["enum"], place, enum.Enum, "an enumeration")
        member = value.get("member")
        if not isinstance(member, str) or member not in cls.__members__:
            raise structure_error(place, f"a member of {value['enum']}", shown(member))
        return cls.__members__[member]

    def _named_tuple(self, value: JSON, place: Place) -> Any:
        cls = self._table.named_tuple(value["named_tuple"], place)
        items = parse_items(value.get("items"), place)
        if len(items) != len(cls._fields):
            raise structure_error(place, f"{len(cls._fields)} items", f"{len(items)}")
        # Not cls(*items): the constructor of a subclass may run any code.
        return tuple.__new__(
            cls, [self.decode(item, Within(place, i)) for i, item in enumerate(items)]
        )

    def _linen(self, value: JSON, place: Place) -> Any:
        cls: Any = self._table.find_class(
            value["linen"], place, nn.Module, "a flax.linen.Module class"
        )
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
        args = parse_items(value.get("args"), place)
        decoded = [self.decode(item, Within(place, i)) for i, item in enumerate(args)]
        keywords = self._keywords(value.get("keywords"), place)
        return functools.partial(function, *decoded, **keywords)

    def _initializer(self, value: JSON, place: Place) -> Any:
        name = value["call"]
        if name != WITH_METADATA and (
            not isinstance(name, str) or name not in FACTORIES
        ):
            raise structure_error(
                place, "a factory of jax.nn.initializers", shown(name)
            )
        arguments = self._keywords(value.get("arguments"), place)
        return self._call(functools.partial(call, name, arguments), place)

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


FORMAT: Final = "storesvc.structure/1"

CONTAINERS: Final[dict[str, type[Any]]] = {
    "dict": dict,
    "frozen_dict": FrozenDict,
    "list": list,
    "state": nnx.State,
    "tuple": tuple,
}
"""Containers that documents support in addition to NamedTuples."""

_CONTAINER_NAMES: Final = {cls: name for name, cls in CONTAINERS.items()}
_UNUSUAL: Final = "build it from flax.nnx modules, Variables, lists and dicts"


def encode_graphdef(graphdef: "nnx.GraphDef[Any]") -> dict[str, JSON]:
    """Returns a structure as a JSON document.

    The document is equal for the same model in another process, on another mesh, with
    another seed, or made by ``nnx.eval_shape``. Parts of it are shared objects: copy it
    before you modify it.
    """
    root, leaves = make_skeleton(graphdef)
    encoder = _Encoder({id(leaf) for leaf in leaves})
    document = encoder.child(root)
    if encoder.found != len(leaves):
        raise UnsupportedLeafError(
            f"the structure: expected {len(leaves)} leaves in its modules, got "
            f"{encoder.found}; {_UNUSUAL}"
        )
    return {"format": FORMAT, "flax": flax.__version__, "root": document}


def key_order(key: int | str) -> tuple[bool, int | str]:
    """Returns flax's sort key for the keys of a module: numbers, then names."""
    return isinstance(key, str), key


class _Encoder:
    """Encodes a skeleton module by walking it."""

    def __init__(self, leaves: set[int]) -> None:
        self.found = 0
        """Placeholders found so far."""
        self._leaves = leaves
        self._values = ValueEncoder()
        self._seen: dict[int, dict[str, JSON]] = {}
        self._flags: dict[tuple[int, type[Any]], JSON] = {}
        self._path: list[Any] = []
        self._kinds: dict[type[Any], _Kind] = {}
        self._statics: dict[tuple[Any, int], list[JSON]] = {}
        self._shared = 0
        self._cached: dict[tuple[type[Any], Any], bool] = {}

    def child(self, value: Any) -> dict[str, JSON]:
        """Returns a child of a module or container as JSON."""
        kind = self._kinds.get(type(value))
        if kind is None:
            kind = self._kinds[type(value)] = _find_kind(value)
        if kind is _Kind.VALUE and id(value) not in self._leaves:
            return {"static": self._values.encode(value)}
        if id(value) in self._seen:
            return self._ref(self._seen[id(value)])
        if kind is _Kind.VARIABLE:
            return self._variable(value)
        if kind is _Kind.NODE:
            return self._node(value)
        if kind is _Kind.CONTAINER:
            if self._is_inhabited(value):
                return self._container(value)
            return {"static": self._values.encode(value)}
        self.found += id(value) in self._leaves
        return {"leaf": True}

    def _ref(self, seen: dict[str, JSON]) -> dict[str, JSON]:
        if "index" not in seen:
            seen["index"] = self._shared
            self._shared += 1
        return {"ref": seen["index"]}

    def _variable(self, variable: Any) -> dict[str, JSON]:
        metadata = portable(variable.get_metadata())
        if metadata.get("hijax") or id(variable.get_raw_value()) not in self._leaves:
            raise UnsupportedLeafError(
                f"{self._place()}: expected a Variable with its own value, got one of "
                "hijax or in a static attribute; make it an nnx.Param"
            )
        self.found += 1
        encode = self._values.encode
        document = self._seen[id(variable)] = {
            "variable": qualified_name(type(variable)),
            "metadata": [[key, encode(metadata[key])] for key in sorted(metadata)],
        }
        return document

    def _node(self, node: Any) -> dict[str, JSON]:
        cls = type(node)
        document: dict[str, JSON] = {"node": qualified_name(cls)}
        self._seen[id(node)] = document
        attributes = {
            portable_key(cls, key): value
            for key, value in vars(node).items()
            if not (isinstance(key, str) and key.startswith(RESERVED))
        }
        children = self._children(attributes)
        document["attributes"] = [
            [key, child]
            for key, child in children
            if not ("static" in child and self._is_cached(cls, key))
        ]
        document["data"] = self._data(cls, vars(node).get(NODES, {}))
        treedef: Any = jax.tree.structure(vars(node).get(STATE))
        _, flags = treedef.node_data() or (None, ())
        if any(flags):  # initializing, is_setup
            document["state"] = [bool(flag) for flag in flags]
        return document

    def _data(self, cls: type[Any], flags: Any) -> JSON:
        """Returns which attributes are data; layers of one class share the result."""
        known = self._flags.get((id(flags), cls))
        if known is None:
            keyed = {
                portable_key(cls, key): bool(is_data)
                for key, is_data in flags.items()
                if is_data or not self._is_cached(cls, key)
            }
            known = [[key, keyed[key]] for key in sorted(keyed, key=key_order)]
            self._flags[id(flags), cls] = known
        return known

    def _is_cached(self, cls: type[Any], key: Any) -> bool:
        """Returns whether an attribute exists only after its first use."""
        known = self._cached.get((cls, key))
        if known is None:
            known = isinstance(key, str) and is_cached(cls, key)
            self._cached[cls, key] = known
        return known

    def _container(self, value: Any) -> dict[str, JSON]:
        kind: JSON
        if type(value) in _CONTAINER_NAMES:
            kind = _CONTAINER_NAMES[type(value)]
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            kind = {"named_tuple": qualified_name(type(value))}
        else:
            kind = {"opaque": {"class": reported_name(type(value))}}
        return {"container": kind, "items": self._children(_items(value))}

    def _children(self, attributes: dict[Any, Any]) -> list[JSON]:
        if len(self._path) >= MAX_LEVELS:
            raise UnsupportedLeafError(
                f"{self._place()}: expected at most {MAX_LEVELS} nested modules, got "
                "more; put them into one nnx.List"
            )
        children: list[JSON] = []
        for key in sorted(attributes, key=key_order):
            value = attributes[key]
            pair = self._statics.get((key, id(value)))
            if pair is None:
                self._path.append(key)
                pair = [key, self.child(value)]
                self._path.pop()
                if "static" in pair[1]:
                    self._statics[key, id(value)] = pair
            children.append(pair)
        return children

    def _is_inhabited(self, value: Any) -> bool:
        """Returns whether a container holds modules, Variables or leaves."""
        return any(
            isinstance(item, (nnx.Variable, nnx.Pytree, jax.ShapeDtypeStruct))
            or id(item) in self._leaves
            for item in jax.tree.leaves(
                value, is_leaf=lambda node: isinstance(node, (nnx.Variable, nnx.Pytree))
            )
        )

    def _place(self) -> str:
        return "/".join(map(str, self._path)) or "the structure"


class _Kind(enum.Enum):
    """Kinds of values, by type."""

    ABSTRACT = enum.auto()
    CONTAINER = enum.auto()
    NODE = enum.auto()
    VALUE = enum.auto()
    VARIABLE = enum.auto()


def _find_kind(value: Any) -> _Kind:
    if isinstance(value, nnx.Variable):
        return _Kind.VARIABLE
    if isinstance(value, nnx.Pytree):
        return _Kind.NODE
    if isinstance(value, jax.ShapeDtypeStruct):
        return _Kind.ABSTRACT
    if value is None:  # jax calls it a container without items
        return _Kind.VALUE
    is_leaf = type(value) not in _CONTAINER_NAMES and jax.tree_util.all_leaves([value])
    return _Kind.VALUE if is_leaf else _Kind.CONTAINER


def _items(value: Any) -> dict[Any, Any]:
    """Returns the items of a container by the keys that flax uses."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        value, is_leaf=lambda item: item is not value
    )
    return {_key(path[0]): item for path, item in flat}


def _key(part: Any) -> Any:
    match part:
        case SequenceKey():
            return part.idx
        case DictKey() | FlattenedIndexKey():
            return part.key
        case GetAttrKey():
            return part.name
        case _:  # a class that the user registered with jax
            return str(part)
