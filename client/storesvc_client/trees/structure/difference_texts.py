"""Differences between saved and given structures, merged for messages.

>>> places = [f"layers/{layer}/epsilon" for layer in (0, 1, 2)]
>>> each = [Difference(place, "1e-06", "0.001") for place in places]
>>> [str(one) for one in merge_layers(each)]
['layers/{0..2}/epsilon: expected 1e-06 as saved, got 0.001']
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import Final, NamedTuple

from storesvc_client.trees.structure.descriptions import EXECUTION

__all__ = [
    "ABSENT",
    "Difference",
    "is_execution",
    "merge_configs",
    "merge_layers",
]

ABSENT: Final = "nothing"
"""Text for a value that is missing on one side."""

_NUMBER: Final = re.compile(r"(?<![^/\[])\d+(?![^/@.\[\]])")
"""Part of a path that is the number of a layer or of an item."""

_PART: Final = re.compile(r"[/.@\[\]]+")


class Difference(NamedTuple):
    """One setting that differs."""

    path: str
    """Parts joined by "/"; parts of a config by "." and "[N]"."""
    saved: str
    given: str

    def __str__(self) -> str:
        return f"{self.path}: expected {self.saved} as saved, got {self.given}"


_KERNEL: Final = re.compile(r"(.*/)?attention_performer/impl(_decode)?")
"""Path of the attention kernel in EasyDeL's models, which the config selects."""

_CONFIGS: Final = frozenset({"config", "base_config", "text_config", "vision_config"})
"""Attribute names of configs that many modules share."""


_PLACEMENT: Final = frozenset(
    {"out_sharding", "sharding", "sharding_names", "sharding_rules", "mesh"}
    | {"eager_sharding"}
)
"""Metadata of a Variable that say where its value is, which a restore may change."""


def is_execution(difference: Difference) -> bool:
    """Returns whether a difference affects how or where a model is computed, not what
    it computes."""
    _, at, entry = difference.path.rpartition("@")
    if at and _PART.split(entry)[0] in _PLACEMENT:
        return True
    named = not EXECUTION.isdisjoint(_PART.split(difference.path))
    return named or _KERNEL.fullmatch(difference.path) is not None


def merge_configs(differences: Iterable[Difference]) -> list[Difference]:
    """Returns the differences with repeated ones in shared configs merged.

    Each is kept once, at its shortest path.
    """
    kept: dict[tuple[str, str, str], Difference] = {}
    for each in sorted(differences, key=lambda each: (len(each.path), each.path)):
        *above, name = _PART.split(each.path)
        shared = bool(above) and above[-1] in _CONFIGS
        kept.setdefault((name if shared else each.path, each.saved, each.given), each)
    return list(kept.values())


def merge_layers(differences: Iterable[Difference]) -> list[Difference]:
    """Returns the differences with those that repeat over layers merged into one each.

    A group that is not a product of ranges, one per part of the path, is kept
    unchanged.
    """
    groups: dict[tuple[str, str, str], list[Difference]] = defaultdict(list)
    for each in differences:
        groups[_NUMBER.sub("{}", each.path), each.saved, each.given].append(each)
    merged: list[Difference] = []
    for (pattern, saved, given), group in groups.items():
        numbers = [tuple(map(int, _NUMBER.findall(each.path))) for each in group]
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        is_whole = prod(map(len, columns)) == len(set(numbers)) == len(group)
        if len(group) == 1 or not is_whole:
            merged += group
            continue
        path = pattern
        for column in columns:
            path = path.replace("{}", _numbers(column), 1)
        merged.append(Difference(path, saved, given))
    return merged


def _numbers(column: list[int]) -> str:
    first, last = column[0], column[-1]
    if len(column) == 1:
        return str(first)
    if column == list(range(first, last + 1)):
        return f"{{{first}..{last}}}"
    return f"{{{','.join(map(str, column))}}}"
