"""Matches leaf keys with globs and regular expressions.

A glob is matched part by part; "/" separates parts. Within a part, ``*`` matches any
text, ``?`` one character, ``[a-z]`` one of a set, ``[!a-z]`` one outside of it. The
part ``**`` matches any number of parts, including none. Matching is case-sensitive, on
keys as they are listed (escaped).

A glob that equals the key of a leaf matches only that leaf, so keys with brackets need
no quoting.

A compiled regular expression matches the keys in which it is found, at any position, as
in partition rules: ``^`` and ``$`` anchor it.

>>> matching_keys("layers/**/kernel", ["layers/0/kernel", "layers/0/bias"])
['layers/0/kernel']
>>> matching_keys(re.compile("/[0-9]+/b"), ["layers/0/kernel", "layers/0/bias"])
['layers/0/bias']
"""

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cache, partial, reduce
from glob import escape
from typing import TypeAlias

Pattern: TypeAlias = str | re.Pattern[str]
"""A glob, or a compiled regular expression."""

Patterns: TypeAlias = Pattern | Iterable[Pattern]
"""One or several patterns; a key matches if one of them matches."""


def matching_keys(glob: Pattern, keys: Collection[str]) -> list[str]:
    """Returns the keys that match the glob or the expression, in their order."""
    if isinstance(glob, re.Pattern):
        return [key for key in keys if glob.search(key)]
    if glob in keys:
        return [glob]
    pattern = _parts(glob)
    start = _past_stars({0}, pattern=pattern)
    # All states of the pattern advance together (an NFA), which bounds the time; keys
    # share most of their parts, so the cache answers most steps.
    follow = cache(partial(_follow, pattern=pattern))
    return [key for key in keys if len(pattern) in reduce(follow, _parts(key), start)]


def nearest_keys(glob: Pattern, keys: Collection[str]) -> list[str]:
    """Returns up to three keys that are most similar to the glob, best first."""
    import difflib

    if isinstance(glob, re.Pattern):
        glob = glob.pattern
    # The comparison is quadratic in length, and a tree may have very many leaves: only
    # those that share the most letters are compared.
    letters = set(glob)
    candidates = sorted(keys, key=lambda key: len(letters ^ set(key)))[:500]
    return difflib.get_close_matches(glob, candidates, n=3, cutoff=0.4)


def keys_below(glob: str, keys: Collection[str]) -> list[str]:
    """Returns the keys of the subtree below a key, if there is one."""
    return [key for key in keys if key.startswith(glob.rstrip("/") + "/")]


def _parts(key: str) -> tuple[str, ...]:
    return tuple(key.split("/")) if key else ()


def _follow(
    reached: frozenset[int], part: str, *, pattern: tuple[str, ...]
) -> frozenset[int]:
    """Returns the positions in the pattern after one more part of a key."""
    stays = {at for at in reached if pattern[at : at + 1] == ("**",)}
    moves = {
        at + 1
        for at in reached - stays
        if at < len(pattern) and fnmatchcase(part, pattern[at])
    }
    return _past_stars(stays | moves, pattern=pattern)


def _past_stars(reached: set[int], *, pattern: tuple[str, ...]) -> frozenset[int]:
    """Adds the positions after each "**", which may match no part."""
    for at, part in enumerate(pattern):
        if part == "**" and at in reached:
            reached = reached | {at + 1}
    return frozenset(reached)


def find_patterns(keys: Collection[str], wanted: Container[str]) -> list[str]:
    """Returns the fewest globs that match the wanted keys and no other.

    >>> find_patterns(["a/0/x", "a/1/x", "a/1/y", "b"], {"a/1/x", "a/1/y", "b"})
    ['a/1/**', 'b']
    """
    return list(_patterns(keys, wanted, ""))


def _patterns(
    keys: Collection[str], wanted: Container[str], above: str
) -> Iterator[str]:
    below: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        below[above + key.removeprefix(above).split("/")[0]].append(key)
    for place, found in below.items():
        if all(key in wanted for key in found):
            yield place if found == [place] else f"{escape(place)}/**"
        elif found != [place]:
            yield from _patterns(found, wanted, f"{place}/")
