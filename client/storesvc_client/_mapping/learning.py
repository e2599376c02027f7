"""Proposes the rules that make one tree of another: a draft to read and to finish.

Keys that differ in integers alone are a family. Families of both trees are matched that
have as many elements, similar names first: with axes in another order, divided, joined,
stacked or unstacked. What is left may be the parts of a concatenation or a split.
Shapes say nothing of square matrices and of the order of parts; a comment says so, and
elements decide if they can be read.

Nothing is filled in. A leaf of the source without a match gets no rule, one of the
target a default without a value: rules that ``storectl map check`` rejects.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, combinations, islice, permutations, product
from typing import Any, Final, TypeAlias

from storesvc.format.grids import Region
from storesvc.format.trees import Leaf, Tree
from storesvc_client._mapping.expressions import Array, Shape
from storesvc_client._mapping.planning import ARRAYS, plan_mapping
from storesvc_client._mapping.rules import MAX_LISTED, VERSION, check_rules
from storesvc_client._mapping.templates import INTEGER, Placeholder, Template
from storesvc_client.errors import MismatchError

SAMPLE_ELEMENTS: Final = 1 << 18
"""Maximum elements of a leaf that are compared."""

SIMILAR: Final = 0.4
"""Minimum similarity of the names of a match without a comment."""

MAX_PAIRS: Final = 1_000_000
"""Maximum pairs of families that are compared; the others have no match."""

MAX_JOINED: Final = 4
"""Maximum families that are joined or divided, ..."""
MAX_ALIKE: Final = 8
"""... of at most so many that differ in one part of their keys."""

MAX_TURNED: Final = 5
"""Maximum axes of an array whose orders are tried."""

_NUMBER: Final = re.compile(r"(?<![^/._])(0|[1-9][0-9]{0,8})(?![^/.])")

_Parts: TypeAlias = "tuple[tuple[str, _Family], ...]"
Rule: TypeAlias = dict[str, Any]
Operations: TypeAlias = list[dict[str, Any]]
Read: TypeAlias = Callable[[Sequence[tuple[str, Region]]], Sequence[Array]]
"""Returns regions of leaves by their keys."""


@dataclass(frozen=True, eq=False)
class _Family:
    """Leaves of one shape and dtype; there is one for each combination of integers."""

    texts: tuple[str, ...]
    """Texts between the integers of its keys."""
    axes: tuple[tuple[int, ...], ...]
    """Values of each integer."""
    leaves: tuple[Leaf, ...]

    @property
    def shape(self) -> Shape:
        return self.leaves[0].shape

    @property
    def size(self) -> int:
        """Number of its elements."""
        return len(self.leaves) * math.prod(self.shape)

    @cached_property
    def words(self) -> set[str]:
        return {*re.findall("[a-z]+|[0-9]+", "/".join(self.texts).lower())}

    @property
    def names(self) -> list[str]:
        """Names of its integers in a rule that takes it."""
        return [f"n{at}" if at else "n" for at in range(len(self.axes))]

    def name(self, names: Iterable[str], kind: str = "") -> str:
        """Returns its template."""
        found: list[str | Placeholder] = [self.texts[0]]
        for name, text in zip(names, self.texts[1:], strict=True):
            found += Placeholder(name, kind), text
        return str(Template(tuple(found)))


@dataclass(frozen=True, eq=False)
class _Match:
    sources: tuple[_Family, ...]
    targets: tuple[_Family, ...]
    rules: list[Rule] = field(default_factory=list)
    """All that fit."""

    @property
    def score(self) -> float:
        """Similarity of the names, from 0 to 1."""
        one, other = (
            set[str]().union(*(each.words for each in families))
            for families in (self.sources, self.targets)
        )
        return 2 * len(one & other) / max(1, len(one) + len(other))

    @property
    def ends(self) -> tuple[str, ...]:
        """The last part of the keys of each side."""
        families = self.sources[0], self.targets[0]
        return tuple(re.split("[/.]", each.leaves[0].key)[-1] for each in families)


def learn_rules(source: Tree, target: Tree, read: tuple[Read, Read] | None) -> str:
    """Returns a TOML document of rules that make the target of the source.

    Args:
        source: The tree that the rules are for.
        target: The tree that they make.
        read: Reads elements of each; None: names and shapes alone decide.
    """
    left, right = _find_families(source), _find_families(target)
    matches = list[_Match]()
    for pairs in (_pair, _join):
        taken = set[_Family]()
        found = islice(pairs(left, right), MAX_PAIRS)
        for match in sorted(found, key=lambda match: -match.score):
            both = {*match.sources, *match.targets}
            if both.isdisjoint(taken) and (read or match.score):
                rules = _propose(match)
                match.rules.extend(rule for rule in rules if _fits(rule, match, read))
            if match.rules:
                matches.append(match)
                taken |= both
        left = [each for each in left if each not in taken]
        right = [each for each in right if each not in taken]
    for each, match in product([*right], matches if read else ()):  # what is tied
        tied = _Match(match.sources, (each,))
        for rule in _propose(tied) if each in right else ():
            wanted = match.rules[0].get("operations") == rule.get("operations")
            if wanted and _fits(rule, tied, read):
                match.rules[0]["to"] += rule["to"]
                right.remove(each)
                break
    trees, rest = (source, target), (left, right)
    return _write(trees, matches, rest, is_sure=read is not None)


def _find_families(tree: Tree) -> list[_Family]:
    found = defaultdict[tuple[str, ...], list[tuple[list[int], Leaf]]](list)
    for leaf in tree.leaves[: tree.tree_count]:
        pieces = _NUMBER.split(leaf.key)
        found[tuple(pieces[::2])].append(([*map(int, pieces[1::2])], leaf))
    families = list[_Family]()
    for split, members in found.items():
        texts, axes = [split[0]], list[tuple[int, ...]]()
        numbers = zip(*(numbers for numbers, _ in members), strict=True)
        for text, values in zip(split[1:], numbers, strict=True):
            if len({*values}) > 1:
                axes.append(tuple(sorted({*values})))
                texts.append(text)
            else:  # it is part of the name
                texts[-1] += f"{values[0]}{text}"
        kinds = {(x.shape, x.dtype, x.kind in ARRAYS) for _, x in members}
        if len(kinds) == 1 and math.prod(map(len, axes)) == len(members):
            leaves = (leaf for _, leaf in sorted(members, key=lambda each: each[0]))
            families.append(_Family((*texts,), (*axes,), (*leaves,)))
        else:
            families += (_Family((x.key,), (), (x,)) for _, x in members)
    return families


def _pair(left: Sequence[_Family], right: Sequence[_Family]) -> Iterator[_Match]:
    """Yields families of as many elements."""
    sizes = defaultdict[int, list[_Family]](list)
    for each in right:
        sizes[each.size].append(each)
    return (_Match((one,), (other,)) for one in left for other in sizes[one.size])


def _join(left: Sequence[_Family], right: Sequence[_Family]) -> Iterator[_Match]:
    """Yields families that are as large as one of the other side together."""
    sums = _find_sums(left), _find_sums(right)
    for one in right:
        yield from (_Match(each, (one,)) for each in _order(sums[0][one.size], one))
    for one in left:
        yield from (_Match((one,), each) for each in _order(sums[1][one.size], one))


def _find_sums(families: Sequence[_Family]) -> dict[int, list[_Parts]]:
    """Returns families that differ in one part of their keys, with that part, by the
    number of their elements together."""
    groups = defaultdict[Any, list[tuple[str, _Family]]](list)
    for each in families:
        parts = re.split("[/.]", each.name("x" for _ in each.axes))
        for at, part in enumerate(parts):
            key = (*parts[:at], "", *parts[at + 1 :]), each.axes, each.leaves[0].dtype
            groups[key].append((part, each))
    found = defaultdict[int, list[_Parts]](list)
    for group in groups.values():
        for count in range(2, MAX_JOINED + 1) if len(group) <= MAX_ALIKE else ():
            for chosen in combinations(group, count):
                found[sum(each.size for _, each in chosen)].append(chosen)
    return found


def _order(sums: Iterable[_Parts], one: _Family) -> Iterator[tuple[_Family, ...]]:
    """Yields families in each order, first that in the name of another one: q, k and v
    of qkv, gate and up of gate_up."""
    text = "/".join(one.texts)
    for chosen in sums:
        ordered = sorted(chosen, key=lambda pair: text.rfind(pair[0].split("_")[0]))
        yield from permutations(each for _, each in ordered)


def _propose(match: _Match) -> Iterator[Rule]:
    """Yields rules that may fit."""
    first, last = match.sources[0], match.targets[0]
    mine, names, at = first.names, list[str](), 0
    for axis in last.axes:
        is_kept = axis in first.axes[at:]
        names.append(mine[first.axes.index(axis, at)] if is_kept else f"at{len(names)}")
        at = first.axes.index(axis, at) + 1 if is_kept else at
    dtype = last.leaves[0].dtype
    cast = [] if first.leaves[0].dtype == dtype else [{"cast": dtype}]
    new = [name for name in names if name not in mine]
    gone = [name for name in mine if name not in names]
    axes = dict(zip((*mine, *names), (*first.axes, *last.axes), strict=True))
    for away, onto in product(
        _peel(first.shape, [len(axes[name]) for name in new]),
        _peel(last.shape, [len(axes[name]) for name in gone]),
    ):
        begin = [
            {"unstack": {"axis": at, "by": by}}
            for at, by in zip(away, new, strict=True)
        ]
        end = [
            {"stack": {"axis": at, "by": by}} for at, by in zip(onto, gone, strict=True)
        ]
        for change in _change(
            [_strip(each.shape, away) for each in match.sources],
            [_strip(each.shape, onto) for each in match.targets],
        ):
            operations = [*begin, *change, *reversed(end), *cast]
            yield {
                "from": [each.name(mine, INTEGER) for each in match.sources],
                "to": [each.name(names) for each in match.targets],
            } | ({"operations": operations} if operations else {})


def _peel(shape: Shape, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yields axes of some sizes, each counted without those before it."""
    if not sizes:
        yield []
        return
    for axis in [at for at, size in enumerate(shape) if size == sizes[0]]:
        for others in _peel(_strip(shape, [axis]), sizes[1:]):
            yield [axis, *others]


def _strip(shape: Shape, axes: Iterable[int]) -> Shape:
    for axis in axes:
        shape = (*shape[:axis], *shape[axis + 1 :])
    return shape


def _change(before: Sequence[Shape], after: Sequence[Shape]) -> Iterator[Operations]:
    """Yields operations that make arrays of some shapes of others."""
    s, t = before[0], after[0]
    few = range(min(len(s), len(t)))
    for order in permutations(few) if len(few) <= MAX_TURNED else [(*few,)]:
        turn: Operations = [] if order == (*few,) else [{"transpose": [*order]}]
        turned = tuple(s[axis] for axis in order)
        if len(before) + len(after) > 2:
            if len({len(each) for each in (*before, *after)}) == 1:
                yield from _cut(
                    [tuple(x[at] for at in order) for x in before], after, turn
                )
        elif len(s) == len(t):
            if turned == t:
                yield turn
        elif len(s) < len(t):  # an axis becomes several
            if _is_finer(t, turned):
                yield [*turn, {"reshape": [*t]}]
        elif _is_finer(s, joined := tuple(t[order.index(axis)] for axis in few)):
            yield [{"reshape": [*joined]}, *turn]


def _cut(
    before: Sequence[Shape], after: Sequence[Shape], turn: Operations
) -> Iterator[Operations]:
    """Yields operations that join or divide arrays of one rank."""
    for axis in range(len(before[0])):
        rest = {_strip(each, [axis]) for each in (*before, *after)}
        sizes = [[each[axis] for each in shapes] for shapes in (before, after)]
        if len(rest) == 1 and sum(sizes[0]) == sum(sizes[1]):
            split = {"split": {"axis": axis, "sizes": sizes[1]}}
            join = {"concatenate": {"axis": axis}}
            yield [*turn, join if len(before) > 1 else split]


def _is_finer(fine: Shape, coarse: Shape) -> bool:
    """Returns whether axes of a shape are products of neighbours in another one."""
    ends = ({math.prod(x[:at]) for at in range(len(x) + 1)} for x in (coarse, fine))
    return next(ends) <= next(ends) and math.prod(fine) == math.prod(coarse)


def _outline(leaf: Leaf) -> tuple[Any, ...]:
    return leaf.key, leaf.shape, leaf.dtype, leaf.kind in ARRAYS or leaf.kind


def _fits(rule: Rule, match: _Match, read: tuple[Read, Read] | None) -> bool:
    """Returns whether a rule makes the leaves of the target, and their elements."""
    leaves = chain.from_iterable(each.leaves for each in match.sources)
    tree = Tree(tuple(sorted(leaves, key=lambda leaf: leaf.key)))
    document = check_rules({"version": VERSION, "rules": [rule]}, name="draft")
    try:
        made = plan_mapping(document, tree, name="source").leaves
    except MismatchError:
        return False
    wanted = {_outline(leaf) for each in match.targets for leaf in each.leaves}
    if wanted != {_outline(each.leaf) for each in made}:
        return False
    for each in (*made[:: len(made) // 4 + 1], made[-1]) if read else ():
        side = int(SAMPLE_ELEMENTS ** (1 / max(1, len(each.leaf.shape))))
        region = tuple((0, min(n, side)) for n in each.leaf.shape)
        if read is None or (0, 0) in region:
            continue
        requests = each.expression.requests(region)
        needed = [(tree.leaves[source.row].key, part) for source, part in requests]
        found = each.expression.build(region, iter(read[0](needed)))
        if found.tobytes() != read[1]([(each.leaf.key, region)])[0].tobytes():
            return False
    return True


def _write(
    trees: Sequence[Tree],
    matches: Sequence[_Match],
    rest: Sequence[Sequence[_Family]],
    *,
    is_sure: bool,
) -> str:
    """Returns the document."""
    votes = Counter[tuple[str, ...]]()
    for match in matches:
        if len(match.rules) == 1 and len(match.sources[0].shape) > 1:
            votes[match.ends] += 1 if "transpose" in str(match.rules) else -1
    covered = (
        f"{tree.tree_count - sum(len(each.leaves) for each in families):,} of "
        f"{tree.tree_count:,} leaves of the {name}"
        for tree, families, name in zip(trees, rest, ("source", "target"), strict=True)
    )
    lines = [f"# {', '.join(covered)}", f"version = {VERSION}"]
    for match in sorted(matches, key=lambda each: each.sources[0].leaves[0].key):
        doubts = {
            "the order of the parts is not known": len(match.sources + match.targets)
            > 2,
            "square: other operations fit, too": len(match.rules) > 1,
            "the names differ much": match.score < SIMILAR,
        }
        doubt = next((text for text, is_so in doubts.items() if is_so), "")
        lines += [f"# {doubt}; give --values"] if doubt and not is_sure else []
        # turned or not, as others with such keys
        turned = [rule for rule in match.rules if "transpose" in str(rule)]
        rules = turned if votes[match.ends] > 0 and turned else match.rules
        lines += _lay_out(rules[0])
    for family in rest[0]:
        lines.append(f"# drop? nothing is like {_describe(family)}")
        rule: Rule = {"from": [family.name(family.names, INTEGER)], "drop": True}
        lines += (f"# {line}" for line in _lay_out(rule) if line)
    for family in rest[1]:
        lines.append(f"# default? nothing is like {_describe(family)}")
        dtype, keys = family.leaves[0].dtype, [each.key for each in family.leaves]
        default = {"shape": [*family.shape], "dtype": dtype, "value": "decide"}
        for at in range(0, len(keys), MAX_LISTED):
            to = [str(Template((key,))) for key in keys[at : at + MAX_LISTED]]
            lines += _lay_out({"default": default, "to": to})
    return "\n".join(lines) + "\n"


def _describe(family: _Family) -> str:
    first = family.leaves[0]
    return f"{len(family.leaves):,} leaves {first.dtype}{[*first.shape]}"


def _lay_out(rule: Rule) -> list[str]:
    """Returns the lines of a rule."""
    lines = ["[[rules]]"]
    for key, value in rule.items():
        is_one = key in ("from", "to") and len(value) == 1
        lines.append(f"{key} = {_to_toml(value[0] if is_one else value)}")
    return [*lines, ""]


def _to_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{key} = {_to_toml(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_to_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)
