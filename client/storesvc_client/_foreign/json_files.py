"""JSON files of other projects: size and number of values are checked before they are
parsed, and no name may appear twice.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from storesvc_client._foreign.location import Location
from storesvc_client.errors import DataLossError

MAX_BYTES: Final = 128 << 20
"""Maximum bytes of a file; one that lists a million arrays has as many."""

MAX_TOKENS: Final = 20_000_000
"""Maximum commas, colons and opening brackets, each of which may become an object."""


def read_json(location: Location, path: str) -> tuple[Any, bytes]:
    """Returns the value of a JSON file, and its bytes.

    Raises:
        NotFoundError: There is no such file.
        DataLossError: It is too large or no JSON.
    """
    data = location.read(path, limit=MAX_BYTES)
    return parse_json(f"{location.url}/{path}", data), data


def parse_json(place: str, data: bytes | str) -> Any:
    """Returns the value of a JSON text.

    Args:
        place: Name of the text in messages.
        data: The text.

    Raises:
        DataLossError: It is no JSON, has too many values, is nested too deeply, or has
            an object with two fields of one name.
    """
    text = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    tokens = sum(map(text.count, (b",", b":", b"[", b"{")))
    if tokens > MAX_TOKENS:
        raise DataLossError(
            f"{place}: expected JSON of at most {MAX_TOKENS} values, got {tokens}; use "
            "another checkpoint"
        )
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        what = ascii(str(e))[1:-1][:200]
        raise DataLossError(
            f"{place}: expected JSON, got other text ({what}); use another checkpoint"
        ) from e


def as_object(place: str, value: Any) -> dict[str, Any]:
    """Returns a value that is to be a JSON object.

    Raises:
        DataLossError: It is another value.
    """
    if not isinstance(value, dict):
        raise DataLossError(
            f"{place}: expected a JSON object, got {type(value).__name__}; use another "
            "checkpoint"
        )
    return value


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} twice in one object")
        found[name] = value
    return found
