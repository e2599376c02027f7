"""From a pytree to named leaves.

A leaf's key is ``tree_path_to_string(path, sep="/")`` with each part escaped, so
that one path has one key. What cannot be stored is refused here, before anything
is sent, with all leaves that it concerns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import (
    DictKey,
    FlattenedIndexKey,
    GetAttrKey,
    SequenceKey,
    keystr,
    tree_flatten_with_path,
)

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import MAX_RANK
from storesvc.format.keys import (
    InvalidKeyError,
    check_key,
    check_keys,
    escape_part,
)
from storesvc.format.trees import PRNG_IMPLS, SavedSharding
from storesvc_client._pytree.leaf_names import tree_path_to_string
from storesvc_client._values.gc_pause import collector_paused
from storesvc_client.errors import UnsupportedLeafError
from storesvc_proto.v1 import tree_pb2 as pb

SHOWN: Final = 20
"""Leaves that one message lists."""

_PYTHON_DTYPES: Final = {
    bool: "bool",
    int: "int64",
    float: "float64",
    complex: "complex128",
}


@dataclass(frozen=True, slots=True)
class NamedLeaf:
    """A leaf of a pytree, with its key."""

    key: str
    path_kinds: str
    """A letter for each part of its path; see ``LeafTable.path_kinds``."""
    keypath: tuple[Any, ...]
    value: Any

    @property
    def path(self) -> str:
        """Its path as jax writes it, for messages."""
        return keystr(self.keypath)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a leaf is, apart from its values."""

    kind: "pb.LeafKind.ValueType"
    dtype: str
    """Of what is stored: for PRNG keys, of their key data."""
    shape: tuple[int, ...]
    """Of what is stored."""
    prng_impl: str | None = None

    def __str__(self) -> str:
        if self.prng_impl is not None:
            return f"PRNG keys {self.shape[:-1]} {self.prng_impl}"
        if self.kind == pb.LEAF_KIND_PYTHON_SCALAR:
            return f"a Python scalar ({self.dtype})"
        return f"{self.shape} {self.dtype}"


@collector_paused()
def named_leaves(tree: Any) -> tuple[list[NamedLeaf], Any]:
    """Returns the leaves of a pytree in the order of the pytree, and its treedef.

    Raises:
        UnsupportedLeafError: Two paths would share a key, or one leaf lies below
            another's key, or a key is too long or not Unicode.
    """
    try:
        flat, treedef = tree_flatten_with_path(tree)
    except (ValueError, TypeError) as e:  # such as dict keys 0 and "0" side by side
        raise UnsupportedLeafError(
            f"the tree cannot be flattened by jax: {e}; give each dict keys of one type"
        ) from e
    names = Names()
    leaves = [NamedLeaf(*names.of(path), path, value) for path, value in flat]
    _check_unique(leaves)
    return leaves, treedef


def signature(value: Any) -> Signature | None:
    """Returns what a leaf is; None where a checkpoint cannot hold it."""
    if _is_prng_key(value):
        spec = jax.eval_shape(jax.random.key_data, value)
        impl = _impls().get(value.dtype)
        if impl is None:
            return None
        return Signature(pb.LEAF_KIND_PRNG_KEY, "uint32", spec.shape, impl)
    if isinstance(value, (jax.core.Tracer, np.ma.MaskedArray)):
        return None
    if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        kind = pb.LEAF_KIND_ARRAY
    elif isinstance(value, np.ndarray):
        kind = pb.LEAF_KIND_HOST_ARRAY
    elif isinstance(value, np.generic):
        kind = pb.LEAF_KIND_HOST_SCALAR
    elif type(value) in _PYTHON_DTYPES:
        return Signature(pb.LEAF_KIND_PYTHON_SCALAR, _PYTHON_DTYPES[type(value)], ())
    else:
        return None
    dtype = _stored_dtype(value.dtype)
    return None if dtype is None else Signature(kind, dtype, tuple(value.shape))


def tracer_text(value: Any) -> str:
    """Returns what messages call a tracer: a value inside of ``jit``, to be."""
    return f"a tracer of {value.aval.str_short()}"


def check_values(keys: Sequence[str], values: Sequence[Any]) -> None:
    """Refuses values of leaves that a checkpoint could hold, had they others.

    Raises:
        UnsupportedLeafError: There are such; names them all.
    """
    problems = [
        f"leaf {key!r}: {why}"
        for key, value in zip(keys, values, strict=True)
        if (why := _value_problem(value))
    ]
    if problems:
        raise UnsupportedLeafError(list_problems(problems))


def _problem(value: Any, found: Signature | None) -> str | None:
    """Why a checkpoint cannot hold a leaf; None where it can."""
    if isinstance(value, jax.core.Tracer):
        return f"expected values, got {tracer_text(value)}: call save outside jit"
    if found is None:
        dtype = getattr(value, "dtype", None)
        what = type(value).__name__ if dtype is None else f"an array of {dtype}"
        return (
            "expected an array of a numeric dtype, a PRNG key or a Python number, "
            f"got {what}; store it elsewhere, or convert it"
        )
    if len(found.shape) > MAX_RANK:
        return f"expected at most {MAX_RANK} dimensions, got {len(found.shape)}"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "expected values, got a ShapeDtypeStruct"
    return _value_problem(value)


def _value_problem(value: Any) -> str | None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"expected an int of 64 bits, got {value}"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "its array was deleted or donated; save before that"
    return None


def _span_problem(value: Any, *, is_alone: bool) -> str | None:
    """Why one process alone, or all of a job, cannot save a leaf; None where they
    can."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return None
    if is_alone:
        return (
            "its array spans other processes; let all processes of the job save it, "
            "with Distributed(processes='all')"
        )
    return _elsewhere_problem(value.sharding)


@lru_cache(maxsize=256)
def _elsewhere_problem(sharding: jax.sharding.Sharding) -> str | None:
    """Why a job cannot save a leaf that one other process holds; None where it can.

    What process 0 has for itself, it writes. Any other takes an array of its own
    devices for one that every process has.
    """
    devices: Any = sharding.device_set
    processes = {device.process_index for device in devices}
    if len(processes) > 1 or processes == {0}:
        return None
    (process,) = processes
    return (
        "expected an array on devices of several processes, or of process 0, got one "
        f"on those of process {process} alone; place it on more devices, or let "
        "that process save it by itself, with Distributed(processes='this')"
    )


def saved_sharding(value: Any) -> SavedSharding | None:
    """Returns how a leaf lies on its devices, if that has a portable name."""
    sharding = getattr(value, "sharding", None)
    return _recorded(sharding) if isinstance(sharding, NamedSharding) else None


@lru_cache(maxsize=256)
def _recorded(sharding: NamedSharding) -> SavedSharding | None:
    spec: list[tuple[str, ...]] = []
    for axes in sharding.spec:
        if axes is None:
            spec.append(())
        elif isinstance(axes, str):
            spec.append((axes,))
        elif isinstance(axes, tuple):
            spec.append(axes)
        else:
            return None  # PartitionSpec.UNCONSTRAINED
    mesh = sharding.mesh
    return SavedSharding(
        axis_names=tuple(map(str, mesh.axis_names)),
        axis_sizes=tuple(mesh.axis_sizes),
        spec=tuple(spec),
    )


def list_problems(problems: Sequence[str]) -> str:
    """Returns problems as one text, the first ones of many."""
    more = len(problems) - SHOWN
    lines = [*problems[:SHOWN], *([f"and {more} more"] if more > 0 else ())]
    return "; ".join(lines)


class Names:
    """Keys and kinds of paths; of what leaves share of their paths, made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[str, str]] = {(): ("", "")}

    def of(self, path: tuple[Any, ...]) -> tuple[str, str]:
        """Returns the key and the kinds of a path."""
        # At one place of a tree, equal parts are one part: a dict has 1 or True.
        found = self._known.get(path)
        if found is None:
            above, kinds = self.of(path[:-1])
            part = escape_part(*tree_path_to_string(path[-1:]))
            key = f"{above}/{part}" if kinds else part
            try:
                check_key(key)
            except InvalidKeyError as e:
                raise UnsupportedLeafError(str(e)) from None
            found = self._known[path] = key, kinds + _kind(path[-1])
        return found


def _kind(part: Any) -> str:
    match part:
        case DictKey(key=bool()):
            return "t"
        case DictKey(key=str()):
            return "k"
        case DictKey(key=int()):
            return "n"
        case SequenceKey():
            return "i"
        case GetAttrKey():
            return "a"
        case FlattenedIndexKey(key=int()):
            return "f"
        case _:  # of a class that somebody has registered with jax
            return "t"


@cache
def _impls() -> dict[Any, str]:
    """The PRNG implementations of jax, by the dtype of their keys.

    ``jax.random.key_impl`` would say it too, but of arrays only, not of their
    abstract stand-ins.
    """
    return {jax.random.key(0, impl=name).dtype: name for name in PRNG_IMPLS}


def _check_unique(leaves: Sequence[NamedLeaf]) -> None:
    paths: dict[str, NamedLeaf] = {}
    twice = [
        f"{paths[leaf.key].path} and {leaf.path} are both called {leaf.key!r}"
        for leaf in leaves
        if paths.setdefault(leaf.key, leaf) is not leaf
    ]
    if twice:
        raise UnsupportedLeafError(
            f"each leaf needs a key of its own, but {list_problems(twice)}; rename one"
        )
    try:
        check_keys(sorted(paths))
    except InvalidKeyError as e:
        raise UnsupportedLeafError(f"{e}; rename one") from e


def _is_prng_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and _is_prng_dtype(dtype)


@lru_cache(maxsize=256)
def _is_prng_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@lru_cache(maxsize=256)
def _stored_dtype(dtype: Any) -> str | None:
    """The name of a dtype in a checkpoint; None where it has none."""
    found = np.dtype(dtype)
    return found.name if DTYPES.get(found.name) == found.newbyteorder("=") else None


def storable(
    leaves: Sequence[NamedLeaf], *, is_alone: bool
) -> Iterator[tuple[NamedLeaf, Signature]]:
    """Yields the leaves with what they are, by key.

    Args:
        leaves: Of a pytree.
        is_alone: Whether no other process saves them, too.

    Raises:
        UnsupportedLeafError: A checkpoint cannot hold some; names them all.
    """
    found = [(leaf, signature(leaf.value)) for leaf in leaves]
    problems = [
        f"leaf {leaf.key!r}: {why}"
        for leaf, what in found
        if (why := _problem(leaf.value, what))
        or (why := _span_problem(leaf.value, is_alone=is_alone))
    ]
    if problems:
        raise UnsupportedLeafError(list_problems(problems))
    for leaf, what in sorted(found, key=lambda pair: pair[0].key):
        assert what is not None  # _problem() names such leaves
        yield leaf, what
