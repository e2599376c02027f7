"""Parses JSON that other projects wrote, in bounded memory.

>>> parse_object(b'{"a": 1}', what="index.json")
{'a': 1}
>>> parse_object(b'{"a": 1, "a": 2}', what="index.json")
Traceback (most recent call last):
storesvc_client.errors.DataLossError: index.json: expected each name once, got 'a' twice
"""

import json
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from storesvc_client.errors import DataLossError

MAX_TOKENS: Final = 5_000_000
"""Maximum commas, colons and opening brackets: each may become a Python object, of 80
bytes on average."""


def parse_object(data: bytes, *, what: str) -> dict[str, Any]:
    """Returns the fields of a JSON object; the caller has bounded its size.

    Args:
        data: UTF-8.
        what: Name of the file for messages.

    Raises:
        DataLossError: It is no JSON object, has a name twice, or more than
            ``MAX_TOKENS`` values.
    """
    tokens = sum(map(data.count, (b",", b":", b"[", b"{")))
    if tokens > MAX_TOKENS:
        raise DataLossError(
            f"{what}: expected at most {MAX_TOKENS} values, got {tokens}"
        )

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DataLossError(
                f"{what}: expected each name once, got {twice[:200]!r} twice"
            )
        return fields

    try:
        fields = json.loads(
            data.decode(), object_pairs_hook=unique, parse_constant=_reject_constant
        )
    except RecursionError as e:
        raise DataLossError(f"{what}: expected JSON, got it nested too deeply") from e
    except ValueError as e:
        cause = ascii(str(e))[1:-1][:200]
        raise DataLossError(f"{what}: expected JSON, got other text ({cause})") from e
    except MemoryError as e:
        raise DataLossError(f"{what}: expected what fits into memory, got more") from e
    if not isinstance(fields, dict):
        raise DataLossError(
            f"{what}: expected a JSON object, got a {type(fields).__name__}"
        )
    return fields


def integers(value: Any, *, what: str) -> tuple[int, ...]:
    """Returns a list of JSON that holds sizes: integers of int64 from 0.

    Raises:
        DataLossError: It is another value.
    """
    if isinstance(value, list) and all(
        type(n) is int and 0 <= n < 2**63 for n in value
    ):
        return tuple(value)
    raise DataLossError(f"{what}: expected a list of sizes, got {ascii(value)[:200]}")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
