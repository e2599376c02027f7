"""Turns a pytree into named leaves, and rejects leaves that cannot be stored.

The key of a leaf is ``tree_path_to_string(path, sep="/")`` with each part escaped, so
that every path has exactly one key; ``KeyCache.find`` computes it. Leaves that a
checkpoint cannot hold are rejected here, before anything is sent, in one error that
lists all of them.

The layout of a leaf is the shard and offset of each part of each of its chunks. Leaves
with one shape and one sharding share a layout. It is computed once and reused by every
save.

Texts, bytes and large integers of a tree, and the items next to it, are stored as
encoded bytes. A save replaces each of them by an ``EncodedLeaf`` before it plans, so
that all later stages see an array of bytes.

Nested mappings, such as the states of NNX, have leaves by path, whose parts are keys:
the number 0 and the text "0" are different ones.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, overload

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
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Grid, Region, intersection, shape_problem
from storesvc.format.keys import (
    ENCODED_KINDS,
    InvalidKeyError,
    check_key,
    check_keys,
    escape_part,
    kind_text,
)
from storesvc.format.trees import PRNG_IMPLS, SavedSharding
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._items.values import encode_python
from storesvc_client.errors import UnsupportedLeafError
from storesvc_proto.v1 import tree_pb2 as pb

GraphPath: TypeAlias = tuple[Any, ...]
"""Path of a leaf in nested mappings: its keys, integers kept as integers."""

IsLeaf: TypeAlias = Callable[[GraphPath, Any], bool]
"""Returns True if the mapping at a path is to be treated as a leaf."""

Index: TypeAlias = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a block that belongs to a chunk."""

    block: int
    """Index of the block in the leaf's blocks."""
    source: Index
    """Position in the block."""
    target: Index
    """Position in the chunk."""
    span: tuple[int, int, int] | None
    """Offset in the block, offset in the chunk and length, in bytes, if the piece is
    contiguous in both."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChunkLayout:
    """Pieces of all chunks of a leaf."""

    pieces: Sequence[Sequence[Piece]]
    """Pieces of each chunk, ordered by their position in it."""
    is_padded: Sequence[bool]
    """For each chunk, True if it extends past the leaf."""
    is_joined: bool
    """True if the leaf is one chunk that consists of its blocks in order."""

    def contiguous_pieces(self, within: int) -> Sequence[Piece] | None:
        """Returns the pieces of a chunk if they are contiguous ranges in order, else
        None."""
        pieces, at = self.pieces[within], 0
        if self.is_padded[within]:
            return None
        for piece in pieces:
            if piece.span is None or piece.span[1] != at:
                return None
            at += piece.span[2]
        return pieces


@lru_cache(maxsize=4096)
def plan_chunk_layout(grid: Grid, blocks: tuple[Region, ...]) -> ChunkLayout:
    """Returns the layout of a leaf.

    Args:
        blocks: The regions that are stored on the host or on a device; they do not
            overlap.
    """
    pieces, is_padded = [], []
    for within in range(grid.count):
        region = grid.region(within)
        found = [
            _piece(grid, number, block, region)
            for number, block in enumerate(blocks)
            if _size(intersection(block, region))
        ]
        found.sort(key=lambda piece: [s.start for s in piece.target])
        pieces.append(tuple(found))
        is_padded.append(_lengths(region) != grid.chunk_shape)
    return ChunkLayout(
        pieces=tuple(pieces),
        is_padded=tuple(is_padded),
        is_joined=grid.count == 1 and not is_padded[0] and _are_joined(pieces[0]),
    )


def _are_joined(pieces: Sequence[Piece]) -> bool:
    at = 0
    for number, piece in enumerate(pieces):
        if piece.block != number or piece.span is None or piece.span[:2] != (0, at):
            return False
        at += piece.span[2]
    return True


def _piece(grid: Grid, number: int, block: Region, chunk: Region) -> Piece:
    shared = intersection(block, chunk)
    lengths = _lengths(shared)
    source = _index(shared, block)
    target = _index(shared, chunk)
    span = None
    if _is_contiguous(lengths, _lengths(block)) and _is_contiguous(
        lengths, grid.chunk_shape
    ):
        span = (
            _offset(source, _lengths(block)) * grid.itemsize,
            _offset(target, grid.chunk_shape) * grid.itemsize,
            _size(shared) * grid.itemsize,
        )
    return Piece(block=number, source=source, target=target, span=span)


def _is_contiguous(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns whether a part of an array is contiguous, in C order."""
    split = next((dim for dim, n in enumerate(part) if n > 1), len(part))
    return list(part[split + 1 :]) == list(whole[split + 1 :])


def _offset(index: Index, shape: Sequence[int]) -> int:
    """Returns the offset in C order, in elements, of the first element of an index."""
    at = 0
    for part, n in zip(index, shape, strict=True):
        at = at * n + int(part.start)
    return at


def _index(part: Region, within: Region) -> Index:
    bounds: Any = zip(part, within, strict=True)
    return tuple(slice(a - first, b - first) for (a, b), (first, _) in bounds)


def _lengths(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def _size(region: Region) -> int:
    size = 1
    for start, stop in region:
        size *= stop - start
    return size


INTEGER: Final = kind_text(pb.LEAF_KIND_INTEGER)
"""Family of all Python integers: those that int64 holds are stored as such."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedLeaf:
    """A value in stored form, as an array."""

    kind: "pb.LeafKind.ValueType"
    array: NDArray[np.uint8]
    """Its bytes; shares their memory."""


def with_encoded(value: Any) -> Any:
    """Returns the encoding of a leaf that is stored as one, and any other leaf
    unchanged."""
    if type(value) not in (str, bytes, int):  # most leaves
        return value
    try:
        encoded = encode_python(value)
    except ValueError:  # the plan rejects it, with its key
        return value
    if encoded is None:
        return value
    return EncodedLeaf(encoded.kind, np.frombuffer(encoded.data, np.uint8))


def as_array(value: Any) -> Any:
    """Returns the array of an encoded leaf, and any other leaf unchanged."""
    return value.array if type(value) is EncodedLeaf else value


def family(kind: "pb.LeafKind.ValueType", dtype: str) -> str | None:
    """Returns the name of the Python type that a leaf of this kind is restored as, if
    leaves of that type are stored encoded or in both ways; else None."""
    if kind == pb.LEAF_KIND_PYTHON_SCALAR and dtype == "int64":
        return INTEGER
    return kind_text(kind) if kind in ENCODED_KINDS else None


MAX_LISTED: Final = 20
"""Maximum leaves that one message lists."""

_MAX_DEPTH: Final = 1000
"""Maximum containers within each other that jax flattens, for messages."""

_PYTHON_DTYPES: Final = {
    bool: "bool",
    int: "int64",
    float: "float64",
    complex: "complex128",
}

_HOST_KINDS: Final = frozenset({pb.LEAF_KIND_HOST_ARRAY, pb.LEAF_KIND_HOST_SCALAR})
"""Kinds of NumPy's values, which always have values that can be read."""


class NamedLeaf(NamedTuple):
    """A leaf of a pytree with its key."""

    key: str
    path_kinds: str
    """One letter for each part of the path; see ``LeafTable.path_kinds``."""
    keypath: tuple[Any, ...]
    value: Any

    @property
    def path(self) -> str:
        """The path in jax's notation, for messages."""
        return keystr(self.keypath)


@dataclass(frozen=True, slots=True)
class Signature:
    """Type, dtype and shape of a leaf, without its values."""

    kind: "pb.LeafKind.ValueType"
    dtype: str
    """dtype of the stored array; for PRNG keys, of their key data."""
    shape: tuple[int, ...]
    """Shape of the stored array; for PRNG keys, of their key data."""
    prng_impl: str | None = None

    def __str__(self) -> str:
        if self.prng_impl is not None:
            return f"PRNG keys {self.shape[:-1]} {self.prng_impl}"
        if self.kind in ENCODED_KINDS:
            return f"a Python value ({family(self.kind, self.dtype)})"
        if self.kind == pb.LEAF_KIND_PYTHON_SCALAR:
            return f"a Python scalar ({self.dtype})"
        return f"{self.shape} {self.dtype}"


@collector_paused()
def named_leaves(tree: Any) -> tuple[list[NamedLeaf], Any]:
    """Returns the leaves of a pytree in the order of the pytree, and its treedef."""
    try:
        flat, treedef = tree_flatten_with_path(tree)
    # for example, dict keys 0 and "0" in one dict
    except (ValueError, TypeError) as e:
        raise UnsupportedLeafError(_flattening_problem(tree, e)) from e
    except (RecursionError, SystemError) as e:  # jax raises the one from the other
        raise UnsupportedLeafError(
            f"the tree: expected at most {_MAX_DEPTH} containers within each other, "
            "got more, or one that contains itself; save a tree that is less nested"
        ) from e
    keys = KeyCache()
    leaves = [NamedLeaf(*keys.find(path), path, value) for path, value in flat]
    _check_unique(leaves)
    return leaves, treedef


def _flattening_problem(tree: Any, error: Exception) -> str:
    """Returns which node of a tree jax cannot flatten, and why."""
    left: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
    while left:
        path, node = left.pop()
        place = keystr(path) or "the tree"
        try:
            below = tree_flatten_with_path(
                node, is_leaf=lambda x, node=node: x is not node
            )
        except (ValueError, TypeError) as e:
            if not isinstance(node, Mapping):
                return f"{place}: jax cannot flatten a {type(node).__name__}: {e}"
            types = " and ".join(sorted({type(key).__name__ for key in node}))
            return (
                f"{place}: expected dict keys that can be compared, as jax sorts them, "
                f"got keys of {types}; use keys of one type, such as texts"
            )
        left += [((*path, *more), child) for more, child in below[0] if more]
    return f"the tree cannot be flattened by jax: {error}"


def signature(value: Any) -> Signature | None:
    """Returns the signature of a leaf, or None if a checkpoint cannot hold it."""
    value = with_encoded(value)
    if type(value) is EncodedLeaf:
        return _signature(value.kind, "uint8", value.array.shape)
    if type(value) in _PYTHON_DTYPES:
        return _signature(pb.LEAF_KIND_PYTHON_SCALAR, _PYTHON_DTYPES[type(value)], ())
    own_dtype = getattr(value, "dtype", None)
    if own_dtype is not None and _is_prng_dtype(own_dtype):
        impl, shape = _impls().get(value.dtype, (None, ()))
        if impl is None:
            return None
        return _signature(pb.LEAF_KIND_PRNG_KEY, "uint32", (*value.shape, *shape), impl)
    cls: Any = type(value)
    kind = _array_kind(cls)
    dtype = None if kind is None else _stored_dtype(own_dtype)
    if kind is None or dtype is None:
        return None
    return _signature(kind, dtype, tuple(value.shape))


@lru_cache(maxsize=1024)  # a tree has many leaves, and few shapes
def _signature(
    kind: "pb.LeafKind.ValueType",
    dtype: str,
    shape: tuple[int, ...],
    prng_impl: str | None = None,
) -> Signature:
    return Signature(kind, dtype, shape, prng_impl)


@lru_cache(maxsize=256)
def _array_kind(cls: type) -> "pb.LeafKind.ValueType | None":
    """Returns the kind of arrays of a class, or None if a checkpoint holds none."""
    if issubclass(cls, (jax.core.Tracer, np.ma.MaskedArray)):
        return None
    if issubclass(cls, (jax.Array, jax.ShapeDtypeStruct)):
        return pb.LEAF_KIND_ARRAY
    if issubclass(cls, np.ndarray):
        return pb.LEAF_KIND_HOST_ARRAY
    return pb.LEAF_KIND_HOST_SCALAR if issubclass(cls, np.generic) else None


def tracer_text(value: Any) -> str:
    """Returns the description of a tracer (a value inside ``jit``) for messages."""
    return f"a tracer of {value.aval.str_short()}"


def check_values(keys: Sequence[str], values: Sequence[Any]) -> None:
    """Rejects values that cannot be saved, among leaves whose type can be."""
    problems = [
        f"leaf {key!r}: {why}"
        for key, value in zip(keys, values, strict=True)
        if (why := _value_problem(value))
    ]
    if problems:
        raise UnsupportedLeafError(list_problems(problems))


def _problem(value: Any, found: Signature | None) -> str | None:
    """Returns why a checkpoint cannot hold a leaf, or None if it can."""
    too_large = None if found is None else shape_problem(found.shape)
    if found is not None and found.kind in _HOST_KINDS:
        return too_large
    if isinstance(value, jax.core.Tracer):
        return f"expected values, got {tracer_text(value)}: call save outside jit"
    if found is None:
        if type(value) in (str, bytes, int):
            return _encoding_problem(value)
        dtype = getattr(value, "dtype", None)
        is_masked = isinstance(value, np.ma.MaskedArray)
        what = f"{'a masked' if is_masked else 'an'} array of {dtype}"
        what = type(value).__name__ if dtype is None else what
        return (
            "expected an array of a numeric dtype, a PRNG key, a Python number, text "
            f"or bytes, got {what}; store it elsewhere, or convert it"
        )
    if too_large is not None:
        return too_large
    if isinstance(value, jax.ShapeDtypeStruct):
        return "expected values, got a ShapeDtypeStruct; save arrays"
    return _value_problem(value)


def _encoding_problem(value: Any) -> str:
    """Returns why a text, bytes or an integer cannot be encoded."""
    try:
        encode_python(value)
    except ValueError as e:
        return str(e)
    raise AssertionError(value)


def _value_problem(value: Any) -> str | None:
    if isinstance(value, jax.Array) and value.is_deleted():
        return (
            "expected a live array, got a deleted or donated one; save it before that"
        )
    return None


def _span_problem(value: Any, *, is_alone: bool) -> str | None:
    """Returns why one process alone, or all processes of a job, cannot save a leaf."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return None
    if is_alone:
        return (
            "expected an array of this process alone, got one that spans other "
            "processes; let all processes of the job save it, with "
            "Distributed(processes='all')"
        )
    return _single_process_problem(value.sharding)


@lru_cache(maxsize=256)
def _single_process_problem(sharding: jax.sharding.Sharding) -> str | None:
    """Returns why a job cannot save a leaf that one other process holds.

    A leaf that only process 0 holds is written by process 0. Every other process
    assumes that an array on its own devices is the same on all processes.
    """
    devices: Any = sharding.device_set
    processes = {device.process_index for device in devices}
    if len(processes) > 1 or processes == {0}:
        return None
    (process,) = processes
    return (
        "expected an array on devices of several processes, or of process 0, got one "
        f"on devices of process {process} alone; place it on more devices, or let "
        "that process save it by itself, with Distributed(processes='this')"
    )


def saved_sharding(value: Any) -> SavedSharding | None:
    """Returns the placement of a leaf on its devices, if it can be recorded
    portably."""
    sharding = getattr(value, "sharding", None)
    return _record_sharding(sharding) if isinstance(sharding, NamedSharding) else None


@lru_cache(maxsize=256)
def _record_sharding(sharding: NamedSharding) -> SavedSharding | None:
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
    """Returns the problems as one text, at most ``MAX_LISTED`` of them."""
    more = len(problems) - MAX_LISTED
    lines = [*problems[:MAX_LISTED], *([f"and {more} more"] if more > 0 else ())]
    return "; ".join(lines)


class KeyCache:
    """Cache of the keys and kinds of containers, which are prefixes of the keys and
    kinds of their leaves."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[str, str]] = {(): ("", "")}

    def find(self, path: tuple[Any, ...]) -> tuple[str, str]:
        """Returns the key and the kinds of a path."""
        if not path:
            return "", ""
        # Within one container, equal parts are one part: a dict has 1 or True, not
        # both.
        above = self._known.get(path[:-1])
        if above is None:
            above = self._known[path[:-1]] = self.find(path[:-1])
        key, kinds = above
        part = escape_part(part_text(path[-1]))
        key = f"{key}/{part}" if kinds else part
        try:
            check_key(key)
        except InvalidKeyError as e:
            raise UnsupportedLeafError(str(e)) from None
        return key, kinds + _kind(path[-1])


def _kind(part: Any) -> str:
    match part:
        case DictKey(key=str()):
            return "k"
        case SequenceKey():
            return "i"
        case GetAttrKey():
            return "a"
        case DictKey(key=bool()):
            return "t"
        case DictKey(key=int()):
            return "n"
        case FlattenedIndexKey(key=int()):
            return "f"
        case _:  # a class that the user registered with jax
            return "t"


@contextmanager
def permit_jax() -> Generator[None]:
    """Permits what a caller may have jax reject: transfers, and the tracing of what was
    not traced before."""
    # not every jax has such a setting
    tracing = getattr(jax, "no_tracing", nullcontext)(False)  # noqa: FBT003 - no name
    with jax.transfer_guard("allow"), tracing:
        yield


@cache
def _impls() -> dict[Any, tuple[str, tuple[int, ...]]]:
    """Returns the PRNG implementations of jax, each with the shape of the data of a
    key, by the dtype of their keys.

    ``jax.random`` has functions for both, but for the first one only of arrays, not of
    their abstract stand-ins (ShapeDtypeStruct), and the second one traces.
    """
    with permit_jax():
        keys = {name: jax.random.key(0, impl=name) for name in PRNG_IMPLS}
        return {
            key.dtype: (name, jax.random.key_data(key).shape)
            for name, key in keys.items()
        }


def _check_unique(leaves: Sequence[NamedLeaf]) -> None:
    paths: dict[str, NamedLeaf] = {}
    twice = [
        f"{paths[leaf.key].path} and {leaf.path} both have the key {leaf.key!r}"
        for leaf in leaves
        if paths.setdefault(leaf.key, leaf) is not leaf
    ]
    if twice:
        raise UnsupportedLeafError(
            f"expected a unique key for each leaf, but {list_problems(twice)}; rename "
            "one"
        )
    try:
        check_keys(sorted(paths))
    except InvalidKeyError as e:
        raise UnsupportedLeafError(f"{e}; rename one") from e


@lru_cache(maxsize=256)
def _is_prng_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


@lru_cache(maxsize=256)
def _stored_dtype(dtype: Any) -> str | None:
    """Returns the name of a dtype in a checkpoint, or None if it has none."""
    found = np.dtype(dtype)
    same = DTYPES.get(found.name)
    # in this order: NumPy's StringDType has no byte order to replace
    return found.name if same is not None and same == found.newbyteorder("=") else None


def storable(
    leaves: Sequence[NamedLeaf], *, is_alone: bool
) -> Iterator[tuple[NamedLeaf, Signature]]:
    """Yields the leaves with their signatures, ordered by key.

    Args:
        is_alone: True if no other process saves the tree, too.
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


def path_text(path: GraphPath) -> str:
    """Returns the path in index notation, which distinguishes 0 from "0"."""
    return "".join(f"[{key!r}]" for key in path) or "the root"


@overload
def tree_path_to_string(path: tuple[Any, ...], sep: None = None) -> tuple[str, ...]: ...
@overload
def tree_path_to_string(path: tuple[Any, ...], sep: str) -> str: ...
def tree_path_to_string(
    path: tuple[Any, ...], sep: str | None = None
) -> str | tuple[str, ...]:
    """Returns the parts of a JAX tree path as text, joined by ``sep`` if given.

    Joined parts are ambiguous when a part contains ``sep``; the keys of the store
    therefore escape each part first (``storesvc.format.keys``).
    """
    parts = tuple(map(part_text, path))
    return parts if sep is None else sep.join(parts)


def part_text(part: Any) -> str:
    """Returns one part of a JAX tree path as text."""
    match part:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=name) | GetAttrKey(name=name):
            return str(name)
        case _:
            return str(part)


def is_flatten(tree: Mapping[Any, Any]) -> bool:
    """Returns whether a key of the dict is a path, which is a tuple.

    Raises:
        AttributeError: ``tree`` has no keys.
    """
    keys = tree.keys()
    return any(isinstance(key, tuple) for key in keys)


def mapping_leaves(
    xs: Any, *, is_leaf: IsLeaf | None = None, keep_empty_nodes: bool = False
) -> dict[GraphPath, Any]:
    """Returns the leaves of nested mappings, or of one flat with tuple keys, by path.

    Raises:
        ValueError: Two leaves have one path, or one is below another.
    """
    leaves: dict[GraphPath, Any] = {}

    def walk(path: GraphPath, node: Any) -> Iterator[tuple[GraphPath, Any]]:
        if not isinstance(node, Mapping) or (is_leaf and is_leaf(path, node)):
            yield path, node
            return
        for key, value in node.items():
            # A tuple is a path only at the top level; below, it is an ordinary key.
            below = key if not path and isinstance(key, tuple) else (*path, key)
            yield from walk(below, value)
        if keep_empty_nodes and path and not node:
            from flax.traverse_util import empty_node

            yield path, empty_node

    add_leaves(leaves, walk((), xs))
    if isinstance(xs, Mapping) and is_flatten(xs):
        _refuse_leaves_below_leaves(leaves)
    return leaves


def add_leaves(
    leaves: dict[GraphPath, Any], more: Iterable[tuple[GraphPath, Any]]
) -> None:
    """Adds leaves to a dict of leaves."""
    for path, leaf in more:
        if path in leaves:
            raise ValueError(
                f"two leaves have the path {path_text(path)}: expected at most one"
            )
        leaves[path] = leaf


def nest_leaves(leaves: Mapping[GraphPath, Any]) -> dict[Any, Any]:
    """Returns the nested dict of leaves given by path."""
    if () in leaves:
        raise ValueError("expected every leaf below a key, got a leaf at the root")
    _refuse_leaves_below_leaves(leaves)
    root: dict[Any, Any] = {}
    nodes: dict[GraphPath, dict[Any, Any]] = {(): root}
    for path, leaf in leaves.items():
        above = path[:-1]
        if above not in nodes:
            for length in range(1, len(path)):
                if path[:length] not in nodes:
                    nodes[path[:length]] = nodes[path[: length - 1]].setdefault(
                        path[length - 1], {}
                    )
        nodes[above][path[-1]] = leaf
    return root


def _refuse_leaves_below_leaves(leaves: Mapping[GraphPath, Any]) -> None:
    seen: set[GraphPath] = set()
    for path in leaves:
        above = path[:-1]
        # Siblings share all paths above them; each is looked up once.
        while above and above not in seen:
            if above in leaves:
                raise ValueError(
                    f"expected no leaf above another, got {path_text(path)} below "
                    f"{path_text(above)}"
                )
            seen.add(above)
            above = above[:-1]
