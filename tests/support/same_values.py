"""Equality of values and states: also of their types, at every place."""

import math
from typing import Any

import numpy as np


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two states are equal, and of one type at every place."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            is_same(value, other[key]) for key, value in one.items()
        )
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype.str, one.shape, one.tobytes()) == (
            *(other.dtype.str, other.shape),
            other.tobytes(),
        )
    if type(one) is float:
        return math.copysign(1, one) == math.copysign(1, other) and one == other
    return bool(one == other)
