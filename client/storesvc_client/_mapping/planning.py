"""Applies rules to a tree: decides what each leaf of the target is made of.

Nothing is read. Every leaf of the source is used or left out by a rule, every leaf of
the target is made once, and shapes and dtypes fit; otherwise all that is wrong is in
one error.

1. Each rule finds its leaves. A leaf may be taken by one rule only.
2. The operations of a rule transform *streams*: for each set of values of the
   placeholders, the arrays of its list. ``stack`` joins streams that differ in one
   placeholder, ``unstack`` divides each.
3. The arrays get the keys of ``to``, and become the rows of a tree.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from typing import Any, Final, TypeAlias

from storesvc.format.checksums import digest
from storesvc.format.keys import (
    InvalidKeyError,
    check_key,
    check_keys,
    describe,
    split_key,
)
from storesvc.format.trees import Leaf, Tree
from storesvc_client._mapping.arithmetic import (
    Arithmetic,
    Dequantize,
    DequantizeMxfp4,
    LoraMerge,
)
from storesvc_client._mapping.expressions import (
    Cast,
    Expression,
    Fill,
    Join,
    Repeat,
    Reshape,
    Slice,
    Source,
    Transpose,
    check_axis,
)
from storesvc_client._mapping.rules import ARITHMETIC, Operation, Rule, Rules
from storesvc_client._mapping.templates import INTEGERS, Template, Value
from storesvc_client._values.key_patterns import nearest_keys
from storesvc_client.errors import InvalidRequestError, MismatchError
from storesvc_proto.v1 import tree_pb2 as pb

MAX_COMPARISONS: Final = 20_000_000
"""Maximum comparisons of a key with a template."""

MAX_TARGET_LEAVES: Final = 1_000_000

SHOWN: Final = 20
"""Problems that an error describes."""

ARRAYS: Final = frozenset(
    {pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR}
)
"""Kinds of leaves that operations accept."""

Binding: TypeAlias = tuple[tuple[str, Value], ...]
"""Values of placeholders, in the order of their names."""
Streams: TypeAlias = dict[Binding, tuple[Expression, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedLeaf:
    """A leaf of the target."""

    leaf: Leaf
    expression: Expression
    rule: Rule | None
    """The rule that makes it; None: it is kept."""


@dataclass(frozen=True)
class MappedTree:
    """The tree that a mapping makes of another one."""

    rules: Rules
    leaves: tuple[MappedLeaf, ...]
    """Its leaves, in the order of their keys."""
    dropped: tuple[str, ...]
    """Keys of the leaves that are left out."""
    steps: Mapping[str, Sequence[Streams]] = field(repr=False)
    """The streams of each rule by its place: those that it begins with, and those after
    each of its operations."""
    before: "MappedTree | None" = field(default=None, repr=False)
    """The mapping whose tree this one takes; None: it takes a stored tree."""
    tree: Tree = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", Tree(tuple(each.leaf for each in self.leaves)))

    @property
    def name(self) -> str:
        """Names of the rules, in their order."""
        before = "" if self.before is None else f"{self.before.name}, "
        return before + self.rules.name

    @property
    def digest(self) -> str:
        """Digest of the rules, in hexadecimal; of several mappings, of all of them."""
        if self.before is None:
            return self.rules.digest
        return digest(f"{self.before.digest} {self.rules.digest}".encode()).hex()


def plan_mapping(rules: Rules, source: Tree | MappedTree, *, name: str) -> MappedTree:
    """Returns the tree that rules make of a source.

    Args:
        rules: The rules.
        source: Its tree; items do not count. A mapped one is made of the stored arrays,
            too: expressions are composed.
        name: Name of the source, for messages.

    Raises:
        MismatchError: They do not fit; lists all that is wrong.
        InvalidRequestError: They need too many comparisons.
    """
    return _Planner(rules, source, name).plan()


def make_source(tree: Tree, row: int) -> Source:
    """Returns the expression of a stored row."""
    leaf = tree.leaves[row]
    return Source(
        leaf.dtype,
        leaf.shape,
        row=row,
        kind=leaf.kind,
        stored_chunk_shape=leaf.chunk_shape,
    )


class _Planner:
    def __init__(self, rules: Rules, source: Tree | MappedTree, name: str) -> None:
        self._rules = rules
        self._name = name
        self._before = source if isinstance(source, MappedTree) else None
        tree = source.tree if isinstance(source, MappedTree) else source
        self._leaves = tree.leaves[: tree.tree_count]
        self._expressions = (
            [each.expression for each in source.leaves]
            if isinstance(source, MappedTree)
            else [make_source(tree, row) for row in range(tree.tree_count)]
        )
        """The array of each leaf."""
        found = zip(self._expressions, self._leaves, strict=True)
        self._stored = {x.row: leaf for x, leaf in found if isinstance(x, Source)}
        """Leaves that are arrays as they are stored, by the row of these."""
        self._problems: list[str] = []
        self._made: dict[str, MappedLeaf] = {}
        """Leaves of the target by key."""
        self._steps: dict[str, list[Streams]] = {}

    def plan(self) -> MappedTree:
        found, unmatched = self._match_leaves()
        dropped = list[str]()
        # a tie names a leaf that another rule makes
        for rule in sorted(self._rules.rules, key=lambda rule: rule.tie is not None):
            rows = found.get(rule.place, [{} for _ in rule.sources])
            if not any(rows) and rule.sources:
                if not rule.is_optional:
                    self._report_unused(rule)
            elif rule.targets:
                self._apply(rule, rows)
            else:
                dropped += (
                    self._leaves[row].key for each in rows for row in each.values()
                )
        match self._rules.otherwise:
            case "keep":
                for row in unmatched:
                    self._make(self._leaves[row].key, self._expressions[row], None)
            case "drop":
                dropped += (self._leaves[row].key for row in unmatched)
            case _:
                self._report_unmatched([self._leaves[row].key for row in unmatched])
        leaves = [self._made[key] for key in sorted(self._made)]
        try:
            check_keys([each.leaf.key for each in leaves])
        except InvalidKeyError as e:
            self._problems.append(f"target {e}")
        if self._problems:
            rest = len(self._problems) - SHOWN
            more = f"; and {rest:,} more" if rest > 0 else ""
            raise MismatchError(
                f"{self._rules.name} does not fit {self._name}: "
                f"{'; '.join(self._problems[:SHOWN])}{more}",
                metadata={"problems": str(len(self._problems))},
            )
        return MappedTree(
            self._rules,
            tuple(leaves),
            tuple(sorted(dropped)),
            self._steps,
            self._before,
        )

    # 1. Which rule takes which leaf.

    def _match_leaves(self) -> tuple[dict[str, list[dict[Binding, int]]], list[int]]:
        """Returns the rows that each rule takes, for each template of ``from``, by
        binding; and the rows that none takes."""
        index = _Index(self._rules)
        found: dict[str, list[dict[Binding, int]]] = {}
        unmatched = list[int]()
        for row, leaf in enumerate(self._leaves):
            taken = [*index.find(leaf.key)]
            if not taken:
                unmatched.append(row)
            elif len(taken) > 1:
                rules = " and ".join(str(rule) for rule, _, _ in taken[:2])
                self._problems.append(
                    f"{describe(leaf.key)}: expected one rule, got {rules}; make one "
                    "of them match less"
                )
            for rule, number, binding in taken[:1]:
                rows = found.setdefault(rule.place, [{} for _ in rule.sources])
                rows[number][binding] = row
        return found, unmatched

    def _report_unmatched(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        names = ", ".join(keys[:SHOWN])
        more = f" and {len(keys) - SHOWN:,} more" if len(keys) > SHOWN else ""
        texts = {str(t): rule for rule in self._rules.rules for t in rule.sources}
        near = nearest_keys(keys[0], texts)[:1]
        nearest = "".join(f"; nearest: {texts[text].place} ({text})" for text in near)
        key = json.dumps(str(Template((keys[0],))))
        self._problems.append(
            f"expected a rule for each leaf, got none for {names}{more}{nearest}; add "
            f"{{from = {key}, to = {key}}} with its new key, or "
            f'{{from = {key}, drop = true}}, or otherwise = "keep" for the document'
        )

    def _report_unused(self, rule: Rule) -> None:
        text = f"{rule}: expected leaves that match, got none"
        if len(self._problems) < SHOWN:
            keys = [leaf.key for leaf in self._leaves]
            near = nearest_keys(str(rule.sources[0]), keys)[:1]
            text += "".join(f"; nearest: {key}" for key in near)
            text += "; add optional = true if there need not be any"
        self._problems.append(text)

    # 2. What the operations of a rule make.

    def _apply(self, rule: Rule, rows: Sequence[Mapping[Binding, int]]) -> None:
        before = len(self._problems)
        try:
            streams = self._begin(rule, rows)
            if len(self._problems) > before:  # what follows would be misleading
                return
            _check_ranges(rule.sources, streams)
            steps = self._steps.setdefault(rule.place, [streams])
            for operation in rule.operations:
                streams = _operate(operation, streams)
                steps.append(streams)
            _check_ranges(rule.targets, streams)
        except ValueError as e:
            self._problems.append(f"{rule}: {e}")
            return
        for binding, arrays in streams.items():
            values = dict(binding)
            for number, target in enumerate(rule.targets):
                array = arrays[number if len(arrays) > 1 else 0]
                self._make(target.fill(values), array, rule)

    def _begin(self, rule: Rule, rows: Sequence[Mapping[Binding, int]]) -> Streams:
        if rule.default is not None:
            return {(): (Fill.make(**rule.default),)}
        if rule.tie is not None:
            if (made := self._made.get(rule.tie)) is not None:
                return {(): (made.expression,)}
            raise ValueError(
                f"expected tie = the key of a leaf that another rule makes, got "
                f"{rule.tie!r}"
            )
        streams: Streams = {}
        for binding in sorted({each for found in rows for each in found}):
            absent = [
                template.fill(dict(binding))
                for template, found in zip(rule.sources, rows, strict=True)
                if binding not in found
            ]
            if absent:
                self._problems.append(
                    f"{rule}: expected all its leaves, got none of the key "
                    f"{absent[0]!r}"
                )
                continue
            taken = [found[binding] for found in rows]
            streams[binding] = tuple(self._expressions[row] for row in taken)
            for leaf in [self._leaves[row] for row in taken] if rule.operations else ():
                if leaf.kind not in ARRAYS:
                    kind = pb.LeafKind.Name(pb.LeafKind.ValueType(leaf.kind))
                    self._problems.append(
                        f"{rule}: {describe(leaf.key)}: expected an "
                        f"array, got {kind}; only its key can change"
                    )
        return streams

    # 3. The leaves of the target.

    def _make(self, key: str, expression: Expression, rule: Rule | None) -> None:
        """Adds a leaf of the target."""
        if len(self._made) >= MAX_TARGET_LEAVES:
            raise MismatchError(
                f"{self._rules.name} does not fit {self._name}: expected at most "
                f"{MAX_TARGET_LEAVES} leaves of the target, got more"
            )
        what = rule or "otherwise"
        if (other := self._made.get(key)) is not None:
            self._problems.append(
                f"target {describe(key)}: expected one rule that makes it, got "
                f"{other.rule or 'otherwise'} and {what}"
            )
            return
        try:
            check_key(key)
            parts = split_key(key)
        except InvalidKeyError as e:
            self._problems.append(f"{what}: {e}")
            return
        leaf = self._describe_leaf(key, "k" * len(parts), expression)
        self._made[key] = MappedLeaf(leaf=leaf, expression=expression, rule=rule)

    def _describe_leaf(self, key: str, kinds: str, expression: Expression) -> Leaf:
        if isinstance(expression, Source):
            own = self._stored[expression.row]
            return replace(own, key=key, path_kinds=kinds)
        used = {each.kind for each in expression.sources()}
        is_host = bool(used) and pb.LEAF_KIND_ARRAY not in used
        return Leaf(
            key=key,
            path_kinds=kinds,
            kind=pb.LEAF_KIND_HOST_ARRAY if is_host else pb.LEAF_KIND_ARRAY,
            dtype=expression.dtype,
            shape=expression.shape,
            chunk_shape=expression.grid_shape,
        )


class _Index:
    """Finds the templates that may match a key, by its literal first and last parts."""

    def __init__(self, rules: Rules) -> None:
        self._exact: dict[str, list[tuple[Rule, int]]] = defaultdict(list)
        self._others: dict[tuple[str | None, str | None], list[tuple[Rule, int]]] = (
            defaultdict(list)
        )
        self._name = rules.name
        self._left = MAX_COMPARISONS
        for rule in rules.rules:
            for number, template in enumerate(rule.sources):
                if not template.placeholders:
                    self._exact[template.fill({})].append((rule, number))
                else:
                    self._others[_literal_ends(template)].append((rule, number))

    def find(self, key: str) -> Iterator[tuple[Rule, int, Binding]]:
        """Yields the rules that take a leaf, the number of the template and the values
        of its placeholders."""
        for rule, number in self._exact.get(key, ()):
            yield rule, number, ()
        first, last = key.partition("/")[0], key.rpartition("/")[2]
        for ends in product((first, None), (last, None)):
            candidates = self._others.get(ends, ())
            self._left -= len(candidates)
            if self._left < 0:
                raise InvalidRequestError(
                    f"{self._name}: expected rules that need at most "
                    f"{MAX_COMPARISONS:,} comparisons of a key with a rule, got more; "
                    "begin or end the keys of rules with different parts, or write "
                    "fewer rules with placeholders"
                )
            for rule, number in candidates:
                values = rule.sources[number].match(key)
                if values is not None:
                    yield rule, number, tuple(sorted(values.items()))


def _literal_ends(template: Template) -> tuple[str | None, str | None]:
    """Returns the first and the last part of all keys that match; None if they
    differ."""
    first, last = template.parts[0], template.parts[-1]
    return (
        first.partition("/")[0] if isinstance(first, str) and "/" in first else None,
        last.rpartition("/")[2] if isinstance(last, str) and "/" in last else None,
    )


def _operate(operation: Operation, streams: Streams) -> Streams:
    """Returns the streams after an operation.

    Raises:
        ValueError: It does not fit; the message says why.
    """
    given = operation.arguments
    if regroup := {"stack": _stack, "unstack": _unstack}.get(operation.name):
        return regroup(streams, given["by"], given["axis"])
    found: Streams = {}
    for binding, arrays in streams.items():
        with _name_leaf(binding):
            found[binding] = (*_OPERATIONS[operation.name](arrays, given),)
    return found


@contextmanager
def _name_leaf(binding: Binding) -> Generator[None]:
    """Adds the values of placeholders to an error."""
    try:
        yield
    except ValueError as e:
        where = ", ".join(f"{name} = {value}" for name, value in binding)
        raise ValueError(f"{where}: {e}" if where else str(e)) from e


def _check_ranges(templates: Sequence[Template], streams: Streams) -> None:
    """Checks that each integer of a range that has an end occurs, and no other."""
    for part in chain.from_iterable(each.placeholders for each in templates):
        if part.numbers.stop < INTEGERS.stop:
            numbers = {part.fill(dict(binding)[part.name]) for binding in streams}
            _check_numbers(part.name, numbers, part.numbers)


def _check_numbers(name: str, numbers: set[str], wanted: range) -> None:
    absent = next((n for n in wanted if str(n) not in numbers), None)
    if absent is not None or len(numbers) > len(wanted):
        got = f"{len(numbers)} of them" if absent is None else f"no {name} = {absent}"
        raise ValueError(
            f"expected {name} = {wanted[0]} to {wanted[-1]}, each once, got {got}"
        )


def _stack(streams: Streams, by: str, axis: int) -> Streams:
    groups: dict[Binding, dict[Value, tuple[Expression, ...]]] = defaultdict(dict)
    for binding, arrays in streams.items():
        values = dict(binding)
        index = values.pop(by)
        groups[tuple(values.items())][index] = arrays
    found: Streams = {}
    for binding, parts in groups.items():
        with _name_leaf(binding):
            _check_numbers(by, {*map(str, parts)}, range(max(map(int, parts)) + 1))
            lists = zip(*(parts[n] for n in range(len(parts))), strict=True)
            found[binding] = tuple(Join.stack(each, axis) for each in lists)
    return found


def _unstack(streams: Streams, by: str, axis: int) -> Streams:
    found: Streams = {}
    for binding, arrays in streams.items():
        with _name_leaf(binding):
            at = [check_axis("unstack", each, axis) for each in arrays]
        counts = {each.shape[a] for each, a in zip(arrays, at, strict=True)}
        if len(counts) > 1 or len(found) + max(counts) > MAX_TARGET_LEAVES:
            raise ValueError(
                f"unstack: expected arrays of one size along axis {axis}, and at most "
                f"{MAX_TARGET_LEAVES} parts, got {sorted(counts)}"
            )
        for index in range(*counts):
            values = tuple(sorted({**dict(binding), by: index}.items()))
            found[values] = tuple(
                Slice.take(each, a, index) for each, a in zip(arrays, at, strict=True)
            )
    return found


def _split(
    inner: Expression, *, axis: int, sizes: Sequence[int]
) -> Iterable[Expression]:
    at = check_axis("split", inner, axis)
    if sum(sizes) != inner.shape[at]:
        raise ValueError(
            f"split: expected sizes that sum to {inner.shape[at]}, the size of axis "
            f"{at}, got {list(sizes)}"
        )
    start = 0
    for size in sizes:
        yield Slice.make(inner, at, start, start + size)
        start += size


def _interleave(parts: Sequence[Expression], axis: int) -> Expression:
    """Returns the first index of each part, then the second one of each."""
    at = check_axis("interleave", parts[0], axis)
    shape = list(parts[0].shape)
    shape[at] *= len(parts)
    return Reshape.make(Join.stack(parts, at + 1), shape)


def _deinterleave(inner: Expression, *, axis: int, parts: int) -> Iterable[Expression]:
    """Yields every so many index of an axis, from the first on, from the second on."""
    at = check_axis("deinterleave", inner, axis)
    size = inner.shape[at]
    if size % parts:
        raise ValueError(
            f"deinterleave: expected a multiple of {parts} for the size of axis {at}, "
            f"got {size}"
        )
    shape = (*inner.shape[:at], size // parts, parts, *inner.shape[at + 1 :])
    divided = Reshape.make(inner, shape)
    return [Slice.take(divided, at + 1, index) for index in range(parts)]


def _reshape_axes(
    inner: Expression, axis: int, sizes: Sequence[int], count: int = 1
) -> Expression:
    """Changes the sizes of neighbouring axes, and leaves the others as they are."""
    axis = check_axis("reshape_axes", inner, axis)
    shape = inner.shape
    if axis + count > len(shape):
        raise ValueError(
            f"reshape_axes: expected a count of at most {len(shape) - axis} for axis "
            f"{axis} of the shape {list(shape)}, got {count}"
        )
    return Reshape.make(inner, (*shape[:axis], *sizes, *shape[axis + count :]))


def _permute_heads(inner: Expression, given: Mapping[str, Any]) -> Expression:
    """Changes the order of rotary dimensions within each head: two halves, or pairs."""
    axis, heads = check_axis("permute_heads", inner, given["axis"]), given["heads"]
    size = inner.shape[axis]
    if heads < 1 or size % (2 * heads):
        raise ValueError(
            f"permute_heads: expected heads of an even size along axis {axis} of "
            f"{size}, got {heads} heads"
        )
    half = size // heads // 2
    pair = (2, half) if given["from"] == "halves" else (half, 2)
    divided = (*inner.shape[:axis], heads, *pair, *inner.shape[axis + 1 :])
    axes = [*range(len(divided))]
    axes[axis + 1], axes[axis + 2] = axis + 2, axis + 1
    return Reshape.make(Transpose.make(Reshape.make(inner, divided), axes), inner.shape)


def _compute(
    name: str, arrays: Sequence[Expression], given: Mapping[str, Any]
) -> Iterable[Expression]:
    return [Arithmetic.make(name, each, given[""]) for each in arrays]


_OPERATIONS: Final[
    Mapping[
        str, Callable[[Sequence[Expression], Mapping[str, Any]], Iterable[Expression]]
    ]
] = {
    # each array by itself
    "transpose": lambda arrays, given: [Transpose.make(x, given[""]) for x in arrays],
    "reshape": lambda arrays, given: [Reshape.make(x, given[""]) for x in arrays],
    "reshape_axes": lambda arrays, given: [_reshape_axes(x, **given) for x in arrays],
    "cast": lambda arrays, given: [Cast.make(x, given[""]) for x in arrays],
    "slice": lambda arrays, given: [Slice.make(x, **given) for x in arrays],
    "pad": lambda arrays, given: [Join.pad(x, **given) for x in arrays],
    "repeat": lambda arrays, given: [Repeat.make(x, **given) for x in arrays],
    "permute_heads": lambda arrays, given: [_permute_heads(x, given) for x in arrays],
    **{name: partial(_compute, name) for name in ARITHMETIC},
    # several of one
    "split": lambda arrays, given: _split(arrays[0], **given),
    "deinterleave": lambda arrays, given: _deinterleave(arrays[0], **given),
    # one of several
    "concatenate": lambda arrays, given: [Join.make(arrays, **given)],
    "interleave": lambda arrays, given: [_interleave(arrays, **given)],
    "lora_merge": lambda arrays, given: [LoraMerge.make(arrays, **given)],
    "dequantize": lambda arrays, given: [Dequantize.make(arrays, **given)],
    "dequantize_mxfp4": lambda arrays, given: [DequantizeMxfp4.make(arrays, **given)],
}
"""Makes the arrays of a stream after an operation."""
