"""Decides which tensors a flat format stores: names, dtypes and shapes.

A flat format, safetensors or npz, is a list of named arrays. What it would lose is
rejected, with the name of the leaf: a Python number would come back as an array, a PRNG
key as numbers; texts and bytes have no dtype.
"""

import json
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from storesvc.format.dtypes import DTYPES, is_floating
from storesvc.format.grids import Region
from storesvc.format.keys import split_key
from storesvc.format.trees import Leaf
from storesvc_client._export.renames import Renamed, Renames
from storesvc_client._export.source import Source
from storesvc_client._values.item_values import unpack_document
from storesvc_client._values.key_patterns import matching_keys
from storesvc_client.errors import (
    InvalidRequestError,
    PreconditionError,
    StructureError,
)
from storesvc_proto.v1 import tree_pb2 as pb

ARRAYS: Final = frozenset(
    {pb.LEAF_KIND_ARRAY, pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR}
)
"""Kinds of leaves that every format holds, and that a cast applies to."""

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An array of an exported file."""

    row: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    """Shape of the stored chunks, in the order of the exported dimensions."""
    axes: tuple[int, ...] | None
    """Permutation of the saved dimensions; None for none."""
    is_renamed: bool
    """True if a rule named it."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        itemsize: int = DTYPES[self.dtype].itemsize
        return itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    def saved(self, region: Region) -> Region:
        """Returns the region of the saved leaf for a region of the tensor."""
        if self.axes is None:
            return region
        found = list(region)
        for at, axis in enumerate(self.axes):
            found[axis] = region[at]
        return tuple(found)


def exported_dtype(leaf: Leaf, cast: str | None) -> str:
    """Returns the dtype of an exported leaf: the cast's, for floating-point arrays."""
    if cast is not None and leaf.kind in ARRAYS and is_floating(leaf.dtype):
        return cast
    return leaf.dtype


def plan_tensors(
    source: Source,
    *,
    cast: str | None,
    table: Renames,
    separator: str,
    dtypes: Collection[str],
    target: str,
) -> list[Tensor]:
    """Returns the tensors of the selected leaves, in the order of their names.

    Args:
        source: The checkpoint.
        cast: Name of the dtype to cast to, or None.
        table: Renames.
        separator: Joins the parts of a path that no rule renames; "/" keeps the key.
        dtypes: Names of the dtypes that the format holds.
        target: Name of the format, for messages.

    Raises:
        PreconditionError: The format would lose a leaf, two have one name, or the
            table of a model does not name a leaf.
        InvalidRequestError: A rule does not fit a leaf, or none matches one.
    """
    keys = [leaf.key for leaf in source.tree.leaves[: source.tree.tree_count]]
    found = [table.rename(".".join(split_key(key))) for key in keys]
    if table.rules and source.rows:
        _check_names(source, table, keys, found)
    fault = partial(_fault, source, cast=cast, dtypes=dtypes, target=target)
    source.check_rejected([(row, text) for row in source.rows if (text := fault(row))])
    by_name: dict[str, Tensor] = {}
    for row in source.rows:
        leaf = source.leaf(row)
        name, axes, rule, _ = found[row]
        if rule is None and separator != ".":
            name = leaf.key
        if axes is not None and len(axes) != len(leaf.shape):
            raise InvalidRequestError(
                f"{source.describe(row)}: expected {len(axes)} dimensions, which its "
                f"rename transposes, got the shape {leaf.shape}; correct the rule"
            )
        tensor = Tensor(
            row=row,
            name=name,
            dtype=exported_dtype(leaf, cast),
            shape=_permuted(leaf.shape, axes),
            chunk_shape=_permuted(leaf.chunk_shape, axes),
            axes=axes,
            is_renamed=rule is not None,
        )
        other = by_name.setdefault(name, tensor)
        if other is not tensor:
            raise PreconditionError(
                f"{source.describe(row)}: expected a name of its own, got {name!r}, "
                f"which leaf {source.leaf(other.row).key!r} has; rename one of them "
                "with rename=, or leave one out with select= (--select)"
            )
    return [by_name[name] for name in sorted(by_name)]


def _check_names(
    source: Source, table: Renames, keys: Sequence[str], found: Sequence[Renamed]
) -> None:
    """Rejects a table that names no leaf, and that of a model if it does not name
    each selected leaf once; logs rules without effect."""
    applied = {found[row].rule for row in source.rows}
    if applied == {None}:
        raise InvalidRequestError(
            f"{source.describe(source.rows[0])}: expected a name that a rule of "
            f"{table.place} matches, got {found[source.rows[0]].name!r} and no match "
            f"for any of {len(source.rows)} leaves; correct the rules, or leave "
            "rename= out"
        )
    if not table.model:
        unused = [at for at in range(len(table.rules)) if at not in applied]
        if unused and None in applied:
            _log.warning(
                "export of %s: %s: no leaf has a name that rule %s matches: %r",
                *(source.name, table.place, unused[0]),
                table.rules[unused[0]].pattern.pattern,
            )
        return
    tied = _true_settings(source) if table.unused else ()
    trees = {found[row].tree for row in source.rows if found[row].rule is not None}
    tree = min(trees, key=lambda tree: (tree.count("."), tree))

    def fault(name: Renamed) -> str | None:
        if name.rule is None:
            return f"a parameter of {table.model}, got a leaf that {table.place} lacks"
        if name.tree != tree:
            return f"{table.model} once, got that of {tree.rstrip('.')!r}, too"
        if (setting := table.unused.get(name.name)) in tied:
            return f"no {name.name} in a model with {setting}, got one"
        return None

    faults = [(row, text) for row in source.rows if (text := fault(found[row]))]
    if faults:
        fits = [key for key, name in zip(keys, found, strict=True) if not fault(name)]
        advice = _select(tree, fits, keys)
        rejected = [(row, f"expected {text}; {advice}") for row, text in faults]
        source.check_rejected(rejected)


def _select(tree: str, fits: Sequence[str], keys: Sequence[str]) -> str:
    """Returns the advice to select the leaves of a tree that a table names."""
    for depth in (tree.count("."), tree.count(".") + 1):
        globs = sorted({"/".join([*k.split("/")[:depth], "**"]) for k in fits})
        selected = {key for glob in globs for key in matching_keys(glob, keys)}
        if globs and selected == {*fits}:
            options = " ".join(f"--select '{glob}'" for glob in globs)
            select = globs[0] if len(globs) == 1 else globs
            return f"leave it out with select={select!r} ({options})"
    return "leave it out with select= (--select), or give rules that name it (rename=)"


def _true_settings(source: Source) -> Collection[str]:
    """Returns the names of the settings of the saved config that are true."""
    config = source.items.get("config")  # as EasyDeL's checkpoints have it
    try:
        if config is None:
            config = unpack_document(source.tree.structure)["config"]
            config = dict(config.get("fields") or config["dict"])
        elif isinstance(config, str):
            config = json.loads(config)
        return {name for name, value in config.items() if value is True}
    except (StructureError, LookupError, AttributeError, TypeError, ValueError):
        return ()  # no config of a model


def _fault(
    source: Source,
    row: int,
    *,
    cast: str | None,
    dtypes: Collection[str],
    target: str,
) -> str | None:
    """Returns why the format would lose a leaf; None if it holds it."""
    leaf = source.leaf(row)
    remedy = "leave it out with select= (--select)"
    if leaf.kind not in ARRAYS:
        return (
            f"expected an array, got the kind {source.kind(row)}, which {target} would "
            f"not give back; {remedy}"
        )
    dtype = exported_dtype(leaf, cast)
    if dtype in dtypes:
        return None
    if is_floating(dtype):
        remedy = f"cast it (cast='float32', --dtype float32), or {remedy}"
    return f"expected a dtype that {target} holds, got {dtype}; {remedy}"


def _permuted(sizes: tuple[int, ...], axes: tuple[int, ...] | None) -> tuple[int, ...]:
    return sizes if axes is None else tuple(sizes[axis] for axis in axes)
