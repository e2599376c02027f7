"""Decodes a document to a GraphDef.

Without a template, all values come from the document and the table of names. With a
template, the document is only compared with it, and the result is the template's own
structure: functions and meshes are the caller's.

A module is built as flax builds it: an object of the class without its constructor,
then its attributes. An attribute is rejected if Python, flax or the class would act on
it: names such as ``__class__``, names reserved by flax, methods and properties. Hooks
of Variables are rejected, too, because flax would call them.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any, Final

from flax import nnx
from flax.nnx.pytreelib import PytreeState
from flax.typing import HashableMapping

from storesvc_client._pytree.leaves import list_problems, mapping_leaves
from storesvc_client.errors import InvalidRequestError, MismatchError, StructureError
from storesvc_client.trees.structure import encoder
from storesvc_client.trees.structure.comparison import differences
from storesvc_client.trees.structure.encoder import (
    CONTAINERS,
    FAILURES,
    FORMAT,
    NODES,
    RESERVED,
    STATE,
    ValueDecoder,
    encode_graphdef,
    key_order,
    make_skeleton,
    placeholder,
    stored_key,
    with_placeholders,
)
from storesvc_client.trees.structure.names import (
    GIVE_CODE,
    JSON,
    MAX_NAME,
    Allowed,
    Place,
    Table,
    check_json,
    shown,
    structure_error,
)
from storesvc_client.trees.structure.plain import find_tag, parse_items, parse_pairs

_KEYS: Final[dict[str, set[str]]] = {
    "container": {"container", "items"},
    "leaf": {"leaf"},
    "node": {"node", "attributes", "data", "state", "index"},
    "ref": {"ref"},
    "static": {"static"},
    "variable": {"variable", "metadata", "index"},
}
"""Allowed keys of each child, by its tag."""

_FLAX_FLAGS: Final = frozenset({NODES, STATE})


class Builder:
    """Builds the module of one document."""

    def __init__(self, table: Table) -> None:
        self.paths: list[tuple[Any, ...]] = []
        """Paths of the leaves, in document order."""
        self._table = table
        self._values = ValueDecoder(table)
        self._here: Place = self
        self._path: list[Any] = []
        self._built: dict[int, Any] = {}
        self._attributes: set[tuple[type[Any], str]] = set()
        self._builders: dict[str, Callable[[JSON], Any]] = {
            "container": self._container,
            "leaf": self._leaf,
            "node": self._node,
            "ref": self._ref,
            "static": self._static,
            "variable": self._variable,
        }

    def child(self, value: JSON) -> Any:
        """Returns the module, Variable, container or value of a document."""
        tag = find_tag(value, _KEYS) if isinstance(value, dict) else None
        if tag is None or value.keys() - _KEYS[tag]:
            raise structure_error(self._here, "a module or a part of one", shown(value))
        return self._builders[tag](value)

    def __str__(self) -> str:
        """Returns the place being built; computed only for messages."""
        parts = "/".join(
            ascii(p)[1:-1] if isinstance(p, str) else str(p) for p in self._path
        )
        return f"structure {parts}" if parts else "the structure"

    def _node(self, value: JSON) -> Any:
        cls = self._table.find_class(
            value["node"], self._here, nnx.Pytree, "an nnx.Module class"
        )
        node = object.__new__(cls)  # not cls(): no constructor runs for a document
        self._keep(value, node)  # before its children, which may refer to it
        attributes = vars(node)
        flags = parse_items(value.get("state", [False, False]), self._here)
        if len(flags) != 2 or not all(isinstance(flag, bool) for flag in flags):
            raise structure_error(self._here, "two flags", shown(flags))
        attributes[STATE] = PytreeState(*flags)
        attributes[NODES] = self._data(cls, value.get("data"))
        names: set[str] = set()
        for key, child in self._children(value.get("attributes")):
            self._check_attribute(cls, key)
            if str(key) in names:  # 0 and "0" are one key in some flax releases
                raise structure_error(self._here, "unique keys", f"{shown(key)} twice")
            names.add(str(key))
            self._path.append(key)
            held = self.child(child)
            self._check_data(node, key, child)
            attributes[stored_key(cls, key)] = held
            self._path.pop()
        return node

    def _check_data(self, node: Any, key: int | str, child: JSON) -> None:
        """Rejects static children that would put placeholders into the GraphDef."""
        cls = type(node)
        if "static" in child or not cls._pytree__is_pytree:
            return
        is_data = vars(node)[NODES].get(stored_key(cls, key), False)
        if not is_data and _is_inhabited(child):
            raise structure_error(
                self._here, "modules and arrays that are data", "static ones", GIVE_CODE
            )

    def _check_attribute(self, cls: type[Any], key: int | str) -> None:
        if isinstance(key, int) or (cls, key) in self._attributes:
            return  # layers of one class have the same attributes
        if key.startswith(("__", RESERVED)):
            raise structure_error(self._here, "names of attributes", shown(key))
        if _is_taken(cls, key):
            raise structure_error(
                self._here,
                "names of attributes",
                f"{shown(key)}, a method or property of it",
                GIVE_CODE,
            )
        self._attributes.add((cls, key))

    def _data(self, cls: type[Any], value: JSON) -> Any:
        flags: dict[Any, bool] = {}
        for key, is_data in parse_pairs(value, self._here):
            self._check_key(key)
            if not isinstance(is_data, bool) or (
                str(key).startswith(RESERVED) and key not in _FLAX_FLAGS
            ):
                raise structure_error(self._here, "a data flag", shown(is_data))
            flags[stored_key(cls, key)] = is_data
        return HashableMapping(flags)

    def _variable(self, value: JSON) -> Any:
        place = self._here
        cls = self._table.find_class(
            value["variable"], place, nnx.Variable, "an nnx.Variable class"
        )
        stored = {}
        for key, item in parse_pairs(value.get("metadata"), place):
            if not isinstance(key, str) or key.startswith("__"):
                raise structure_error(place, "names of metadata", shown(key))
            # from_metadata below keeps a hook, and flax calls it at each access.
            if key.startswith("on_"):
                got = f"{shown(key)}, a hook that flax calls"
                raise structure_error(place, "plain metadata", got, GIVE_CODE)
            stored[key] = self._values.decode(item, f"{place}@{shown(key)}")
        if any(type(stored.get(key, False)) is not bool for key in encoder.DEFAULTS):
            raise structure_error(place, "flags of Variables", shown(value["metadata"]))
        if stored.get("hijax"):
            raise structure_error(
                place, "a Variable", "a hijax Variable, which no encoder writes"
            )
        if stored.get("ref"):
            raise structure_error(
                place, "a Variable of arrays", "a Variable of references", GIVE_CODE
            )
        self.paths.append(tuple(self._path))
        variable = cls.from_metadata(placeholder(), encoder.native(stored))
        self._keep(value, variable)
        return variable

    def _leaf(self, value: JSON) -> Any:
        if value["leaf"] is not True:
            raise structure_error(self._here, "a leaf", shown(value))
        self.paths.append(tuple(self._path))
        return placeholder()

    def _static(self, value: JSON) -> Any:
        static = value["static"]
        scalar = static is None or type(static) in (str, int, float, bool)
        return static if scalar else self._values.decode(static, self._here)

    def _ref(self, value: JSON) -> Any:
        index = value["ref"]
        if type(index) is not int or index not in self._built:
            raise structure_error(self._here, "an earlier index", shown(index))
        return self._built[index]

    def _keep(self, value: JSON, built: Any) -> None:
        index = value.get("index")
        if index is None:
            return
        if type(index) is not int or index in self._built:
            raise structure_error(self._here, "a unique index", shown(index))
        self._built[index] = built

    def _container(self, value: JSON) -> Any:
        children: dict[Any, Any] = {}
        for key, child in self._children(value.get("items")):
            self._path.append(key)
            children[key] = self.child(child)
            self._path.pop()
        kind = value["container"]
        if isinstance(kind, dict):
            return self._named_tuple(kind, children)
        if not isinstance(kind, str) or kind not in CONTAINERS:
            raise structure_error(self._here, "a container", shown(kind))
        if kind not in {"list", "tuple"}:
            if len({type(key) for key in children}) > 1:
                raise structure_error(
                    self._here, "keys of one type", "numbers and names"
                )
            return CONTAINERS[kind](children)
        if list(children) != list(range(len(children))):
            raise structure_error(self._here, "items 0, 1, 2, ...", "other keys")
        return CONTAINERS[kind](children.values())

    def _named_tuple(self, kind: dict[str, JSON], children: dict[Any, Any]) -> Any:
        if kind.keys() == {"opaque"}:
            self._values.decode(kind, self._here)
        cls = self._table.named_tuple(kind.get("named_tuple"), self._here)
        fields = cls._fields
        if set(fields) != set(children):
            raise structure_error(
                self._here, f"fields {', '.join(fields)}", "other fields"
            )
        return tuple.__new__(cls, [children[field] for field in fields])

    def _children(self, value: JSON) -> list[tuple[Any, Any]]:
        children = parse_pairs(value, self._here)
        for key, _ in children:
            self._check_key(key)
        orders = [key_order(key) for key, _ in children]
        for before, after in itertools.pairwise(orders):
            if not before < after:
                raise structure_error(
                    self._here, "sorted unique keys", f"{shown(after[1])} out of order"
                )
        return children

    def _check_key(self, key: Any) -> None:
        if type(key) not in (int, str):
            raise structure_error(self._here, "names or numbers as keys", shown(key))
        if type(key) is str and len(key) > MAX_NAME:
            raise structure_error(
                self._here, f"keys of at most {MAX_NAME} characters", shown(key)
            )


def _is_taken(cls: type[Any], key: str) -> bool:
    """Returns whether a class has a method or property of that name."""
    found = inspect.getattr_static(cls, key, None)
    if not callable(found) and not hasattr(type(found), "__get__"):
        return False
    home = next(base for base in cls.__mro__ if key in vars(base))
    declared = callable(found) and key in inspect.get_annotations(home)
    return not declared  # a dataclass field may have an activation as its default


def _is_inhabited(child: JSON) -> bool:
    """Returns whether a well-formed child is more than static values in containers."""
    children = [child]
    for inner in children:  # the list grows during the iteration
        if "container" in inner:
            children.extend(item for _, item in inner["items"])
        elif "static" not in inner:
            return True
    return False


_PLACE: Final = "the structure"


def decode_graphdef(
    document: JSON, *, allow: Allowed = (), template: Any = None
) -> "nnx.GraphDef[Any]":
    """Returns the structure of a document in the form of the installed flax release.

    Args:
        allow: Your classes and functions that the document names; a mapping if their
            names changed since the save.
        template: A module of the same structure, abstract or not, or its GraphDef. Its
            values are used, including those that a document cannot hold.

    Raises:
        StructureError: The document is malformed, names something not allowed, or only
            describes a value, for which a template is needed.
        MismatchError: The template has another structure; the message lists where.
        InvalidRequestError: ``allow`` or ``template`` has an unsupported type.
    """
    check_json(document, _PLACE)  # first: what follows recurses without a limit
    root = document_root(document)
    if template is not None:
        return _check_template(document, template)
    builder = Builder(Table(allow))
    try:
        graphdef, state = nnx.split(builder.child(root))
        held: list[tuple[Any, ...]] = [()]  # a root may itself be a leaf
        if isinstance(state, nnx.State):
            held = list(mapping_leaves(state.raw_mapping))
    except StructureError:
        raise
    except FAILURES as e:
        what = f"{type(e).__name__}: {e}"
        raise structure_error(_PLACE, "a module that flax can split", what) from e
    # The document lists its leaves in flax's order. A document with another order, or
    # with leaves that flax does not see, was not written by the encoder.
    if held != builder.paths:
        raise structure_error(
            _PLACE,
            f"{len(builder.paths)} leaves",
            f"{len(held)} leaves, or different ones, from flax",
        )
    return graphdef


def document_root(document: JSON) -> JSON:
    if not isinstance(document, dict) or "root" not in document:
        raise structure_error(_PLACE, "a document", shown(document))
    if document.get("format") != FORMAT:
        advice = "a newer release of this library may read it"
        raise structure_error(_PLACE, FORMAT, shown(document.get("format")), advice)
    root = document["root"]
    if not isinstance(root, dict) or find_tag(root, ("node", "container")) is None:
        raise structure_error(_PLACE, "a module or container at its root", shown(root))
    return root


def _check_template(document: JSON, template: Any) -> "nnx.GraphDef[Any]":
    graphdef = template
    if not isinstance(template, nnx.GraphDef):
        if not isinstance(template, (nnx.Pytree, dict, list, tuple)):
            raise InvalidRequestError(
                f"template: expected a module or its GraphDef, got a "
                f"{type(template).__name__}"
            )
        graphdef = nnx.split(template)[0]
    if found := differences(document, encode_graphdef(graphdef)):
        raise MismatchError(
            f"template: expected the saved structure, got differences: "
            f"{list_problems([*map(str, found)])}; give a model like the saved one"
        )
    return nnx.split(with_placeholders(make_skeleton(graphdef)[0]))[0]
