"""Limits of a document, checked before anything else looks at it.

What is read from a store may be hostile: nested a million deep, or a list of a
billion. ``check_json`` walks without recursion and stops at the first excess, so that
all other code may recurse, and costs a bounded multiple of what was read.
"""

from typing import Any, Final, TypeAlias

from storesvc_client.trees.structure.refusals import Place, refusal, shown

JSON: TypeAlias = Any
"""None, bool, int, float, str, or a list or str-keyed dict of these."""

MAX_DEPTH: Final = 192
"""Lists and objects within each other. A module within a module takes three."""

MAX_LEVELS: Final = 40
"""Modules and containers within each other. With what a static attribute may take,
this stays below ``MAX_DEPTH``: what is written can be read."""

MAX_NESTED: Final = 12
"""Values and descriptions within each other, in a static attribute."""

MAX_VALUES: Final = 20_000_000
"""Values of one document. A module of 100,000 small layers takes a third of that."""

MAX_BITS: Final = 64
"""Of one integer. Longer ones take long to write down, and as keys of a dict they can
be chosen to have one hash."""

MAX_COMPOUND_KEYS: Final = 100
"""Keys of one dict, or items of one set, that are tuples and the like: their hashes
can be chosen too."""

MAX_KEY_PARTS: Final = 16
"""Values of such a key, as it is hashed anew each time."""

MAX_NAME: Final = 1000
"""Characters of a key of a module or of JSON, which messages and paths repeat."""


def check_json(document: JSON, place: Place) -> None:
    """Returns if a document is JSON within the limits.

    Raises:
        StructureError: It is not.
    """
    level: list[Any] = [document]
    count = 0
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        count += len(level)
        if count > MAX_VALUES:
            raise refusal(place, f"at most {MAX_VALUES} values", "more")
        for value in level:
            if type(value) is list:
                deeper.extend(value)
            elif type(value) is dict:
                _check_keys(value, place)
                deeper.extend(value.values())
            else:
                _check_scalar(value, place)
            if len(deeper) > MAX_VALUES:
                raise refusal(place, f"at most {MAX_VALUES} values", "more")
        if not deeper:
            return
        level = deeper
    raise refusal(place, f"at most {MAX_DEPTH} levels of nesting", "more")


def _check_keys(value: dict[Any, Any], place: Place) -> None:
    for key in value:
        if type(key) is not str:
            raise refusal(place, "keys of JSON objects to be strings", shown(key))
        if len(key) > MAX_NAME:
            raise refusal(place, f"keys of at most {MAX_NAME} characters", shown(key))


def _check_scalar(value: Any, place: Place) -> None:
    if type(value) is int:
        if value.bit_length() > MAX_BITS:
            raise refusal(place, f"numbers of at most {MAX_BITS} bits", shown(value))
    elif value is not None and type(value) not in (str, float, bool):
        raise refusal(place, "JSON", shown(value))
