"""How two configs differ, field by field.

What only says where a model runs (its mesh) or which release wrote it is no
difference; nor is a list for a tuple, which is what JSON made of it.

>>> config_differences({"eps": 1e-06, "sizes": (1, 2)}, {"eps": 0.001, "sizes": [1, 2]})
['eps: expected 1e-06 as saved, got 0.001']
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from storesvc_client.trees.structure.descriptions import IGNORED

__all__ = ["config_differences"]

_ABSENT: Final = "nothing"


def config_differences(saved: Any, target: Any) -> list[str]:
    """Returns in what the fields of the target are not the saved ones.

    Args:
        saved: Plain data: dicts, lists, tuples, numbers, texts, dtypes.
        target: Likewise.
    """
    before, after = dict(_rows(saved, "")), dict(_rows(target, ""))
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key or 'config'}: expected {before.get(key, _ABSENT)} as saved, "
        f"got {after.get(key, _ABSENT)}"
        for key in keys
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
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
    """An attribute that was never set is one that is None."""
    return _ABSENT if value is None else repr(value)
