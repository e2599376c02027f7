"""Encodes values that are not arrays: items, and texts, bytes and large integers in a
tree; and packs documents about trees.

Each kind of value has one encoding, so that equal values have equal bytes and are
stored once. A value is kept if decoding returns an equal value of the same type; all
others are rejected, with the place in the value and its type. Nothing is converted: a
tuple would come back as a list, and a NumPy number as a Python number. Of an object
that has a state, such as a data iterator, the state is kept.

>>> encode_item({"b": [1, 2.5], "a": None}).data
b'{"a":null,"b":[1,2.5]}'
>>> encode_item((1, 2))
Traceback (most recent call last):
ValueError: expected a text, bytes, or a value of JSON, got tuple; use a list

A document is a JSON object, compressed by zlib, in ``LeafTable.structure`` of a
checkpoint. Any client may have written it, so sizes are checked before it is parsed,
and it is never executed. Leaves, by their paths, show the dicts and lists above them;
if a tree has no other document, one records type, key and path kinds of None, empty
containers and tuples.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from storesvc.format.keys import (
    INTEGER_KINDS,
    MAX_ENCODED_BYTES,
    ItemName,
    describe,
    fits_key,
    split_key,
)
from storesvc_client._items.iterators import at, take_state, type_name
from storesvc_client._values.models import PathPart
from storesvc_client.errors import DataLossError, StructureError
from storesvc_proto.v1 import tree_pb2 as pb

CONTAINERS: Final = b"storesvc.containers/1\n"
"""Prefix of documents that describe containers, and are not the caller's own."""

MAX_BYTES: Final = 128 << 20
"""Maximum bytes of a decompressed document, against decompression bombs."""

MAX_TOKENS: Final = 5_000_000
"""Maximum commas, colons and opening brackets: each may become a Python object, of 80
bytes on average. A module of 40,000 small layers has as many."""

_PLACE: Final = "structure of the checkpoint"
_ADVICE: Final = "use run.restore(like=), or another checkpoint"


def pack_document(fields: Mapping[str, Any]) -> bytes:
    """Returns a document.

    Raises:
        StructureError: It is larger than readers accept.
    """
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    _check_size(text)
    return zlib.compress(text, 1)


def unpack_document(document: bytes) -> dict[str, Any]:
    """Returns the fields of a document."""
    try:
        text = _decompress(document)
        _check_size(text)
        fields = json.loads(text)
    except StructureError:
        raise
    except (zlib.error, ValueError, RecursionError) as e:
        what = ascii(str(e))[1:-1][:200]
        raise StructureError(
            f"{_PLACE}: expected compressed JSON, got other bytes ({what}); {_ADVICE}"
        ) from e
    except MemoryError as e:
        raise StructureError(
            f"{_PLACE}: expected what fits into memory, got more; {_ADVICE}"
        ) from e
    if not isinstance(fields, dict):
        raise StructureError(
            f"{_PLACE}: expected fields, got a {type(fields).__name__}; {_ADVICE}"
        )
    return fields


def _decompress(document: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(document, MAX_BYTES + 1)
    if not unpacker.eof and len(text) <= MAX_BYTES:
        raise StructureError(
            f"{_PLACE}: expected all of it, got a document that was cut short; "
            f"{_ADVICE}"
        )
    if unpacker.unused_data:
        raise StructureError(
            f"{_PLACE}: expected nothing after its end, got "
            f"{len(unpacker.unused_data)} bytes; {_ADVICE}"
        )
    return text


def _check_size(text: bytes) -> None:
    if len(text) > MAX_BYTES:
        raise StructureError(
            f"{_PLACE}: too large: expected at most {MAX_BYTES} bytes, got more; "
            f"{_ADVICE}"
        )
    tokens = sum(map(text.count, (b",", b":", b"[", b"{")))
    if tokens > MAX_TOKENS:
        raise StructureError(
            f"{_PLACE}: too large: expected at most {MAX_TOKENS} values, got {tokens}; "
            f"{_ADVICE}"
        )
    if not text.isascii():  # one other character makes Python use 4 bytes each
        raise StructureError(f"{_PLACE}: expected ASCII, got other bytes; {_ADVICE}")


TUPLE: Final = "tuple"
"""A tuple that is not empty; its items have entries of their own."""

EMPTY: Final[dict[type, str]] = {
    type(None): "none",
    dict: "{}",
    list: "[]",
    tuple: "()",
}
"""Names of None and of empty containers."""

_MADE: Final = {name: kind for kind, name in EMPTY.items() if kind is not type(None)}


@dataclass(frozen=True, slots=True)
class Container:
    """One None, empty container or tuple."""

    what: str
    key: str
    path_kinds: str

    @property
    def path(self) -> tuple[PathPart, ...]:
        """Path of the container, in the form of a leaf's path."""
        parts = zip(split_key(self.key), self.path_kinds, strict=True)
        return tuple(
            int(text) if kind in INTEGER_KINDS else text for text, kind in parts
        )

    @property
    def value(self) -> Any:
        """A new empty container, or None."""
        return _MADE[self.what]() if self.what in _MADE else None


def pack_container_document(containers: Iterable[Container]) -> bytes:
    """Returns the document of containers; b"" if there are none."""
    rows = sorted([each.what, each.key, each.path_kinds] for each in containers)
    return CONTAINERS + pack_document({"containers": rows}) if rows else b""


def unpack_containers(document: bytes) -> list[Container]:
    """Returns the containers of a document, or none if it is of another type."""
    if not document.startswith(CONTAINERS):
        return []
    fields = unpack_document(document.removeprefix(CONTAINERS))
    try:
        rows = fields["containers"]
        found = [Container(what, key, kinds) for what, key, kinds in rows]
        for each in found:
            if each.what not in (TUPLE, *EMPTY.values()):
                raise ValueError(f"{each.what!r} is not a container")
            if not fits_key(each.path_kinds, each.key):
                raise ValueError(f"{each.path_kinds!r} does not fit {each.key!r}")
    except (ValueError, TypeError, AttributeError, KeyError) as e:
        raise StructureError(
            f"the document of its containers is malformed ({e}); restore with like="
        ) from e
    return found


MAX_JSON_DEPTH: Final = 200
"""Maximum number of lists and dicts within each other: any process can decode it."""

_INT64: Final = range(-(2**63), 2**63)

_INSTEAD: Final = {
    "tuple": "use a list",
    "set": "use a sorted list",
    "frozenset": "use a sorted list",
    "bytearray": "use bytes",
    "memoryview": "use bytes",
    "bytes": "make it an item of its own, or a text",
    "PerProcess": "make it the whole value of an item",
    "ndarray": "keep it in the tree",
    "ArrayImpl": "keep it in the tree",
    "Tensor": "keep it in the tree",
}
"""Advice about some types, by name."""


@dataclass(frozen=True, slots=True)
class PerProcess:
    """A value that each process of a job saves for itself; for ``Run.save(items=)``.

    >>> run.save(step, state, items={"data": PerProcess(iterator_state)})

    All processes pass the same names, each its own value. ``Run.items`` returns the own
    value of each process of a job of as many processes.
    """

    value: Any
    """The value of this process, as any item."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """A value that all processes of a job hold alike; for ``Run.save(items=)``.

    >>> run.save(step, state, items={"data": Replicated(global_batches)})

    It is stored once, and any number of processes can read it. A save in which a
    process has another value than process 0 fails: their iterators have not gone
    through the same batches.
    """

    value: Any
    """The value, as any item."""


Sharing: TypeAlias = Literal["first", "same", "own"]
"""Processes whose values are kept: process 0; process 0, all being equal; each."""


@dataclass(frozen=True, slots=True)
class OwnItem:
    """An item as this process passes it."""

    encoded: "Encoded"
    sharing: Sharing


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value in stored form."""

    kind: "pb.LeafKind.ValueType"
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedItem:
    """A row of an item in the plan of a save."""

    name: ItemName
    kind: "pb.LeafKind.ValueType"
    size: int
    """Bytes of its encoding."""
    data: bytes | None
    """Its encoding; None if another process writes it."""


def own_item(value: Any) -> OwnItem:
    """Returns an item of ``Run.save(items=)`` in stored form.

    Args:
        value: As for ``encode_item``, or an object that has a state, which is taken
            now; or one of these as ``PerProcess`` or ``Replicated``.

    Raises:
        ValueError: It is another value, or too large; the message says where.
    """
    sharing: Sharing = "first"
    is_marked = isinstance(value, PerProcess | Replicated)
    if is_marked:
        sharing = "own" if isinstance(value, PerProcess) else "same"
        value = value.value
    state = take_state(value)
    if state is not None:
        value = state.value
        if not is_marked:
            sharing = "same" if state.is_shared else "own"
    return OwnItem(encode_item(value), sharing)


def encode_item(value: Any) -> Encoded:
    """Returns the encoding of an item.

    Args:
        value: A ``str``, ``bytes``, or a value of JSON: None, a ``bool``, ``int`` or
            finite ``float``, or lists and dicts of these and of texts, with texts as
            keys.
    """
    encoded = encode_python(value)
    if encoded is not None and encoded.kind != pb.LEAF_KIND_INTEGER:
        return encoded
    problem = next(_problems(value, "", 0), None)
    if problem:
        raise ValueError(problem)
    try:
        text = json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            sort_keys=True,
            separators=(",", ":"),
        )
    except ValueError as e:  # an integer of more digits than Python converts
        raise ValueError(f"JSON: {e}; store it as text") from e
    return _check_encoded(Encoded(pb.LEAF_KIND_JSON, _utf8(text)))


def encode_python(value: Any) -> Encoded | None:
    """Returns the encoding of a leaf of a tree; None if it is not encoded, but stored
    as an array or not at all.

    Args:
        value: A ``str``, ``bytes``, or an ``int`` that int64 cannot hold.

    Raises:
        ValueError: It is a text that is not Unicode, or too large.
    """
    kind = type(value)
    if kind is str:
        return _check_encoded(Encoded(pb.LEAF_KIND_TEXT, _utf8(value)))
    if kind is bytes:
        return _check_encoded(Encoded(pb.LEAF_KIND_BYTES, value))
    if kind is int and value not in _INT64:
        size = (value.bit_length() if value >= 0 else (~value).bit_length()) // 8 + 1
        data = value.to_bytes(size, "little", signed=True)
        return _check_encoded(Encoded(pb.LEAF_KIND_INTEGER, data))
    return None


def decode(kind: "pb.LeafKind.ValueType", data: bytes) -> Any:
    """Returns the value of an encoding.

    Args:
        kind: Kind of the leaf, one of ``ENCODED_KINDS``.
    """
    match kind:
        case pb.LEAF_KIND_TEXT:
            return data.decode()
        case pb.LEAF_KIND_BYTES:
            return data
        case pb.LEAF_KIND_INTEGER:
            return int.from_bytes(data, "little", signed=True)
        case pb.LEAF_KIND_JSON:
            try:
                return json.loads(data.decode(), parse_constant=_refuse)
            except RecursionError as e:
                raise ValueError("JSON: lists and dicts are nested too deeply") from e
        case _:
            raise AssertionError(kind)


def decode_value(key: str, kind: "pb.LeafKind.ValueType", data: bytes) -> Any:
    """Returns the value of a leaf or an item whose bytes are as they were saved."""
    try:
        return decode(kind, data)
    except ValueError as e:
        raise DataLossError(
            f"{describe(key)}: expected the encoding of its kind, got other bytes "
            f"({e}); its writer did not follow the contract, use another checkpoint",
            reason="CORRUPT_DATA",
        ) from e


def _problems(value: Any, where: str, depth: int) -> Iterator[str]:
    """Yields why a value is not the same after it was JSON, and where in it."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return
    if kind is float:
        if not math.isfinite(value):
            yield f"{at(where)}expected a finite number, got {value}; use a text"
        return
    if kind not in (list, dict):
        expected = "a value of JSON" if where else "a text, bytes, or a value of JSON"
        yield f"{at(where)}expected {expected}, got {_type_text(kind)}"
        return
    if depth == MAX_JSON_DEPTH:
        yield (
            f"expected at most {MAX_JSON_DEPTH} lists and dicts within each other, got "
            f"more at {where[:40]}..."
        )
        return
    if kind is list:
        for index, each in enumerate(value):
            yield from _problems(each, f"{where}[{index}]", depth + 1)
        return
    for key, each in value.items():
        if type(key) is not str:
            yield f"{at(where)}expected texts as keys, got {key!r}; use str(key)"
            return
        yield from _problems(each, f"{where}[{key!r}]", depth + 1)


def _type_text(kind: type) -> str:
    """Returns the name of a type, with what to use instead."""
    name = kind.__qualname__
    named = name if kind is PerProcess else type_name(kind)
    if name in _INSTEAD:
        return f"{named}; {_INSTEAD[name]}"
    if hasattr(kind, "item"):  # a number of NumPy or jax
        return f"{named}; use its item()"
    if hasattr(kind, "__next__"):
        return f"{named}; it has neither get_state nor state_dict"
    if hasattr(kind, "__iter__") and not hasattr(kind, "__len__"):
        return f"{named}; pass the iterator that iter() made of it"
    return f"{named}; convert it"


def _refuse(constant: str) -> Any:
    raise ValueError(f"JSON: expected a finite number, got {constant}")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(
            f"expected Unicode, got a text with the lone surrogate {text[e.start]!r}"
        ) from e


def _check_encoded(encoded: Encoded) -> Encoded:
    if len(encoded.data) > MAX_ENCODED_BYTES:
        raise ValueError(
            f"expected at most {MAX_ENCODED_BYTES} bytes, got {len(encoded.data)}; "
            "divide it, or keep it in the tree as an array"
        )
    return encoded
