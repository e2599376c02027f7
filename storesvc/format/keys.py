"""Keys of leaves: each path of a tree as one text.

A path is a sequence of parts; a part is a text and a letter for its kind
(``LeafTable.path_kinds``). The key joins the escaped texts by "/". The escape is
injective, so two paths share a key only where their parts have the same texts (``0``
and ``"0"``); such trees are rejected with an error that names both.

>>> escape_part("a/b%")
'a%2Fb%25'
>>> join_key(["layers", "0", ".."])
'layers/0/%2E%2E'
>>> split_key('layers/0/%2E%2E')
('layers', '0', '..')

An item is a value that a checkpoint holds next to its tree, as rows of its leaf table.
Its key begins with a part that the escape gives to no path of a tree, so no leaf can be
taken for an item, whatever its path. Rows of items follow the rows of the tree; so the
ordinals of a tree's chunks do not depend on the items saved with it.

>>> item_key("config")
'%item/config'
>>> item_of("%item/data/3")
ItemName(item='data', process=3)
>>> describe("params/w"), describe("%item/data/3")
("leaf 'params/w'", "item 'data' of process 3")
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, takewhile
from operator import lt
from typing import Final, Protocol

from storesvc.format.names import InvalidNameError, check_item
from storesvc_proto.v1 import tree_pb2 as pb

MAX_ITEMS: Final = 64
"""Maximum names of items of a checkpoint."""

MAX_ENCODED_BYTES: Final = 1 << 30
"""Maximum bytes of an encoded value."""

ENCODED_KINDS: Final = frozenset(
    {pb.LEAF_KIND_TEXT, pb.LEAF_KIND_JSON, pb.LEAF_KIND_BYTES, pb.LEAF_KIND_INTEGER}
)
"""Kinds of leaves whose elements are the bytes of an encoded value."""

ITEM_KINDS: Final = ENCODED_KINDS - {pb.LEAF_KIND_INTEGER}
"""Kinds of items."""

_PREFIX: Final = "%item/"
_PROCESS: Final = re.compile(r"0|[1-9][0-9]{0,5}")


class InvalidItemError(ValueError):
    """The items of a leaf table break a rule."""

    def __init__(self, message: str, item: str) -> None:
        super().__init__(message)
        self.item = item
        """Name of the item; its key if that has no name."""


@dataclass(frozen=True, slots=True)
class ItemName:
    """The name of an item, or of the part of it that one process wrote."""

    item: str
    process: int | None = None
    """Number of the process; None: the item is one value for all processes."""

    @property
    def key(self) -> str:
        return item_key(self.item, self.process)

    @property
    def path_kinds(self) -> str:
        return "rk" if self.process is None else "rkp"


class ItemRow(Protocol):
    """The columns of a leaf table that the rules of items are about."""

    @property
    def key(self) -> str:
        """Key of the row."""

    @property
    def path_kinds(self) -> str:
        """One letter for each part of the key."""

    @property
    def kind(self) -> "pb.LeafKind.ValueType":
        """Kind of the leaf."""


def kind_text(kind: "pb.LeafKind.ValueType") -> str:
    """Returns the name of a kind of encoded values: "text", "json", "bytes" or
    "integer"."""
    return pb.LeafKind.Name(kind).removeprefix("LEAF_KIND_").lower()


def is_item(key: str) -> bool:
    """Returns whether a key is that of an item, valid or not."""
    return key.startswith(_PREFIX)


def item_key(item: str, process: int | None = None) -> str:
    """Returns the key of an item, or of the value that one process wrote."""
    return f"{_PREFIX}{item}" if process is None else f"{_PREFIX}{item}/{process}"


def parse_item_key(key: str) -> ItemName:
    """Returns the item of a key."""
    item, slash, process = key.removeprefix(_PREFIX).partition("/")
    try:
        check_item(item)
    except InvalidNameError as e:
        raise InvalidItemError(str(e), item) from e
    if slash and not _PROCESS.fullmatch(process):
        raise InvalidItemError(
            f"item {item!r}: expected the number of a process, got {process!r}", item
        )
    return ItemName(item, int(process) if slash else None)


def describe(key: str) -> str:
    """Returns the name of a leaf or an item in messages."""
    if not is_item(key):
        return f"leaf {key!r}"
    item, slash, process = key.removeprefix(_PREFIX).partition("/")
    return f"item {item!r} of process {process}" if slash else f"item {item!r}"


def count_tree_rows(keys: Sequence[str]) -> int:
    """Returns how many rows, the first ones, belong to the tree and not to items."""
    return len(keys) - sum(1 for _ in takewhile(is_item, reversed(keys)))


def check_items(rows: Sequence[ItemRow]) -> None:
    """Rejects rows that cannot be the items of a checkpoint.

    Raises:
        InvalidItemError: A name, kind or path kind breaks a rule, a name has values
            of only some processes, or there are too many names.
    """
    processes: dict[str, set[int]] = {}
    kinds: dict[str, pb.LeafKind.ValueType] = {}
    for row in rows:
        name = parse_item_key(row.key)
        if row.path_kinds != name.path_kinds:
            raise InvalidItemError(
                f"{describe(row.key)}: expected the path kinds {name.path_kinds!r}, "
                f"got {row.path_kinds!r}",
                name.item,
            )
        if row.kind not in ITEM_KINDS:
            raise InvalidItemError(
                f"{describe(row.key)}: expected text, JSON or bytes, got the kind "
                f"{pb.LeafKind.Name(row.kind)}",
                name.item,
            )
        if kinds.setdefault(name.item, row.kind) != row.kind:
            raise InvalidItemError(
                f"item {name.item!r}: expected values of one kind from all processes, "
                f"got {kind_text(kinds[name.item])} and {kind_text(row.kind)}",
                name.item,
            )
        if name.process is not None:
            processes.setdefault(name.item, set()).add(name.process)
    for item, found in processes.items():
        if found != set(range(len(found))):
            raise InvalidItemError(
                f"item {item!r}: expected a value of each of the processes 0 to "
                f"{max(found)}, got {len(found)} values",
                item,
            )
    if len(kinds) > MAX_ITEMS:
        raise InvalidItemError(
            f"expected at most {MAX_ITEMS} items, got {len(kinds)}", max(kinds)
        )


MAX_KEY_BYTES: Final = 4096
"""Maximum UTF-8 bytes of a key."""

PATH_KINDS: Final = frozenset("kntiaf")
"""Letters of ``LeafTable.path_kinds``."""

INTEGER_KINDS: Final = frozenset("nif")
"""Letters whose parts are integers."""

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]*")
_UNSAFE: Final = re.compile(r"[%/\x00-\x1f\x7f]")
_ESCAPED: Final = re.compile(r"%([0-9A-F]{2})")
_WHOLE: Final = {"": "%", ".": "%2E", "..": "%2E%2E"}


class InvalidKeyError(ValueError):
    """The format does not allow a path or a key."""


@lru_cache(maxsize=4096)  # the keys of a tree share most of their parts
def escape_part(text: str) -> str:
    """Escapes a part of a key: the result is never empty, "." or "..", and has no "/"
    and no control characters."""
    if text in _WHOLE:
        return _WHOLE[text]
    return _UNSAFE.sub(lambda m: f"%{ord(m[0]):02X}", text)


@lru_cache(maxsize=4096)
def unescape_part(text: str) -> str:
    """Reverts ``escape_part``."""
    part = "" if text == "%" else _ESCAPED.sub(lambda m: chr(int(m[1], base=16)), text)
    if escape_part(part) != text:
        raise InvalidKeyError(f"key part {text!r}: not an escape of this format")
    return part


def join_key(parts: Iterable[str]) -> str:
    """Returns the key of a path.

    Raises:
        InvalidKeyError: The key is longer than 4096 bytes, or is not Unicode (it
            holds a lone surrogate).
    """
    key = "/".join(map(escape_part, parts))
    check_key(key)
    return key


def check_key(key: str) -> None:
    """Rejects a key that is too long or no Unicode, however its parts were escaped."""
    if len(key) * 4 <= MAX_KEY_BYTES and key.isascii():
        return
    try:
        size = len(key.encode())
    except UnicodeEncodeError as e:
        raise InvalidKeyError(
            f"leaf {key!r}: expected Unicode, got a lone surrogate; rename it"
        ) from e
    if size > MAX_KEY_BYTES:
        raise InvalidKeyError(
            f"leaf {key[:80]!r}...: expected a key of at most {MAX_KEY_BYTES} bytes, "
            f"got {size}; shorten its path"
        )


def split_key(key: str) -> tuple[str, ...]:
    """Returns the parts of a key.

    Raises:
        InvalidKeyError: The text is not a key.
    """
    return tuple(map(unescape_part, key.split("/"))) if key else ()


def fits_key(path_kinds: str, key: str) -> bool:
    """Returns whether `path_kinds` fit the parts of a key."""
    if not key:
        return not path_kinds
    above, separator, last = key.rpartition("/")
    fits = _fits_above(path_kinds[:-1], above) if separator else len(path_kinds) == 1
    part = unescape_part(last)  # raises, even if the parts above do not fit
    return fits and _fits_part(part, path_kinds[-1])


@lru_cache(maxsize=256)  # neighbouring leaves share their parent
def _fits_above(path_kinds: str, above: str) -> bool:
    parts = tuple(map(unescape_part, above.split("/")))
    return len(parts) == len(path_kinds) and all(map(_fits_part, parts, path_kinds))


@lru_cache(maxsize=4096)
def _fits_part(part: str, kind: str) -> bool:
    return kind in PATH_KINDS and (
        kind not in INTEGER_KINDS or _INTEGER.fullmatch(part) is not None
    )


def check_keys(keys: Sequence[str]) -> None:
    """Rejects keys that cannot be the leaves of one tree."""
    if not all(map(lt, keys, islice(keys, 1, None))):
        before, after = next(pair for pair in pairwise(keys) if pair[0] >= pair[1])
        raise InvalidKeyError(
            f"leaf {after!r}: expected keys in strictly ascending order, "
            f"got it after {before!r}"
        )
    if len(keys) > 1 and not keys[0]:
        raise InvalidKeyError(f"leaf {keys[1]!r} is below the leaf ''")
    known, last = set(keys), ""
    for key in keys:
        above = key[: max(0, key.rfind("/"))]
        if above == last:  # checked with the leaf before
            continue
        last, at = above, key.find("/")
        while at >= 0:
            if key[:at] in known:
                raise InvalidKeyError(f"leaf {key!r} is below the leaf {key[:at]!r}")
            at = key.find("/", at + 1)
