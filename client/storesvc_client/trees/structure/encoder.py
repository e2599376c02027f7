"""Encodes a GraphDef as a document.

A document is a tree of modules, independent of the flax release that made the
GraphDef::

    {"format": "storesvc.structure/1", "flax": "0.12.8", "root":
      {"node": "flax.nnx:Linear",
       "attributes": [["bias", {"variable": "flax.nnx:Param", "metadata": []}],
                      ["use_bias", {"static": true}], ...],
       "data": [["bias", true], ["use_bias", false], ...]}}

A child is one of: ``node`` (a module), ``variable``, ``leaf`` (a bare array),
``container`` (a list, dict, ... that holds any of these), ``static`` (a value, see
``values``) or ``ref``, a reference to an earlier child with that ``index``, which is
shared or an ancestor. Attributes are in flax's sort order, so leaves keep their order.
"""

import enum
from typing import Any, Final

import flax
import jax
from flax import nnx
from flax.core import FrozenDict
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from storesvc_client.errors import UnsupportedLeafError
from storesvc_client.trees.structure.allowed_names import name_of
from storesvc_client.trees.structure.contents import is_cached
from storesvc_client.trees.structure.descriptions import reported_name
from storesvc_client.trees.structure.limits import JSON, MAX_LEVELS
from storesvc_client.trees.structure.metadata import portable
from storesvc_client.trees.structure.skeleton import (
    NODES,
    RESERVED,
    STATE,
    portable_key,
    setup_flags,
    skeleton_of,
)
from storesvc_client.trees.structure.values import ValueEncoder

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

    Raises:
        UnsupportedLeafError: It has hijax Variables, or is nested too deeply.
    """
    root, leaves = skeleton_of(graphdef)
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
            kind = self._kinds[type(value)] = _kind_of(value)
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
            "variable": name_of(type(variable)),
            "metadata": [[key, encode(metadata[key])] for key in sorted(metadata)],
        }
        return document

    def _node(self, node: Any) -> dict[str, JSON]:
        cls = type(node)
        document: dict[str, JSON] = {"node": name_of(cls)}
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
        if any(flags := setup_flags(vars(node).get(STATE))):
            document["state"] = flags
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
            kind = {"named_tuple": name_of(type(value))}
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


def _kind_of(value: Any) -> _Kind:
    if isinstance(value, nnx.Variable):
        return _Kind.VARIABLE
    if isinstance(value, nnx.Pytree):
        return _Kind.NODE
    if isinstance(value, jax.ShapeDtypeStruct):
        return _Kind.ABSTRACT
    return _Kind.CONTAINER if _is_container(value) else _Kind.VALUE


def _is_container(value: Any) -> bool:
    if value is None:  # jax calls it a container without items
        return False
    return type(value) in _CONTAINER_NAMES or not jax.tree_util.all_leaves([value])


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
