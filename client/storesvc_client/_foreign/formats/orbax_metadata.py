"""The files of Orbax that describe a tree, as values. Pure.

``_METADATA`` lists the entries of a tree (``_src/metadata/tree.py`` of Orbax 0.12),
``_sharding`` their shardings (``_src/metadata/sharding.py``), and
``array_metadatas/process_N`` implementations of typed keys. Names of classes in them
are never imported.
"""

import base64
import binascii
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from storesvc.format.keys import InvalidKeyError, join_key
from storesvc.format.trees import SavedSharding
from storesvc_client._foreign.bounded_json import as_object, parse_json
from storesvc_client._items.values import Container
from storesvc_client.errors import DataLossError, PreconditionError

SEQUENCE: Final = 1
"""``key_type`` of an index of a sequence; that of anything else is 2."""

EMPTIES: Final[Mapping[str, str]] = {
    "None": "none",
    "Dict": "{}",
    "List": "[]",
    "Tuple": "()",
    "NamedTuple": "()",
}
"""``value_type`` of a None and of empty containers, and their names in our document.
An empty named tuple becomes an empty tuple, as it is one."""

ARRAY, HOST_ARRAY, SCALAR, STRING = "jax.Array", "np.ndarray", "scalar", "string"

_MAX_AXES: Final = 64
"""Maximum axes of a mesh: the maximum dimensions of an array of devices."""

_KINDS: Final = frozenset({ARRAY, HOST_ARRAY, SCALAR, STRING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One leaf of a tree."""

    name: str
    """Name of its array: all keys, joined by "."."""
    key: str
    path_kinds: str
    value_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMetadata:
    """The statements of ``_METADATA``."""

    entries: tuple[Entry, ...]
    containers: tuple[Container, ...]
    """None and the empty containers."""
    is_ocdbt: bool | None
    """None: not stated."""
    is_zarr3: bool
    is_whole: bool
    """True if chunks are stored even if all their elements have the fill value."""
    custom_metadata: Any


def parse_tree(place: str, value: Any, *, prefix: tuple[str, ...]) -> TreeMetadata:
    """Returns the metadata of a tree.

    Raises:
        DataLossError: The value is not that of such a file.
        PreconditionError: Two entries have one name, so that only one of their arrays
            is stored; or an entry is of an unknown type.
    """
    fields = as_object(value, what=place)
    rows = as_object(fields.get("tree_metadata"), what=f"{place} field tree_metadata")
    entries, containers = [], []
    for text, row in rows.items():
        keys, kinds, value_type = _entry(f"{place} entry {text[:200]!r}", row)
        try:
            key = join_key((*prefix, *keys))
        except InvalidKeyError as e:
            raise PreconditionError(f"{place}: {e}") from e
        path_kinds = "k" * len(prefix) + kinds
        if value_type in EMPTIES:
            containers.append(Container(EMPTIES[value_type], key, path_kinds))
        elif value_type in _KINDS:
            entries.append(
                Entry(
                    name=".".join(keys),
                    key=key,
                    path_kinds=path_kinds,
                    value_type=value_type,
                )
            )
        else:
            raise PreconditionError(
                f"{place}: expected entries of the types "
                f"{', '.join(sorted(_KINDS | set(EMPTIES)))}, got {value_type[:80]!r} "
                f"of {key!r}; restore it with its own library"
            )
    _check_names(place, entries)
    return TreeMetadata(
        entries=tuple(entries),
        containers=tuple(containers),
        is_ocdbt=_flag(place, fields, "use_ocdbt"),
        is_zarr3=bool(_flag(place, fields, "use_zarr3")),
        is_whole=bool(_flag(place, fields, "store_array_data_equal_to_fill_value")),
        custom_metadata=fields.get("custom_metadata"),
    )


def parse_key_impls(place: str, value: Any) -> dict[str, str]:
    """Returns the PRNG implementation of each typed key that a file of
    ``array_metadatas`` lists, by name of its array.
    """
    found: dict[str, str] = {}
    try:
        for row in value["array_metadatas"]:
            array = row["array_metadata"]
            impl = (array.get("ext_metadata") or {}).get("random_key_impl")
            if impl is not None:
                found[str(array["param_name"])] = _unicode(impl)
    except (TypeError, KeyError, ValueError, AttributeError) as e:
        raise _malformed_error(place, e) from e
    return found


def parse_shardings(place: str, value: Any) -> dict[str, SavedSharding]:
    """Returns the named shardings of arrays, by name of the array."""
    found: dict[str, SavedSharding] = {}
    parsed: dict[str, SavedSharding | None] = {}  # many arrays share a sharding
    for encoded, text in as_object(value, what=place).items():
        try:
            name = base64.b64decode(encoded, validate=True).decode()
        except (binascii.Error, ValueError) as e:
            raise _malformed_error(place, e) from e
        if not isinstance(text, str):
            raise DataLossError(f"{place}: expected texts, got {type(text).__name__}")
        if text not in parsed:
            row = as_object(parse_json(text, what=place), what=place)
            parsed[text] = _sharding(place, row)
        sharding = parsed[text]
        if sharding is not None:
            found[name] = sharding
    return found


def _entry(place: str, row: Any) -> tuple[tuple[str, ...], str, str]:
    """Returns keys, path kinds and type of the value of an entry."""
    try:
        keys = [(each["key"], each["key_type"]) for each in row["key_metadata"]]
        value_type = row["value_metadata"]["value_type"]
    except (TypeError, KeyError) as e:
        raise _malformed_error(place, e) from e
    if not isinstance(value_type, str) or any(
        not isinstance(key, str) or kind not in (SEQUENCE, 2) for key, kind in keys
    ):
        raise DataLossError(
            f"{place}: expected texts as keys, of the types 1 and 2; use another "
            "checkpoint"
        )
    kinds = "".join("i" if kind == SEQUENCE else "k" for _, kind in keys)
    return tuple(key for key, _ in keys), kinds, value_type


def _check_names(place: str, entries: Iterable[Entry]) -> None:
    """Rejects two entries of one name, of which Orbax keeps one array: which one that
    is cannot be known."""
    known: dict[str, Entry] = {}
    for entry in entries:
        other = known.setdefault(entry.name, entry)
        if other is not entry:
            raise PreconditionError(
                f"{place}: expected another name for each array, got {other.key!r} and "
                f"{entry.key!r}, both stored as {entry.name!r}: one of them was lost "
                "when it was saved; save them again with other keys"
            )


def _sharding(place: str, row: Mapping[str, Any]) -> SavedSharding | None:
    """Returns a named sharding; None for any other."""
    if row.get("sharding_type") != "NamedSharding":
        return None
    try:
        names = tuple(_unicode(name) for name in row["axis_names"])
        sizes = tuple(int(size) for size in row["shape"])
        spec = tuple(_axes(part) for part in row["partition_spec"])
    except (TypeError, KeyError, ValueError, OverflowError) as e:
        raise _malformed_error(place, e) from e
    used = [axis for part in spec for axis in part]
    is_valid = (
        len(names) == len(sizes) == len(set(names)) <= _MAX_AXES
        # each: the product of long integers would take hours
        and all(1 <= size < 2**31 for size in sizes)
        and math.prod(sizes) < 2**31
        and len(used) == len(set(used))
        and set(used) <= set(names)
    )
    if not is_valid:
        raise DataLossError(
            f"{place}: expected a size for each of at most {_MAX_AXES} axes, each axis "
            f"once, got {ascii((names, sizes, spec))[:300]}; use another checkpoint"
        )
    while spec and not spec[-1]:
        spec = spec[:-1]
    return SavedSharding(axis_names=names, axis_sizes=sizes, spec=spec)


def _unicode(value: Any) -> str:
    """Returns a text; raises ``ValueError`` for a lone surrogate, which JSON can
    state and no checkpoint can hold."""
    text = str(value)
    text.encode()
    return text


def _axes(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    if isinstance(part, str):
        return (part,)
    return tuple(str(axis) for axis in part)


def _flag(place: str, fields: Mapping[str, Any], name: str) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise DataLossError(
            f"{place} field {name}: expected true or false, got {value!r}"[:300]
        )
    return value


def _malformed_error(place: str, e: Exception) -> DataLossError:
    what = ascii(str(e))[1:-1][:120]
    return DataLossError(
        f"{place}: expected the fields of Orbax, got others ({type(e).__name__}: "
        f"{what}); use another checkpoint"
    )
