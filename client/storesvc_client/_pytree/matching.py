"""Matches the leaves of a checkpoint with the leaves of a restored tree.

Leaves match if their typed paths are equal: the key, and for each part whether it is a
number or text. ``layers[0]`` and ``layers["0"]`` have one key, but NNX sorts the second
after ``layers["10"]``, so they are rejected as different. The type of the container
(dict or dataclass, list or tuple) does not matter.

Matching reads no data and decides no placement. All differences are reported at once.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import jax

from storesvc.format.dtypes import is_floating
from storesvc.format.keys import ENCODED_KINDS, INTEGER_KINDS
from storesvc.format.trees import Leaf, Tree
from storesvc_client._items.values import Container
from storesvc_client._pytree.containers import nest
from storesvc_client._pytree.leaves import (
    NamedLeaf,
    Signature,
    family,
    list_problems,
    named_leaves,
    path_text,
    signature,
    tracer_text,
)
from storesvc_client._values.key_patterns import find_patterns
from storesvc_client._values.models import leaf_path
from storesvc_client.errors import MismatchError
from storesvc_proto.v1 import tree_pb2 as pb

Build: TypeAlias = Callable[[dict[int, Any]], Any]
"""Builds the returned tree from its leaves by row."""

_MAX_ADVICE: Final = 500
"""Maximum characters of an advice: a longer list of patterns is not readable."""

LIKE: Final = "like"
"""Stands for a cast of each floating-point leaf to its dtype in ``like``."""

_ARRAY_KINDS: Final = frozenset(
    {pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR}
)


class Wanted(NamedTuple):
    """A leaf that a restore returns."""

    row: int
    """Row in the leaf table."""
    kind: "pb.LeafKind.ValueType"
    """Kind of the returned leaf."""
    dtype: str
    """dtype of the returned leaf; differs from the saved dtype only if cast."""
    value: Any = None
    """Leaf of ``like`` at the same path."""


@dataclass(frozen=True, slots=True)
class Match:
    """The leaves to return, and the differences found."""

    wanted: Sequence[Wanted]
    build: Build
    problems: Sequence[str] = ()
    kept: Sequence[tuple[Leaf, Wanted]] = ()
    """Leaves of ``like`` that the checkpoint lacks and that keep their values, each
    with a negative row and the entry it would have in a checkpoint."""
    advice: str = ""
    """Names the options that would accept the differences; "" if there are none."""
    unfit: Sequence[str] = ()
    """Keys of selected leaves that the target does not have in this form."""


def match_all(
    tree: Tree,
    rows: Sequence[int],
    *,
    cast: str | None,
    containers: Sequence[Container] = (),
) -> Match:
    """Returns a match of all selected leaves, built into nested containers."""
    leaves = [tree.leaves[row] for row in rows]
    wanted = [
        Wanted(row=row, kind=leaf.kind, dtype=_cast_dtype(leaf, cast))
        for row, leaf in zip(rows, leaves, strict=True)
    ]

    def build(values: dict[int, Any]) -> Any:
        named = zip(rows, leaves, strict=True)
        return nest(
            ((leaf_path(x), x.path_kinds, values[row]) for row, x in named), containers
        )

    return Match(wanted, build)


def match_like(
    tree: Tree,
    like: Any,
    rows: Sequence[int],
    *,
    cast: str | None,
    keeping: bool,
    has_text_keys: bool = False,
) -> Match:
    """Returns a match of the selected leaves with the leaves of a pytree.

    Args:
        cast: dtype of the returned floating-point arrays; ``LIKE``: as in ``like``;
            None: no cast.
        keeping: True if leaves that the checkpoint lacks keep their values.
        has_text_keys: True if the writer of the checkpoint stored keys that are
            numbers as texts, so that only ``like`` shows which they were.

    Raises:
        UnsupportedLeafError: ``like`` has two leaves with one key.
    """
    named, treedef = named_leaves(like)
    by_key = {leaf.key: leaf for leaf in named}
    selected = {tree.leaves[row].key: row for row in rows}
    missing = [leaf for leaf in named if leaf.key not in selected]
    kept, problems = (
        _keep_values(tree, missing, cast)
        if keeping
        else ([], [_absence(tree, leaf) for leaf in missing])
    )
    wanted, unfit = [], []
    for key, row in selected.items():
        leaf = by_key.get(key)
        found = _match_leaf(tree, row, leaf, cast, has_text_keys=has_text_keys)
        if isinstance(found, Wanted):
            wanted.append(found)
        else:
            problems.append(f"leaf {key!r}: {found}")
            unfit.append(key)
    places = selected | {leaf.key: own.row for leaf, own in kept}

    def build(values: dict[int, Any]) -> Any:
        return jax.tree.unflatten(treedef, [values[places[x.key]] for x in named])

    advice = ""
    if problems:
        advice = _advise(tree, named, selected, unfit, cast, keeping=keeping)
    return Match(wanted, build, problems, kept, advice, unfit)


def _match_leaf(
    tree: Tree,
    row: int,
    leaf: NamedLeaf | None,
    cast: str | None,
    *,
    has_text_keys: bool,
) -> Wanted | str:
    """Returns what a restore returns for a row, given the leaf of ``like`` with its
    key; or how they differ."""
    saved = tree.leaves[row]
    if leaf is None:
        return f"in the checkpoint {_signature(saved)}, not in the target"
    found = signature(leaf.value)
    if isinstance(leaf.value, jax.core.Tracer):
        tracer = tracer_text(leaf.value)
        return f"expected an array, got {tracer}: call restore outside jit"
    if found is None or not _fits(saved, found, cast):
        return f"in the checkpoint {_signature(saved)}, in the target {_describe(leaf)}"
    if not _same_path(saved, leaf, has_text_keys=has_text_keys):
        return (
            f"in the checkpoint the path {path_text(leaf_path(saved))}, in the target "
            f"{leaf.path}; a number and its text are different keys"
        )
    # an integer comes back in the form in which it was saved
    is_encoded = not ENCODED_KINDS.isdisjoint({saved.kind, found.kind})
    form: Leaf | Signature = saved if is_encoded else found
    return Wanted(row, form.kind, _cast_dtype(form, cast), value=leaf.value)


def _advise(
    tree: Tree,
    named: Sequence[NamedLeaf],
    selected: Mapping[str, int],
    unfit: Sequence[str],
    cast: str | None,
    *,
    keeping: bool,
) -> str:
    """Returns the options that would accept the differences, as a part of a message;
    "" if there are none, or they are too long to be read."""
    found = {leaf.key: signature(leaf.value) for leaf in named}
    castable = {
        key
        for key in unfit
        if (own := found.get(key))
        and not _fits(tree.leaves[selected[key]], own, cast)
        and _fits(tree.leaves[selected[key]], own, LIKE)
    }
    fitting = selected.keys() - unfit | castable
    lacking = [leaf for leaf in named if leaf.key not in fitting]
    if not fitting:
        return _advise_level(tree, named, selected)
    if any(map(_no_value, lacking)):
        return ""
    options: dict[str, Any] = {}
    if castable:
        options["cast"] = LIKE
    if len(fitting) < len(selected):
        options["select"] = find_patterns(tree.by_key, fitting)
    if lacking and not keeping:
        options["missing"] = "keep"
    added = ", ".join(f"{name}={value!r}" for name, value in options.items())
    what = "only what like= has" if [*options] == ["select"] else "what fits"
    text = f"; to restore {what}, pass {added}"
    return text if options and len(text) <= _MAX_ADVICE else ""


def _advise_level(
    tree: Tree, named: Sequence[NamedLeaf], selected: Mapping[str, int]
) -> str:
    """Returns the options for a ``like`` that is one part of the checkpoint, such as
    the state of a model saved as ``{"model": model}``, as a part of a message; "" if it
    is not a part, or at two places."""
    keys = [leaf.key for leaf in named]
    above = {key.partition("/")[0] for key in selected}
    found = [p for p in above if keys and selected.keys() >= {f"{p}/{k}" for k in keys}]
    if len(found) != 1 or not re.fullmatch(r"[A-Za-z_]\w*", found[0]):
        return ""
    (place,) = found
    parts = {f"{place}/{key}" for key in keys}
    text = f"; to restore what is in {place!r}, pass like={{{place!r}: like}}"
    if len(parts) < len(selected):
        text += f", select={find_patterns(tree.by_key, parts)!r}"
    return text if len(text) <= _MAX_ADVICE else ""


def check_restorable(name: str, state: Any, initial: Any) -> None:
    """Checks that the next process can restore what this one is about to save.

    Leaves that a checkpoint cannot hold are not compared: a save rejects them.

    Args:
        initial: The initial state, which may lack the values of its arrays.

    Raises:
        MismatchError: It could not; lists all differences.
        UnsupportedLeafError: A state has two leaves with one key.
    """
    pairs = [(leaf, signature(leaf.value)) for leaf in named_leaves(state)[0]]
    if any(found is None for _, found in pairs):
        return
    tree = Tree(tuple(_as_saved(leaf, found) for leaf, found in pairs if found))
    rows = range(len(tree.leaves))
    problems = match_like(tree, initial, rows, cast=None, keeping=False).problems
    if problems:
        raise MismatchError(
            f"{name} could not be restored like the initial state of this loop: "
            f"{list_problems(problems)}; make both alike, for example with a jax.jit "
            "function for restore_or, which turns Python numbers into arrays"
        )


def _absence(tree: Tree, leaf: NamedLeaf) -> str:
    is_left_out = leaf.key in tree.by_key
    where = "left out by select=" if is_left_out else "not in the checkpoint"
    return f"leaf {leaf.key!r}: {where}, in the target {_describe(leaf)}"


def _keep_values(
    tree: Tree, missing: Sequence[NamedLeaf], cast: str | None
) -> tuple[list[tuple[Leaf, Wanted]], list[str]]:
    """Returns the leaves that keep their values, and the problems of the others."""
    kept, problems = [], []
    for number, leaf in enumerate(missing, start=1):
        found, problem = signature(leaf.value), _no_value(leaf)
        if found is None or problem:
            problems.append("; ".join(filter(None, (_absence(tree, leaf), problem))))
            continue
        wanted = Wanted(-number, found.kind, _cast_dtype(found, cast), leaf.value)
        kept.append((_as_saved(leaf, found), wanted))
    return kept, problems


def _as_saved(leaf: NamedLeaf, found: Signature) -> Leaf:
    """Returns the row that a leaf would have in a checkpoint, but for its chunks."""
    return Leaf(
        key=leaf.key,
        path_kinds=leaf.path_kinds,
        kind=found.kind,
        dtype=found.dtype,
        shape=found.shape,
        chunk_shape=found.shape,
        prng_impl=found.prng_impl,
    )


def _no_value(leaf: NamedLeaf) -> str | None:
    """Returns why ``like`` has no value to keep for a leaf, or None if it has one."""
    if signature(leaf.value) is None or isinstance(leaf.value, jax.core.Tracer):
        return "like= has no value that a checkpoint can hold"
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        return "like= has only a ShapeDtypeStruct, without values"
    if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
        return "its array in like= was deleted or donated"
    return None


def _cast_dtype(leaf: Leaf | Signature, cast: str | None) -> str:
    is_cast = leaf.kind in _ARRAY_KINDS and is_floating(leaf.dtype)
    return leaf.dtype if not is_cast or cast in (None, LIKE) else cast


def _fits(saved: Leaf, found: Signature, cast: str | None) -> bool:
    """Returns whether a saved leaf can become the requested one.

    Device arrays, host arrays and host scalars are interchangeable; Python numbers and
    PRNG keys are not. A text, bytes or an integer becomes any other one of its type.
    """
    if saved.kind in ENCODED_KINDS or found.kind in ENCODED_KINDS:
        return family(saved.kind, saved.dtype) == family(found.kind, found.dtype)
    return (
        saved.shape == found.shape
        and saved.prng_impl == found.prng_impl
        and (saved.kind == found.kind or {saved.kind, found.kind} <= _ARRAY_KINDS)
        and (
            saved.dtype == found.dtype
            or (
                cast is not None
                and {saved.kind, found.kind} <= _ARRAY_KINDS
                and is_floating(saved.dtype)
                and is_floating(found.dtype)
            )
        )
    )


def _same_path(saved: Leaf, leaf: NamedLeaf, *, has_text_keys: bool) -> bool:
    """Returns whether each part is a number, or text, in both, or became text."""
    return saved.path_kinds == leaf.path_kinds or all(
        (a in INTEGER_KINDS) == (b in INTEGER_KINDS)
        or (has_text_keys and a not in INTEGER_KINDS)
        for a, b in zip(saved.path_kinds, leaf.path_kinds, strict=True)
    )


def _signature(saved: Leaf) -> Signature:
    return Signature(saved.kind, saved.dtype, saved.shape, saved.prng_impl)


def _describe(leaf: NamedLeaf) -> str:
    found = signature(leaf.value)
    return type(leaf.value).__name__ if found is None else str(found)
