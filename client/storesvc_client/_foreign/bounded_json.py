"""Parses JSON that other projects wrote, in bounded memory; no name may appear twice.

>>> parse_object(b'{"a": 1}', what="index.json")
{'a': 1}
>>> parse_object(b'{"a": 1, "a": 2}', what="index.json")
Traceback (most recent call last):
storesvc_client.errors.DataLossError: index.json: expected JSON with each name once, got 'a' twice; use another checkpoint
"""  # noqa: E501 - a message of an example is one line

import json
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, NoReturn

from storesvc_client._foreign.locations import Location
from storesvc_client.errors import DataLossError

MAX_BYTES: Final = 128 << 20
"""Maximum bytes of a file; one that lists a million arrays has as many."""

MAX_TOKENS: Final = 5_000_000
"""Maximum commas, colons and opening brackets: each may become a Python object, of 80
bytes on average."""

MAX_LISTED_TOKENS: Final = 20_000_000
"""The same, of a file that lists a million arrays with 20 values each."""

_ADVICE: Final = "use another checkpoint"


def read_json(location: Location, path: str) -> tuple[Any, bytes]:
    """Returns the value of a JSON file, in which NaN and Infinity are numbers, as
    Python writes them; and its bytes.
    """
    data = location.read(path, limit=MAX_BYTES)
    what = f"{location.url}/{path}"
    value = parse_json(data, what=what, allow_nan=True, max_tokens=MAX_LISTED_TOKENS)
    return value, data


def parse_object(data: bytes, *, what: str) -> dict[str, Any]:
    """Returns the fields of a JSON object; see ``parse_json``."""
    return as_object(parse_json(data, what=what), what=what)


def parse_json(
    data: bytes | str,
    *,
    what: str,
    allow_nan: bool = False,
    max_tokens: int = MAX_TOKENS,
) -> Any:
    """Returns the value of a JSON text; the caller has bounded its size.

    Args:
        data: The text; bytes are UTF-8.
        what: Name of the text for messages.
        allow_nan: Whether NaN and Infinity, which are not JSON, are numbers.
        max_tokens: Maximum commas, colons and opening brackets.

    Raises:
        DataLossError: It is no JSON, is nested too deeply, has an object with a name
            twice, or too many values.
    """
    # before a copy of the text is made
    if isinstance(data, bytes):
        tokens = sum(map(data.count, (b",", b":", b"[", b"{")))
    else:
        tokens = sum(map(data.count, ",:[{"))
    if tokens > max_tokens:
        raise DataLossError(
            f"{what}: expected JSON of at most {max_tokens} values, got {tokens}; "
            f"{_ADVICE}"
        )
    constant = None if allow_nan else _reject_constant
    try:
        text = data if isinstance(data, str) else data.decode()
        return json.loads(
            text, object_pairs_hook=partial(_unique, what), parse_constant=constant
        )
    except RecursionError as e:
        raise DataLossError(
            f"{what}: expected JSON, got it nested too deeply; {_ADVICE}"
        ) from e
    except ValueError as e:
        cause = ascii(str(e))[1:-1][:200]
        raise DataLossError(
            f"{what}: expected JSON, got other text ({cause}); {_ADVICE}"
        ) from e
    except MemoryError as e:
        raise DataLossError(
            f"{what}: expected what fits into memory, got more; {_ADVICE}"
        ) from e


def as_object(value: Any, *, what: str) -> dict[str, Any]:
    """Returns a value that is to be a JSON object."""
    if not isinstance(value, dict):
        raise DataLossError(
            f"{what}: expected a JSON object, got {type(value).__name__}; {_ADVICE}"
        )
    return value


def integers(value: Any, *, what: str) -> tuple[int, ...]:
    """Returns a list of JSON that holds sizes: integers of int64 from 0."""
    if isinstance(value, list) and all(
        type(n) is int and 0 <= n < 2**63 for n in value
    ):
        return tuple(value)
    raise DataLossError(f"{what}: expected a list of sizes, got {ascii(value)[:200]}")


def _unique(what: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the fields of an object, if each name is there once."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise DataLossError(
                f"{what}: expected JSON with each name once, got {name[:200]!r} "
                f"twice; {_ADVICE}"
            )
        fields[name] = value
    return fields


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
