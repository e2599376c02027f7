"""Globs of leaf keys, and regular expressions.

A glob is matched part by part, parts being what "/" divides. Within a part, ``*``
is any text, ``?`` one character, ``[a-z]`` one of them, ``[!a-z]`` one of the
others. The part ``**`` is any number of parts, also none. Letters are matched by
case, and keys stand as they are listed (escaped).

A glob that is the key of a leaf, letter for letter, names that leaf alone; so a
key that holds brackets needs no quoting.

A compiled regular expression names the keys in which it is found, anywhere, as those
of partition rules do: ``^`` and ``$`` tie it to the ends.

>>> matching_keys("layers/**/kernel", ["layers/0/kernel", "layers/0/bias"])
['layers/0/kernel']
>>> matching_keys(re.compile("/[0-9]+/b"), ["layers/0/kernel", "layers/0/bias"])
['layers/0/bias']
"""

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import cache, partial, reduce
from typing import TypeAlias

Pattern: TypeAlias = str | re.Pattern[str]
"""A glob, or a compiled regular expression."""

Patterns: TypeAlias = Pattern | Iterable[Pattern]
"""One or several; a key is named where one of them names it."""


def matching_keys(glob: Pattern, keys: Collection[str]) -> list[str]:
    """Returns the keys that the glob, or the expression, names, in their order."""
    if isinstance(glob, re.Pattern):
        return [key for key in keys if glob.search(key)]
    if glob in keys:
        return [glob]
    pattern = _parts(glob)
    start = _past_stars({0}, pattern=pattern)
    # All readings of the pattern are followed side by side, so that none takes
    # long; and keys share most of their parts, so that few steps are new.
    follow = cache(partial(_follow, pattern=pattern))
    return [key for key in keys if len(pattern) in reduce(follow, _parts(key), start)]


def nearest_keys(glob: Pattern, keys: Collection[str]) -> list[str]:
    """Returns up to three keys that look most like the glob, best first."""
    import difflib

    if isinstance(glob, re.Pattern):
        glob = glob.pattern
    # Comparing is quadratic in length, and a tree may have very many leaves:
    # those that share most of the letters are compared in full.
    letters = set(glob)
    candidates = sorted(keys, key=lambda key: len(letters ^ set(key)))[:500]
    return difflib.get_close_matches(glob, candidates, n=3, cutoff=0.4)


def keys_below(glob: str, keys: Collection[str]) -> list[str]:
    """Returns the keys of the subtree that the text names, if it names one."""
    return [key for key in keys if key.startswith(glob.rstrip("/") + "/")]


def _parts(key: str) -> tuple[str, ...]:
    return tuple(key.split("/")) if key else ()


def _follow(
    reached: frozenset[int], part: str, *, pattern: tuple[str, ...]
) -> frozenset[int]:
    """Returns where in the pattern one may be behind one more part of a key."""
    stays = {at for at in reached if pattern[at : at + 1] == ("**",)}
    moves = {
        at + 1
        for at in reached - stays
        if at < len(pattern) and fnmatchcase(part, pattern[at])
    }
    return _past_stars(stays | moves, pattern=pattern)


def _past_stars(reached: set[int], *, pattern: tuple[str, ...]) -> frozenset[int]:
    """Returns also the places behind "**", which may be no part at all."""
    for at, part in enumerate(pattern):
        if part == "**" and at in reached:
            reached = reached | {at + 1}
    return frozenset(reached)
