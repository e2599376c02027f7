"""Refusals of a stored structure: one class, and the words that all of them use."""

from typing import Any, Final, TypeAlias

from storesvc_client.errors import StructureError

OTHER: Final = "the document is damaged or not of this library; use another checkpoint"
"""What to do about a document that no encoder of ours writes."""

Place: TypeAlias = object
"""What ``str`` makes the place of; made only where it is told."""

_SHOWN: Final = 80


def refusal(
    place: Place, expected: str, got: str, advice: str = OTHER
) -> StructureError:
    """Returns the error for a place of a document."""
    return StructureError(f"{place}: expected {expected}, got {got}; {advice}")


def shown(value: Any) -> str:
    """Returns a few words for any JSON value; never more, and never its contents."""
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
    return f"a {type(value).__name__}"
