"""Errors for a stored structure, and the wording that they share."""

from typing import Any, Final, TypeAlias

from storesvc_client.errors import StructureError

CORRUPT: Final = (
    "the document is corrupt or was not written by this library; use another checkpoint"
)
"""Advice for a document that no encoder of this library writes."""

Place: TypeAlias = object
"""Place in a document; its ``str`` is computed only for a message."""

GIVE_CODE: Final = "give the model's code in model=: its class, or a factory"
"""Advice for a value that no document can hold."""

MAX_WORDS: Final = 200
"""Maximum characters of a text that a document controls."""

_SHOWN: Final = 80


class Within:
    """A place inside another; its text is computed only for a message."""

    __slots__ = ("_key", "_outer")

    def __init__(self, outer: Place, key: object) -> None:
        self._outer = outer
        self._key = key

    def __str__(self) -> str:
        """Returns the keys from the outermost on, joined by "/"."""
        parts: list[str] = []
        place: Place = self
        while isinstance(place, Within):
            key = place._key  # noqa: SLF001 - its own class
            parts.append(str(key) if type(key) is int else shown(key))
            place = place._outer  # noqa: SLF001 - its own class
        return "/".join([str(place), *reversed(parts)])


def structure_error(
    place: Place, expected: str, got: str, advice: str = CORRUPT
) -> StructureError:
    """Returns the error for a place of a document."""
    where, what, found = map(printable, (str(place), expected, got))
    return StructureError(f"{where}: expected {what}, got {found}; {advice}")


def printable(text: str) -> str:
    """Returns a document's text for a terminal: ASCII, one line, shortened."""
    half = MAX_WORDS // 2
    if len(text) > MAX_WORDS:
        text = f"{text[:half]}...{text[-half:]}"
    return escaped(text)


def escaped(text: str) -> str:
    """Returns a text with control and non-ASCII characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in text
    )


def shown(value: Any) -> str:
    """Returns a short summary of any JSON value; never the full contents."""
    match value:
        case dict():
            keys = ", ".join(shown(key) for key in list(value)[:3])
            return f"an object of {len(value)} entries ({keys})"
        case list():
            return f"a list of {len(value)}"
        case str():
            return ascii(value[:_SHOWN]) + ("..." if len(value) > _SHOWN else "")
        case int() if value.bit_length() > 64:
            return f"a number of {value.bit_length()} bits"
        case None | bool() | int() | float():
            return repr(value)
        case _:
            return f"a {type(value).__name__}"
