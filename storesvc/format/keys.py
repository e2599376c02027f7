"""Keys of leaves: each path of a tree as one text.

A path is a sequence of parts; a part is a text and a letter for its kind
(``LeafTable.path_kinds``). The key joins the escaped texts by "/". The escape is
injective, so two paths share a key only where their parts have the same texts
(``0`` and ``"0"``); such trees are rejected with an error that names both.

>>> escape_part("a/b%")
'a%2Fb%25'
>>> join_key(["layers", "0", ".."])
'layers/0/%2E%2E'
>>> split_key('layers/0/%2E%2E')
('layers', '0', '..')
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice, pairwise
from operator import lt
from typing import Final

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
    """Reverts ``escape_part``.

    Raises:
        InvalidKeyError: No part has that escape.
    """
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
    """Rejects a key that is too long or no Unicode, however its parts were escaped.

    Raises:
        InvalidKeyError: As ``join_key``.
    """
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
    """Returns whether `path_kinds` fit the parts of a key.

    Raises:
        InvalidKeyError: The text is not a key.
    """
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
    """Rejects keys that cannot be the leaves of one tree.

    Raises:
        InvalidKeyError: The keys are not strictly ascending, or one is an
            ancestor of another.
    """
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
