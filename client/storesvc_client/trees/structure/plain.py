"""Encodes plain data as JSON, the content of configurations and static attributes.

None, booleans, finite numbers and strings encode as themselves. Any other value is an
object, and one of its keys is the tag that names its type::

    {"tuple": [1, 2]}   {"dict": [["eps", 1e-06]]}   {"float": "nan"}
    {"dtype": "bfloat16", "as": "jax"}   {"spec": ["fsdp", None]}

Encoders built on this module encode the parts of a container themselves, so that values
of any type may be nested.
"""

import json
import math
from collections.abc import Callable, Container, Iterable
from typing import Any, Final, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from storesvc.format.dtypes import DTYPES
from storesvc_client.errors import StructureError
from storesvc_client.trees.structure.names import (
    JSON,
    MAX_BITS,
    MAX_COMPOUND_KEYS,
    MAX_KEY_PARTS,
    Place,
    Within,
    shown,
    structure_error,
)

Encode: TypeAlias = Callable[[Any], JSON]
Decode: TypeAlias = Callable[[JSON, Place], Any]
"""Decodes a value; takes the JSON and its place in the document."""

NOT_PLAIN: Final = object()
"""Result of ``encode_plain`` for values that are not plain data."""

SCALARS: Final = frozenset({type(None), bool, int, str})
_JAX_DTYPE: Final = type(jnp.float32)
_JAX_DTYPES: Final = {
    name: getattr(jnp, "bool_" if name == "bool" else name)
    for name in DTYPES
    if hasattr(jnp, name)
}
_SEQUENCES: Final[dict[type, str]] = {list: "list", tuple: "tuple"}
_SETS: Final[dict[type, str]] = {set: "set", frozenset: "frozenset"}
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_plain(value: Any, encode: Encode) -> JSON:
    """Returns a value as JSON, its parts by ``encode``, or ``NOT_PLAIN``."""
    kind = type(value)
    if kind in SCALARS:
        too_long = kind is int and value.bit_length() > MAX_BITS
        return NOT_PLAIN if too_long else value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [encode(item) for item in value]}
    if kind is dict:
        pairs = [[encode(k), encode(v)] for k, v in value.items()]
        return {"dict": pairs} if _are_keys(k for k, _ in pairs) else NOT_PLAIN
    if kind in _SETS:
        items = in_order(encode(item) for item in value)
        return {_SETS[kind]: items} if _are_keys(items) else NOT_PLAIN
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, PartitionSpec):
        return {"spec": [encode(item) for item in value]}
    return _encode_numpy(value)


def in_order(items: Iterable[JSON]) -> list[JSON]:
    """Returns JSON values in an order that is the same in every process."""
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _encode_numpy(value: Any) -> JSON:
    if isinstance(value, _JAX_DTYPE):
        name, form = value.dtype.name, "jax"
    elif isinstance(value, np.dtype):
        name, form = value.name, "numpy"
    elif isinstance(value, type) and issubclass(value, np.generic):
        if value not in _NUMPY_TYPES:
            return NOT_PLAIN
        name, form = np.dtype(value).name, "type"
    elif isinstance(value, np.generic) and value.dtype.name in _SCALAR_DTYPES:
        return {"scalar": value.dtype.name, "data": value.tobytes().hex()}
    else:
        return NOT_PLAIN
    return {"dtype": name, "as": form} if name in DTYPES else NOT_PLAIN


_NUMPY_TYPES: Final = frozenset(dtype.type for dtype in DTYPES.values())
_SCALAR_DTYPES: Final = frozenset(DTYPES) - {"complex64", "complex128"}


def decode_plain(value: JSON, place: Place, decode: Decode) -> Any:
    """Returns the value of a document, its parts by ``decode``, or ``NOT_PLAIN``."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise structure_error(place, "a value", shown(value))
        return value
    tag = find_tag(value, _DECODERS)
    if tag is None:
        return NOT_PLAIN
    decoder = _DECODERS[tag]
    if value.keys() - {tag} - _MORE_KEYS.get(tag, set()):
        raise structure_error(place, f"one {tag}", shown(value))
    return decoder(value, place, decode)


_MORE_KEYS: Final[dict[str, set[str]]] = {"dtype": {"as"}, "scalar": {"data"}}


def find_tag(value: dict[str, Any], tags: Container[str]) -> str | None:
    """Returns the first key of an object that is in ``tags``, or None.

    The order of keys has no meaning; storage may sort them.
    """
    return next((key for key in value if key in tags), None)


def parse_items(value: JSON, place: Place) -> list[Any]:
    if not isinstance(value, list):
        raise structure_error(place, "a list", shown(value))
    return value


def parse_pairs(value: JSON, place: Place) -> list[tuple[Any, Any]]:
    """Returns the pairs of a document; raises like ``parse_items``."""
    pairs = []
    for item in parse_items(value, place):
        if not isinstance(item, list) or len(item) != 2:
            raise structure_error(place, "pairs of a key and a value", shown(item))
        pairs.append((item[0], item[1]))
    return pairs


def decode_pairs(value: JSON, place: Place, decode: Decode) -> dict[Any, Any]:
    """Returns a dict of pairs whose keys must be distinct and hashable."""
    found: dict[Any, Any] = {}
    pairs = parse_pairs(value, place)
    _check_keys((key for key, _ in pairs), place)
    for key, item in pairs:
        decoded, inner = decode(key, place), decode(item, Within(place, key))
        before = len(found)
        try:
            found[decoded] = inner
        except (TypeError, ValueError) as e:
            raise _unhashable(decoded, place) from e
        if len(found) == before:
            raise structure_error(place, "unique keys", f"{shown(key)} twice")
    return found


def _check_keys(keys: Iterable[JSON], place: Place) -> None:
    """Rejects keys whose hashes could be chosen equal, so that a dict is slow."""
    if not _are_keys(keys):
        raise structure_error(
            place,
            f"at most {MAX_COMPOUND_KEYS} keys of {MAX_KEY_PARTS} parts each",
            "more",
        )


def _are_keys(keys: Iterable[JSON]) -> bool:
    compound = [key for key in keys if isinstance(key, dict) and "float" not in key]
    return len(compound) <= MAX_COMPOUND_KEYS and all(map(_is_small, compound))


def _is_small(key: JSON) -> bool:
    parts = [key]
    for part in parts:  # the list grows during the iteration
        if isinstance(part, (dict, list)):
            parts.extend(part.values() if isinstance(part, dict) else part)
        if len(parts) > 3 * MAX_KEY_PARTS:  # a tuple of one item takes three
            return False
    return sum(not isinstance(part, (dict, list)) for part in parts) <= MAX_KEY_PARTS


def _unhashable(value: Any, place: Place) -> StructureError:
    return structure_error(place, "hashable values", f"a {type(value).__name__}")


def _decode_items(value: JSON, place: Place, decode: Decode) -> list[Any]:
    items = parse_items(value, place)
    return [decode(item, Within(place, i)) for i, item in enumerate(items)]


def _decode_set(value: JSON, place: Place, decode: Decode) -> set[Any]:
    _check_keys(parse_items(value, place), place)
    found: set[Any] = set()
    for item in _decode_items(value, place, decode):
        try:
            found.add(item)
        except (TypeError, ValueError) as e:
            raise _unhashable(item, place) from e
    return found


def _decode_spec(value: JSON, place: Place, decode: Decode) -> Any:
    axes = _decode_items(value["spec"], place, decode)
    for axis in axes:
        names = axis if isinstance(axis, tuple) else (axis,)
        if not all(name is None or isinstance(name, str) for name in names):
            raise structure_error(place, "names of mesh axes", shown(value["spec"]))
    return PartitionSpec(*axes)


def _decode_float(value: JSON, place: Place, _: Decode) -> Any:
    if value["float"] not in tuple(_FLOATS):
        raise structure_error(place, "nan, inf or -inf", shown(value["float"]))
    return _FLOATS[value["float"]]


def _decode_bytes(value: JSON, place: Place, _: Decode) -> Any:
    try:
        return bytes.fromhex(value["bytes"])
    except (TypeError, ValueError) as e:
        raise structure_error(place, "hexadecimal digits", shown(value["bytes"])) from e


def _decode_ellipsis(value: JSON, place: Place, _: Decode) -> Any:
    if value["ellipsis"] is not True:
        raise structure_error(place, "an ellipsis", shown(value))
    return Ellipsis


def _decode_dtype(value: JSON, place: Place, _: Decode) -> Any:
    name = value["dtype"]
    if not isinstance(name, str) or name not in DTYPES:
        raise structure_error(place, "the name of a dtype", shown(name))
    dtype = DTYPES[name]
    match value.get("as"):
        case "numpy":
            return dtype
        case "type":
            return dtype.type
        case "jax" if name in _JAX_DTYPES:
            return _JAX_DTYPES[name]
    raise structure_error(place, "a form of dtype", shown(value.get("as")))


def _decode_scalar(value: JSON, place: Place, _: Decode) -> Any:
    if value["scalar"] not in list(_SCALAR_DTYPES):
        raise structure_error(place, "the name of a dtype", shown(value["scalar"]))
    dtype = DTYPES[value["scalar"]]
    content = _decode_bytes({"bytes": value.get("data")}, place, _)
    if len(content) != dtype.itemsize:
        raise structure_error(place, f"{dtype.itemsize} bytes", f"{len(content)}")
    return np.frombuffer(content, dtype)[0]


_DECODERS: Final[dict[str, Callable[[JSON, Place, Decode], Any]]] = {
    "bytes": _decode_bytes,
    "dict": lambda value, place, decode: decode_pairs(value["dict"], place, decode),
    "dtype": _decode_dtype,
    "ellipsis": _decode_ellipsis,
    "float": _decode_float,
    "frozenset": lambda value, place, decode: frozenset(
        _decode_set(value["frozenset"], place, decode)
    ),
    "list": lambda value, place, decode: _decode_items(value["list"], place, decode),
    "scalar": _decode_scalar,
    "set": lambda value, place, decode: _decode_set(value["set"], place, decode),
    "spec": _decode_spec,
    "tuple": lambda value, place, decode: tuple(
        _decode_items(value["tuple"], place, decode)
    ),
}

PLAIN_TAGS: Final = frozenset(_DECODERS)
"""Tags of JSON objects that hold plain data."""
