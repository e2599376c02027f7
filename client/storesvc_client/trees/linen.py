"""Converts Linen variables to NNX state, and back.

Linen stores ``{"params": {"Dense_0": {"kernel": leaf}}}``: first the collection, then
the path. NNX stores ``{"Dense_0": {"kernel": nnx.Param(leaf)}}``: the collection is the
type of the Variable, by the registry that ``nnx.bridge`` also uses. A metadata box,
such as ``nn.Partitioned``, becomes metadata of the Variable, which
``nnx.get_partition_spec`` reads. Metadata without a Linen box becomes an
``nnx.bridge.NNXMeta``. Three guarantees:

* **A round trip is the identity**: paths, values, types of boxes and their fields. Only
  the flags of an NNX value (``ref``, ``hijax``, ...) have no equivalent in Linen.
* **What cannot be converted is rejected**, with its path: a Variable that would have
  two paths, or none, is never dropped.
* **Inputs are never modified.** Arrays are shared, and stay on their devices, whatever
  mesh is set. Abstract leaves are converted like arrays, so a checkpoint of one kind
  can be restored as the other:

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
"""Metadata entry in which flax records the type of the box of a Variable."""

_STREAMS: Final = frozenset({"RngCount", "RngKey", "RngState"})


def linen_to_nnx(variables: Mapping[str, Any]) -> GraphState:
    """Returns the state of the NNX module that holds these variables.

    Args:
        variables: Collections by name, as ``init`` returns them; a dict or FrozenDict
            of arrays or of their abstract stand-ins. Names of new collections are
            registered, as flax does it.

    Raises:
        TypeError: A key is not a string, a collection is not a mapping or holds RNG
            streams, or NNX cannot represent the fields of a box.
        ValueError: Two collections have leaves with one path, or one leaf is below
            another; a mapping is empty; an ``NNXMeta`` is of another collection.
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
    for at, (collection, _) in found.items():
        for above in (at[:length] for length in range(1, len(at))):
            if above in found:
                raise _clash(at, collection, above, found[above][0])
    return nnx.from_flat_state((at, leaf) for at, (_, leaf) in found.items())


def nnx_to_linen(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the Linen variables of an NNX state.

    Args:
        state: A State of Variables, as ``nnx.split`` returns it, or nested dicts of
            Variables.

    Raises:
        TypeError: A key is not a string, as in a list of layers; a leaf is not a
            Variable, or belongs to an RNG stream.
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
            f"{'/'.join(path)}: expected leaves, got an empty mapping, which would be "
            "lost; leave it out"
        )
    for key, value in node.items():
        if not isinstance(key, str):
            raise TypeError(
                f"{'/'.join((*path, repr(key)))}: expected keys that are strings, got "
                f"{type(key).__name__} {key!r}; Linen has no others, so give layers "
                "names, such as 'layers_0', instead of numbers"
            )
        yield from _leaves_below((*path, key), value)


def _clash(path: _Path, collection: str, other: _Path, holder: str) -> ValueError:
    return ValueError(
        f"expected one Variable at {'/'.join(other)!r}, because NNX stores all "
        f"collections in one tree, got {'/'.join((holder, *other))!r} and "
        f"{'/'.join((collection, *path))!r}; rename one, or convert the collections "
        "separately"
    )


def _variable(place: str, collection: str, leaf: Any) -> _Variable:
    # bridge.ToLinen uses these collection names, but registers them only when it runs.
    if collection in _STREAMS:
        raise TypeError(
            f"collection {collection!r}: expected variables, got an RNG stream's; "
            "remove it, and pass streams as rngs="
        )
    try:
        kind = nnx.variable_type_from_name(collection, allow_register=True)
    except ValueError as e:  # for example, a name with a NUL
        raise ValueError(f"collection {collection!r} cannot name a type: {e}") from e
    if isinstance(leaf, nnx.Variable):
        raise TypeError(
            f"{place}: expected an array or a box, got an NNX {type(leaf).__name__}; "
            "convert NNX state with nnx_to_linen"
        )
    if isinstance(leaf, NNXMeta):
        if leaf.var_type is not kind:
            raise ValueError(
                f"{place}: expected an NNXMeta of {kind.__name__}, by its collection, "
                f"got one of {leaf.var_type.__name__}"
            )
        return _fill_variable(kind, leaf.value, leaf.metadata)
    if not isinstance(leaf, AxisMetadata):
        return _fill_variable(kind, leaf, {})
    metadata = _box_metadata(leaf)
    if "value" not in metadata or metadata.keys() & nnx.Variable.required_metadata:
        raise _stuck(place, leaf)
    variable = _fill_variable(
        kind, metadata.pop("value"), metadata | {_BOX_TYPE: type(leaf)}
    )
    # The tree structure of a box has its type and all fields except the value.
    before: Any = jax.tree.structure(leaf)
    if before != jax.tree.structure(_linen_leaf(variable)):
        raise _stuck(place, leaf)
    return variable


def _stuck(place: str, box: Any) -> TypeError:
    return TypeError(
        f"{place}: expected a box that NNX metadata can hold, got "
        f"{type(box).__name__}, which a round trip would change; give it "
        "to_nnx_metadata and from_nnx_metadata, or unbox it with flax.linen.meta.unbox"
    )


def _fill_variable(
    kind: type[_Variable], value: Any, metadata: Mapping[str, Any]
) -> _Variable:
    # By `copy`: the constructor would move the value to the mesh in the context or in
    # the metadata, and would fail for an abstract mesh.
    return kind(None).copy(value, **metadata)


def _box_metadata(box: Any) -> dict[str, Any]:
    """Returns the fields of a box by their NNX names, including ``value``."""
    own = copy(box)  # LogicallyPartitioned.to_nnx_metadata modifies the box
    to_metadata = getattr(own, "to_nnx_metadata", None)
    return dict(vars(own) if to_metadata is None else to_metadata())


def _collection(place: str, leaf: Any) -> str:
    if not isinstance(leaf, nnx.Variable):
        raise TypeError(
            f"{place}: expected an nnx.Variable, whose type names the collection, got "
            f"{type(leaf).__name__}; wrap it in an nnx.Variable"
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
    # Raw, because hooks may change the value that is read; they are kept as metadata.
    value = variable.get_value() if metadata["ref"] else variable.get_raw_value()
    said = set(metadata) - nnx.Variable.required_metadata
    if not said:
        return value
    box = _box(metadata, value) if _BOX_TYPE in metadata else None
    if box is None or not said - {_BOX_TYPE} <= set(_box_metadata(box)):
        return NNXMeta(type(variable), value, metadata)
    return box


def _box(metadata: Mapping[str, Any], value: Any) -> Any:
    """Returns the box of a Variable, or None if its metadata no longer fits the box."""
    fields = {"value": value, **metadata}
    kind = fields.pop(_BOX_TYPE)
    try:
        if hasattr(kind, "from_nnx_metadata"):
            return kind.from_nnx_metadata(fields)
        flags = nnx.Variable.required_metadata
        return kind(**{name: fields[name] for name in set(fields) - flags})
    except (KeyError, TypeError):
        return None
