"""Checks labels, metrics and single arguments before anything is sent."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from storesvc_client._values.key_patterns import Pattern
from storesvc_client._values.resource_names import is_text
from storesvc_client.errors import InvalidRequestError

MAX_ENTRIES: Final = 64
"""Maximum labels, and maximum metrics, of a checkpoint or a run."""

MAX_TEXT_BYTES: Final = 256
"""Maximum UTF-8 bytes of a label's key and value, and of a metric's key."""

_SHOWN: Final = 60
"""Maximum characters of an argument that a message repeats."""


def checked_labels(place: str, labels: object) -> dict[str, str]:
    """Returns labels as a dict.

    Args:
        place: Call, for the message: "save to prod/llama-8b".
        labels: Texts by key, or None.

    Raises:
        InvalidRequestError: They are of another type, too many or too long.
    """
    found = {}
    for key, text in _entries(f"{place}: labels=", labels).items():
        if not is_text(text) or len(text.encode()) > MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{place}: labels=: expected a text of at most {MAX_TEXT_BYTES} bytes "
                f"for {key!r}, got {shown(text)}"
            )
        found[key] = text
    return found


def checked_metrics(place: str, metrics: object) -> dict[str, float]:
    """Returns metrics as a dict of floats.

    Args:
        place: Call, for the message: "save to prod/llama-8b".
        metrics: Numbers by key, or None.

    Raises:
        InvalidRequestError: They are of another type, too many, or a key is too long.
    """
    found = {}
    for key, value in _entries(f"{place}: metrics=", metrics).items():
        try:
            if isinstance(value, str | bytes | bytearray):  # float() would parse it
                raise TypeError
            found[key] = float(value)
        except (TypeError, ValueError, OverflowError) as e:
            raise InvalidRequestError(
                f"{place}: metrics=: expected a number for {key!r}, got {shown(value)}"
            ) from e
    return found


def checked_cast(place: str, cast: object) -> str | None:
    """Returns the name of the dtype that floating-point leaves are cast to, or None.

    Args:
        place: Argument, for the message: "export of prod/llama-8b@500: cast=".
        cast: The argument.

    Raises:
        InvalidRequestError: It is not a floating-point dtype of the format.
    """
    from storesvc.format.dtypes import floating_name  # imports NumPy

    name = None if cast is None else floating_name(cast)
    if name is None and cast is not None:
        raise InvalidRequestError(
            f"{place}: expected a floating-point dtype such as 'bfloat16', got {cast!r}"
        )
    return name


def checked_texts(place: str, texts: object) -> list[str]:
    """Returns one or several texts as a list.

    Args:
        place: Argument, for the message: "restore of prod/llama-8b@500: select=".
        texts: A text, or an iterable of texts.

    Raises:
        InvalidRequestError: They are of another type.
    """
    if isinstance(texts, str):
        return [texts]
    if not isinstance(texts, Iterable) or isinstance(texts, bytes | bytearray):
        raise InvalidRequestError(f"{place}: expected texts, got {shown(texts)}")
    found = list(texts)
    for text in found:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{place}: expected texts, got {shown(text)}")
    return found


def checked_patterns(place: str, patterns: object) -> list[Pattern]:
    """Returns one or several globs or compiled regular expressions as a list.

    Args:
        place: Argument, for the message: "restore of prod/llama-8b@500: select=".
        patterns: A pattern, or an iterable of patterns.

    Raises:
        InvalidRequestError: They are of another type.
    """
    given: Iterable[Any] = [patterns]
    if isinstance(patterns, Iterable) and not isinstance(
        patterns, str | bytes | bytearray
    ):
        given = patterns
    found: list[Pattern] = []
    for pattern in given:
        # an expression may be one of bytes
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"{place}: expected globs or compiled regular expressions, got "
                f"{shown(pattern)}"
            )
        found.append(pattern)
    return found


def checked_text(place: str, text: object) -> str:
    """Returns a text; "" for None.

    Args:
        place: Argument, for the message: "update of prod/llama-8b: etag=".
        text: The text, or None.

    Raises:
        InvalidRequestError: It is of another type.
    """
    if text is None:
        return ""
    if not isinstance(text, str) or not is_text(text):
        raise InvalidRequestError(f"{place}: expected a text, got {shown(text)}")
    return text


def checked_flag(place: str, flag: object) -> bool | None:
    """Returns a bool, or None.

    Args:
        place: Argument, for the message: "update of prod/llama-8b: pinned=".
        flag: The bool, or None.

    Raises:
        InvalidRequestError: It is of another type.
    """
    if flag is not None and not isinstance(flag, bool):
        raise InvalidRequestError(f"{place}: expected a bool, got {shown(flag)}")
    return flag


def checked_choice(place: str, value: object, choices: Any) -> None:
    """Raises an error if a value is not an argument of a ``Literal``.

    Raises:
        InvalidRequestError: The ``Literal`` does not list it.
    """
    if value not in get_args(choices):
        expected = ", ".join(map(repr, get_args(choices)))
        raise InvalidRequestError(
            f"{place}: expected one of {expected}, got {shown(value)}"
        )


def _entries(place: str, given: object) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{place}: expected a mapping, got {shown(given)}")
    if len(given) > MAX_ENTRIES:
        raise InvalidRequestError(
            f"{place}: expected at most {MAX_ENTRIES} entries, got {len(given)}"
        )
    for key in given:
        if not is_text(key) or not 1 <= len(key.encode()) <= MAX_TEXT_BYTES:
            raise InvalidRequestError(
                f"{place}: expected texts of 1 to {MAX_TEXT_BYTES} bytes as keys, got "
                f"{shown(key)}"
            )
    return dict(given)


def shown(value: object) -> str:
    """Returns an argument for a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
