"""Linen variables as NNX state, and back.

Linen keeps ``{"params": {"Dense_0": {"kernel": leaf}}}``: first the collection, then
the path. NNX keeps ``{"Dense_0": {"kernel": nnx.Param(leaf)}}``: the collection is the
type of the Variable, by the registry that ``nnx.bridge`` uses too. A metadata box,
such as ``nn.Partitioned``, becomes metadata of the Variable, so that
``nnx.get_partition_spec`` reads it; what Linen has no box for becomes an
``nnx.bridge.NNXMeta``. Three properties hold throughout:

* **There and back is the identity**: paths, values, types of boxes and their fields.
  Only the flags that say how NNX holds a value (``ref``, ``hijax``, ...) have no
  place in Linen.
* **What cannot cross is refused**, with its place: a Variable that would have to
  stand at two places at once, or nowhere, is never dropped.
* **Inputs stay as they were.** Arrays are shared, and stay on their devices, whatever
  mesh is set. Abstract leaves cross as well as arrays do, so that a checkpoint of one
  kind is restored as the other:

>>> variables = {"params": {"Dense_0": {"bias": jnp.zeros(3)}}}
>>> _ = run.save(0, variables).result()
>>> like = linen_to_nnx(jax.eval_shape(lambda: variables))
>>> linen_to_nnx(run.restore(0, like=nnx_to_linen(like)))
State({
  'Dense_0': {
    'bias': Param( # 3 (12 B)
      value=Array([0., 0., 0.], dtype=float32)
    )
  }
})
"""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, Final, TypeAlias

import jax
from flax import nnx
from flax.core.meta import AxisMetadata
from flax.nnx.bridge import NNXMeta

from storesvc_client.trees.nnx.graphs import GraphState

__all__ = ["linen_to_nnx", "nnx_to_linen"]

_Path: TypeAlias = tuple[str, ...]
_Variable: TypeAlias = "nnx.Variable[Any]"

_BOX_TYPE: Final = "linen_meta_type"
"""Where flax notes, in a Variable's metadata, the type of the box that it was."""

_STREAMS: Final = frozenset({"RngCount", "RngKey", "RngState"})


def linen_to_nnx(variables: Mapping[str, Any]) -> GraphState:
    """Returns the state of the NNX module that holds these variables.

    Args:
        variables: Collections by name, as ``init`` returns them; a dict or a
            FrozenDict, of arrays or of their abstract stand-ins. The name of a new
            collection is registered, as flax does it.

    Raises:
        TypeError: A key is not a string, a collection is not a mapping or is of RNG
            streams, or a box keeps something that NNX cannot.
        ValueError: Two collections have leaves at one path, or one above another's;
            a mapping is empty; an ``NNXMeta`` is of another collection.
    """
    found: dict[_Path, tuple[str, _Variable]] = {}
    for path, leaf in _leaves(variables, "Linen variables"):
        collection, *below = path
        if not below:
            raise TypeError(
                f"collection {collection!r}: expected a mapping of variables, got "
                f"{type(leaf).__name__}"
            )
        at = tuple(below)
        if at in found:
            raise _clash(at, collection, at, found[at][0])
        found[at] = collection, _variable("/".join(path), collection, leaf)
    _refuse_leaves_below_leaves({at: name for at, (name, _) in found.items()})
    return nnx.from_flat_state((at, leaf) for at, (_, leaf) in found.items())


def nnx_to_linen(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the Linen variables that NNX state holds.

    Args:
        state: A State of Variables, as ``nnx.split`` returns it, or nested dicts of
            them.

    Raises:
        TypeError: A key is not a string, as in a list of layers; a leaf is not a
            Variable, or is an RNG stream's.
        ValueError: A type of Variable has no collection; a mapping is empty.
    """
    variables: dict[str, Any] = {}
    for path, leaf in _leaves(state, "NNX state"):
        node = variables
        for key in (_collection("/".join(path), leaf), *path[:-1]):
            node = node.setdefault(key, {})
        node[path[-1]] = _linen_leaf(leaf)
    return variables


def _leaves(tree: Any, what: str) -> Iterator[tuple[_Path, Any]]:
    if not isinstance(tree, Mapping):
        raise TypeError(f"{what}: expected a mapping, got {type(tree).__name__}")
    yield from _leaves_below((), tree)


def _leaves_below(path: _Path, node: Any) -> Iterator[tuple[_Path, Any]]:
    if not isinstance(node, Mapping):
        yield path, node
        return
    if path and not node:
        raise ValueError(
            f"{'/'.join(path)}: expected leaves, got an empty mapping, which would not "
            "come back; leave it out"
        )
    for key, value in node.items():
        if not isinstance(key, str):
            raise TypeError(
                f"{'/'.join((*path, repr(key)))}: expected keys that are strings, got "
                f"{type(key).__name__} {key!r}; Linen has no others, so give layers "
                "names, such as 'layers_0', instead of numbers"
            )
        yield from _leaves_below((*path, key), value)


def _refuse_leaves_below_leaves(collections: Mapping[_Path, str]) -> None:
    for path, collection in collections.items():
        for length in range(1, len(path)):
            above = path[:length]
            if above in collections:
                raise _clash(path, collection, above, collections[above])


def _clash(path: _Path, collection: str, other: _Path, holder: str) -> ValueError:
    return ValueError(
        f"expected one Variable at {'/'.join(other)!r}, as NNX keeps all collections "
        f"in one tree, got {'/'.join((holder, *other))!r} and "
        f"{'/'.join((collection, *path))!r}; rename one, or convert the collections "
        "apart"
    )


def _variable(place: str, collection: str, leaf: Any) -> _Variable:
    kind = _variable_type(collection)
    if isinstance(leaf, nnx.Variable):
        raise TypeError(
            f"{place}: expected an array or a box, got an NNX {type(leaf).__name__}; "
            "NNX state is what nnx_to_linen takes"
        )
    if isinstance(leaf, NNXMeta):
        if leaf.var_type is not kind:
            raise ValueError(
                f"{place}: expected an NNXMeta of {kind.__name__}, by its collection, "
                f"got one of {leaf.var_type.__name__}"
            )
        return _filled(kind, leaf.value, leaf.metadata)
    if not isinstance(leaf, AxisMetadata):
        return _filled(kind, leaf, {})
    metadata = _box_metadata(leaf)
    if "value" not in metadata or metadata.keys() & nnx.Variable.required_metadata:
        raise _stuck(place, leaf)
    variable = _filled(kind, metadata.pop("value"), metadata | {_BOX_TYPE: type(leaf)})
    # The structure of a box is its type and all its fields but the value.
    before: Any = jax.tree.structure(leaf)
    if before != jax.tree.structure(_linen_leaf(variable)):
        raise _stuck(place, leaf)
    return variable


def _stuck(place: str, box: Any) -> TypeError:
    return TypeError(
        f"{place}: expected a box that NNX metadata can hold, got "
        f"{type(box).__name__}, which would not come back as it was; give it "
        "to_nnx_metadata and from_nnx_metadata, or unbox it with flax.linen.meta.unbox"
    )


def _variable_type(collection: str) -> type[_Variable]:
    # bridge.ToLinen names collections so, but registers the names only when it runs.
    if collection in _STREAMS:
        raise TypeError(
            f"collection {collection!r}: expected variables, got those of an RNG "
            "stream; keep them apart, and give streams as rngs="
        )
    try:
        return nnx.variable_type_from_name(collection, allow_register=True)
    except ValueError as e:  # such as a name with a NUL
        raise ValueError(f"collection {collection!r} cannot name a type: {e}") from e


def _filled(
    kind: type[_Variable], value: Any, metadata: Mapping[str, Any]
) -> _Variable:
    # By `copy`, as the constructor would move the value onto a mesh that is set or
    # that the metadata names, and would fail on an abstract one.
    return kind(None).copy(value, **metadata)


def _box_metadata(box: Any) -> dict[str, Any]:
    """The fields of a box by the names that NNX has for them, ``value`` among them."""
    own = copy(box)  # LogicallyPartitioned.to_nnx_metadata takes the box apart
    to_metadata = getattr(own, "to_nnx_metadata", None)
    return dict(vars(own) if to_metadata is None else to_metadata())


def _collection(place: str, leaf: Any) -> str:
    if not isinstance(leaf, nnx.Variable):
        raise TypeError(
            f"{place}: expected an nnx.Variable, whose type names the collection, got "
            f"{type(leaf).__name__}"
        )
    kind = type(leaf)
    if isinstance(leaf, nnx.RngState):
        raise TypeError(
            f"{place}: expected Variables with a Linen collection, got {kind.__name__} "
            "of an RNG stream; split those off: nnx.split(module, nnx.RngState, ...)"
        )
    try:
        return nnx.variable_name_from_type(kind)
    except ValueError as e:
        raise ValueError(
            f"{place}: expected a type of Variable that has a Linen collection, got "
            f"{kind.__name__}; name one: nnx.register_variable_name('...', "
            f"{kind.__name__})"
        ) from e


def _linen_leaf(variable: _Variable) -> Any:
    metadata = variable.get_metadata()
    # Raw, as hooks may change what is read; they come back as metadata.
    value = variable.get_value() if metadata["ref"] else variable.get_raw_value()
    said = set(metadata) - nnx.Variable.required_metadata
    if not said:
        return value
    box = _box(metadata, value) if _BOX_TYPE in metadata else None
    if box is None or not said - {_BOX_TYPE} <= set(_box_metadata(box)):
        return NNXMeta(type(variable), value, metadata)
    return box


def _box(metadata: Mapping[str, Any], value: Any) -> Any:
    """The box that a Variable was; None where its metadata no longer makes one."""
    fields = {"value": value, **metadata}
    kind = fields.pop(_BOX_TYPE)
    try:
        if hasattr(kind, "from_nnx_metadata"):
            return kind.from_nnx_metadata(fields)
        flags = nnx.Variable.required_metadata
        return kind(**{name: fields[name] for name in set(fields) - flags})
    except (KeyError, TypeError):
        return None
