"""States of data iterators and random generators as values of JSON, and back.

The object that gave a state gets an equal one back, of the same types at every place: a
tuple stays a tuple, a number a key, an array of NumPy an array. What JSON lacks is a
dict with one key, which begins with ``%``:

- ``{"%tuple": [...]}``
- ``{"%bytes": BASE64}``
- ``{"%array": [DTYPE, SHAPE, BASE64]}``, an array of NumPy; a number of NumPy has null
  as its shape
- ``{"%dict": [[KEY, VALUE], ...]}``, a dict with integers as keys, or with a text that
  begins with ``%``

>>> to_json({"next_index": 7, "slice": (1, 5)})
{'next_index': 7, 'slice': {'%tuple': [1, 5]}}
>>> from_json({"next_index": 7, "slice": {"%tuple": [1, 5]}})
{'next_index': 7, 'slice': (1, 5)}
"""

import math
from base64 import b64decode, b64encode
from typing import Any, Final

_ARRAY_KINDS: Final = frozenset("biufc")
"""Kinds of dtypes whose bytes are their values: bool, integers and floats."""

MAX_STATE_DEPTH: Final = 50
"""Maximum number of lists, tuples and dicts within each other; in JSON they are four
times as many at most."""


def to_json(state: Any, where: str = "", depth: int = 0) -> Any:
    """Returns a state as a value of JSON.

    Args:
        state: None, a ``bool``, ``int``, finite ``float``, ``str``, ``bytes``, an array
            or a number of NumPy, or lists, tuples and dicts of these, with texts or
            integers as keys.
        where: Place of the value in the state, for messages.
        depth: Number of lists, tuples and dicts around it.

    Raises:
        ValueError: It holds anything else; the message says where.
    """
    kind = type(state)
    if state is None or kind in (bool, int, str):
        return state
    if kind is float:
        if not math.isfinite(state):
            raise ValueError(f"{at(where)}expected a finite number, got {state}")
        return state
    if kind is bytes:
        return {"%bytes": b64encode(state).decode()}
    if kind not in (list, tuple, dict):
        return {"%array": _of_array(state, where)}
    if depth == MAX_STATE_DEPTH:
        raise ValueError(
            f"expected at most {MAX_STATE_DEPTH} lists and dicts within each other, "
            f"got more at {where[:40]}..."
        )
    if kind is dict:
        return _of_dict(state, where, depth + 1)
    values = [to_json(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(state)]
    return values if kind is list else {"%tuple": values}


def from_json(value: Any) -> Any:
    """Returns the state that ``to_json`` returned as this value.

    Raises:
        ValueError: It returns no such value.
    """
    if type(value) is list:
        return [from_json(each) for each in value]
    if type(value) is not dict:
        return value
    tag = next(iter(value), "")
    if not tag.startswith("%"):
        return {key: from_json(each) for key, each in value.items()}
    try:
        return _of_tagged(tag, value[tag])
    except (TypeError, ValueError) as e:
        raise ValueError(f"expected what {tag!r} holds in a state: {e}") from e


def at(where: str) -> str:
    """Returns the beginning of a message about a place in a value."""
    return f"at {where}: " if where else ""


def type_name(kind: type) -> str:
    """Returns the name of a type in messages."""
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def _of_dict(state: dict[Any, Any], where: str, depth: int) -> dict[str, Any]:
    is_plain = True
    for key in state:
        if type(key) is str:
            is_plain = is_plain and not key.startswith("%")
        elif type(key) is int:
            is_plain = False
        else:
            raise ValueError(
                f"{at(where)}expected texts or integers as keys, got {key!r}"
            )
    pairs = [[k, to_json(v, f"{where}[{k!r}]", depth)] for k, v in state.items()]
    return dict(pairs) if is_plain else {"%dict": pairs}


def _of_array(state: Any, where: str) -> list[Any]:
    kind = type(state)
    is_number = any(base.__qualname__ == "generic" for base in kind.__mro__)
    if kind.__module__ == "numpy" and (kind.__qualname__ == "ndarray" or is_number):
        dtype = state.dtype
        if dtype.kind in _ARRAY_KINDS:
            text = b64encode(state.tobytes()).decode()
            return [dtype.str, None if is_number else list(state.shape), text]
        raise ValueError(f"{at(where)}expected an array of numbers, got {dtype}")
    raise ValueError(
        f"{at(where)}expected a value of JSON, a tuple, bytes or an array of NumPy, "
        f"got {type_name(kind)}"
    )


def _of_tagged(tag: str, content: Any) -> Any:
    match tag:
        case "%tuple":
            return tuple(from_json(each) for each in content)
        case "%bytes":
            return b64decode(content, validate=True)
        case "%dict":
            return {key: from_json(each) for key, each in content}
        case "%array":
            return _to_array(*content)
        case _:
            raise ValueError("the writer of the checkpoint is of a newer release")


def _to_array(dtype: str, shape: list[int] | None, text: str) -> Any:
    import numpy as np

    found = np.frombuffer(b64decode(text, validate=True), np.dtype(dtype))
    return found[0] if shape is None else found.reshape(shape).copy()
