"""The way back: rules that make the source of a mapping from its target.

The inverse of a rule has its keys exchanged, and the inverses of its operations in the
opposite order. What the target does not contain has none: leaves and elements that
were left out, digits that a cast or arithmetic removed, and which of several equal
leaves is meant.

``invert_rules`` plans the inverse on the target before it returns it: it makes each
leaf of the source, so both together return every bit, except that a cast may change the
payload of a NaN. ``invert_document`` needs no tree, but operations whose inverse is the
same for every tree. It takes arithmetic back, with the rounding of both ways.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np

from storesvc.format.dtypes import DTYPES
from storesvc.format.trees import Tree
from storesvc_client._mapping.planning import MappedTree, Streams, plan_mapping
from storesvc_client._mapping.rules import (
    COMPUTING,
    VERSION,
    Document,
    Rule,
    Rules,
    check_rules,
    follow,
)
from storesvc_client.errors import InvalidRequestError, MismatchError


def invert_rules(mapped: MappedTree, source: Tree) -> Document:
    """Returns a document of rules that make the source again.

    Args:
        mapped: What they make of it.
        source: The source.

    Raises:
        InvalidRequestError: A rule has no inverse; the message says why.
    """
    rules = mapped.rules
    if mapped.dropped:
        raise InvalidRequestError(
            f"{rules.name} has no inverse: it leaves out {mapped.dropped[0]!r}; keep "
            "all leaves"
        )
    inverse = list[dict[str, Any]]()
    for rule in rules.rules:
        steps = mapped.steps.get(rule.place)  # none of an optional rule without leaves
        try:
            inverse += [] if steps is None else [_invert_rule(rule, steps)]
        except ValueError as e:
            raise InvalidRequestError(
                f"{rules.name}: {rule} has no inverse: {e}"
            ) from e
    document = {"version": VERSION, "otherwise": rules.otherwise, "rules": inverse}
    checked = check_rules(document, name=f"the inverse of {rules.name}")
    try:
        back = plan_mapping(checked, mapped.tree, name="its target")
    except MismatchError as e:
        raise InvalidRequestError(f"{rules.name} has no inverse: {e}") from e
    wanted, found = (
        {(leaf.key, leaf.shape, leaf.dtype) for leaf in tree.leaves[: tree.tree_count]}
        for tree in (source, back.tree)
    )
    if wanted != found:  # a rule takes a leaf that was kept
        key = min(wanted ^ found)[0]
        raise InvalidRequestError(
            f"{rules.name} has no inverse: the way back makes other leaves, such as "
            f"{key!r}; give the leaves that are kept keys that no rule makes"
        )
    return document


def invert_document(rules: Rules) -> list[dict[str, Any]]:
    """Returns rules that make the source again, whatever it is, but for what they leave
    out, and for the rounding of arithmetic. Tied leaves are left out, too: the head of
    a tied model, which EasyDeL keeps and does not use, so that it need not equal the
    embedding.

    Raises:
        ValueError: The inverse of a rule depends on the tree.
    """
    return [
        {**_invert_rule(rule, None), "optional": rule.is_optional}
        for rule in rules.rules
        if rule.targets
    ]


def _invert_rule(rule: Rule, steps: Sequence[Streams] | None) -> dict[str, Any]:
    """Returns the inverse of a rule by its streams, or for every tree; see above."""
    if rule.default is not None or (rule.tie is not None and steps is None):
        return {"from": [str(each) for each in rule.targets], "drop": True}
    if rule.tie is not None:
        name = json.dumps(str(rule.targets[0]))
        raise ValueError(
            "both leaves may differ later; invert the rules without this rule, and "
            f"add {{from = {name}, drop = true}} to the way back"
        )
    known = dict(rule.sources[0].kinds)
    width = len(rule.sources)
    for operation in rule.operations:
        width = follow(operation, known, width)
    if width < len(rule.targets):
        raise ValueError("it makes several leaves of one, which may differ later")
    for each in rule.operations:
        if each.name in COMPUTING and (steps is not None or each.name not in _INVERSES):
            raise ValueError(
                f"{each.name} computes, and its result does not contain every bit "
                "that it was made of; -inverse behind the name of a table comes close"
            )
    streams = [{} for _ in rule.operations] if steps is None else steps
    operations = [
        inverse
        for operation, before in zip(rule.operations, streams, strict=False)
        for inverse in _INVERSES[operation.name](operation.arguments, before)
    ]
    return {
        "from": [str(each.with_kinds(known)) for each in rule.targets],
        "to": [str(each) for each in rule.sources],
        "operations": operations[::-1],
    }


def _agree(values: Iterable[Any], what: str) -> Any:
    """Returns the value that all arrays have in common.

    Raises:
        ValueError: They differ, or depend on the tree.
    """
    found = {*values}
    if not found:
        raise ValueError(f"the {what} of its arrays are known with a tree only")
    if len(found) > 1:
        raise ValueError(
            f"it takes arrays of several {what}; write a rule for each of them"
        )
    return found.pop()


Inverse: TypeAlias = Callable[[Mapping[str, Any], Streams], Iterable[dict[str, Any]]]


def _reshape(_: Mapping[str, Any], before: Streams) -> Iterator[dict[str, Any]]:
    shapes = (each.shape for each in chain(*before.values()))
    yield {"reshape": list(_agree(shapes, "shapes"))}


def _reshape_axes(
    given: Mapping[str, Any], before: Streams
) -> Iterator[dict[str, Any]]:
    axis, count, sizes = given["axis"], given.get("count", 1), given["sizes"]
    if count == 1:  # whatever the tree
        whole = [-1] if -1 in sizes else [math.prod(sizes)]
    else:
        shapes = (each.shape[axis:][:count] for each in chain(*before.values()))
        whole = _agree(shapes, "shapes")
    first = axis if axis >= 0 else axis + count - len(sizes)
    back = {"axis": first, "count": len(sizes), "sizes": [*whole]}
    yield {"reshape_axes": back}


def _cast(given: Mapping[str, Any], before: Streams) -> Iterator[dict[str, Any]]:
    dtype = _agree((each.dtype for each in chain(*before.values())), "dtypes")
    # NumPy takes casts between the small dtypes for safe
    is_wide = given[""] in ("float32", "float64")
    if not (is_wide and np.can_cast(DTYPES[dtype], DTYPES[given[""]], "safe")):
        raise ValueError(f"a cast from {dtype} to {given['']} loses digits")
    yield {"cast": dtype}


def _slice(given: Mapping[str, Any], before: Streams) -> Iterator[dict[str, Any]]:
    axis = given["axis"]
    size = _agree((each.shape[axis] for each in chain(*before.values())), "sizes")
    if (given["start"], given["stop"]) != (0, size):
        raise ValueError("slice leaves out elements")
    yield from ()


def _pad(given: Mapping[str, Any], before: Streams) -> Iterator[dict[str, Any]]:
    axis = given["axis"]
    size = _agree((each.shape[axis] for each in chain(*before.values())), "sizes")
    yield {"slice": {"axis": axis, "start": 0, "stop": size}}


def _concatenate(given: Mapping[str, Any], before: Streams) -> Iterator[dict[str, Any]]:
    axis = given["axis"]
    sizes = (tuple(x.shape[axis] for x in arrays) for arrays in before.values())
    yield {"split": {"axis": axis, "sizes": list(_agree(sizes, "sizes"))}}


def _interleave(given: Mapping[str, Any], before: Streams) -> Iterator[dict[str, Any]]:
    parts = _agree(map(len, before.values()), "numbers")
    yield {"deinterleave": {**given, "parts": parts}}


def _repeat(given: Mapping[str, Any], _: Streams) -> Iterator[dict[str, Any]]:
    if given["times"] != 1:
        raise ValueError("repeat makes several elements of one, which may differ later")
    yield from ()


def _permute_heads(given: Mapping[str, Any], _: Streams) -> Iterator[dict[str, Any]]:
    other = {"halves": "interleaved", "interleaved": "halves"}[given["from"]]
    yield {"permute_heads": {**given, "from": other}}


_INVERSES: Final[Mapping[str, Inverse]] = {
    "transpose": lambda given, _: [{"transpose": np.argsort(given[""]).tolist()}],
    "reshape": _reshape,
    "reshape_axes": _reshape_axes,
    "cast": _cast,
    "slice": _slice,
    "pad": _pad,
    "stack": lambda given, _: [{"unstack": dict(given)}],
    "unstack": lambda given, _: [{"stack": dict(given)}],
    "concatenate": _concatenate,
    "split": lambda given, _: [{"concatenate": {"axis": given["axis"]}}],
    "interleave": _interleave,
    "deinterleave": lambda given, _: [{"interleave": {"axis": given["axis"]}}],
    "repeat": _repeat,
    "permute_heads": _permute_heads,
    "add": lambda given, _: [{"subtract": given[""]}],
    "subtract": lambda given, _: [{"add": given[""]}],
    "multiply": lambda given, _: [{"divide": given[""]}],
    "divide": lambda given, _: [{"multiply": given[""]}],
}
