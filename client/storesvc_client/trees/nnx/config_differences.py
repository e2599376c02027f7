"""Compares two configs field by field.

Fields that select where a model runs (its mesh) or record which release wrote it are
ignored. A list equals a tuple, because JSON turns tuples into lists.

>>> saved = {"eps": 1e-06, "sizes": (1, 2)}
>>> [str(each) for each in config_differences(saved, {"eps": 0.001, "sizes": [1, 2]})]
['eps: expected 1e-06 as saved, got 0.001']
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from storesvc_client.trees.structure.descriptions import IGNORED
from storesvc_client.trees.structure.difference_texts import ABSENT, Difference

__all__ = ["config_differences"]


def config_differences(
    saved: Any, target: Any, *, common: bool = False
) -> list[Difference]:
    """Returns the fields of the target that differ from the saved ones.

    Args:
        saved: Plain data: dicts, lists, tuples, numbers, texts, dtypes.
        target: Plain data of the same kinds.
        common: Compare only fields that both have.
    """
    before, after = dict(_rows(saved, "")), dict(_rows(target, ""))
    keys = [key for key in before if key in after or not common]
    keys += [key for key in after if key not in before and not common]
    return [
        Difference(key or "config", before.get(key, ABSENT), after.get(key, ABSENT))
        for key in keys
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]


def _rows(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name not in IGNORED:
                yield from _rows(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from _rows(item, f"{key}[{index}]")
    else:
        yield key, "[]" if isinstance(value, (list, tuple)) else _text(value)


def _text(value: Any) -> str:
    """Returns the text of a value; an attribute that is None counts as absent."""
    if _is_dtype(value):  # a config that went through JSON has only the name
        return repr(np.dtype(value).name)
    return ABSENT if value is None else repr(value)


def _is_dtype(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, np.generic)
    return is_class or isinstance(value, (np.dtype, type(jnp.float32)))
