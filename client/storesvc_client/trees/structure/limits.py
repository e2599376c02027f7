"""Limits of a document, checked before any other code reads it.

Stored data may be hostile: nested a million levels deep, or a list of a billion items.
``check_json`` walks without recursion and stops at the first limit exceeded. Other code
may therefore recurse, and its cost is a bounded multiple of the bytes read.
"""

from typing import Any, Final, TypeAlias

from storesvc_client.trees.structure.structure_errors import (
    Place,
    shown,
    structure_error,
)

JSON: TypeAlias = Any
"""None, bool, int, float, str, or a list or str-keyed dict of these."""

MAX_DEPTH: Final = 192
"""Maximum nesting of lists and objects. One level of modules takes three."""

MAX_LEVELS: Final = 40
"""Maximum nesting of modules and containers. With the maximum of a static attribute, it
stays below ``MAX_DEPTH``: every document that is written can be read."""

MAX_NESTED: Final = 12
"""Maximum nesting of values and descriptions in a static attribute."""

MAX_VALUES: Final = 20_000_000
"""Maximum values of one document. A module of 100,000 small layers needs a third."""

MAX_BITS: Final = 64
"""Maximum bits of one integer. Longer ones are slow to print, and as keys of a dict
they can be chosen to have one hash."""

MAX_COMPOUND_KEYS: Final = 100
"""Maximum keys of one dict, or items of one set, that are tuples or other compound
values; their hashes can be chosen to collide, too."""

MAX_KEY_PARTS: Final = 16
"""Maximum values in one compound key, which is hashed at each lookup."""

MAX_NAME: Final = 1000
"""Maximum characters of a key; messages and paths repeat it."""


def check_json(document: JSON, place: Place) -> None:
    """Returns if a document is JSON within the limits.

    Raises:
        StructureError: The document is not JSON, or exceeds a limit.
    """
    level: list[Any] = [document]
    count = 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        count += len(level)
        if count > MAX_VALUES:
            raise structure_error(place, f"at most {MAX_VALUES} values", "more")
        for value in level:
            if type(value) is list:
                deeper.extend(value)
            elif type(value) is dict:
                _check_keys(value, place)
                deeper.extend(value.values())
            else:
                _check_scalar(value, place)
            if len(deeper) > MAX_VALUES:
                raise structure_error(place, f"at most {MAX_VALUES} values", "more")
        if not deeper:
            return
        level = deeper
    raise structure_error(place, f"at most {MAX_DEPTH} levels of nesting", "more")


def _check_keys(value: dict[Any, Any], place: Place) -> None:
    for key in value:
        if type(key) is not str:
            raise structure_error(place, "strings as keys of JSON objects", shown(key))
        if len(key) > MAX_NAME:
            raise structure_error(
                place, f"keys of at most {MAX_NAME} characters", shown(key)
            )


def _check_scalar(value: Any, place: Place) -> None:
    if type(value) is int:
        if value.bit_length() > MAX_BITS:
            raise structure_error(
                place, f"numbers of at most {MAX_BITS} bits", shown(value)
            )
    elif value is not None and type(value) not in (str, float, bool):
        raise structure_error(place, "JSON", shown(value))
