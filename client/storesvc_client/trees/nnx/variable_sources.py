"""Decides the source of each Variable of a restored module.

Most come from the checkpoint's leaves with their names. A Variable may be in
``graphstate`` in one and in ``graphother`` in the other, because LoRA freezes
parameters that way. RNG counts and keys that the checkpoint lacks are recreated. Other
missing Variables are initialised by the model's own code, if requested.

A recreated count or key replaces one that a checkpoint lacks, or an abstract one. It
has the same shape and kind: a typed key with the same PRNG implementation, or raw key
data. Typed keys stay typed, because raw data would change the dtype of the leaf.

>>> recreate_meta_values({"count": nnx.RngCount(7, tag="dropout")})["count"].get_value()
Array(0, dtype=uint32)
"""

from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc.format.dtypes import DTYPES
from storesvc.format.keys import join_key
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._pytree.leaves import (
    GraphPath,
    named_leaves,
    nest_leaves,
    path_text,
)
from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
from storesvc_client._pytree.restore_target import would_narrow
from storesvc_client._values.models import LeafInfo
from storesvc_client._values.options import Indivisible
from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.blueprints import (
    PARTS,
    Blueprint,
    VariablePath,
    join_parts,
    leaf_shape,
    stand_in,
)
from storesvc_client.trees.nnx.graphs import GraphState, graph_leaves, split_module
from storesvc_client.trees.structure import Difference

_RBG_WORDS = 4
"""Trailing dimension of raw ``rbg`` key data; ``threefry2x32`` has 2."""


class MetaValueRecreator:
    """Generates counts and keys that depend on the seed only.

    Counts are 0, 1, 2, ...; keys are successive splits of the seed's key, with a
    separate stream for each PRNG implementation.
    """

    def __init__(self, seed: int = 42) -> None:
        self._seed = seed
        self._count = 0
        self._keys: dict[Hashable, jax.Array] = {}

    def get_count(self) -> jax.Array:
        """Returns the next count, a ``uint32`` scalar."""
        count = jnp.asarray(self._count, jnp.uint32)
        self._count += 1
        return count

    def get_rng(self) -> jax.Array:
        """Returns the next key as raw key data, as EasyDeL does."""
        return jax.random.key_data(self.get_key())

    def get_key(self, impl: Hashable = "threefry2x32") -> jax.Array:
        """Returns the next typed key of a PRNG implementation."""
        if impl not in self._keys:
            self._keys[impl] = jax.random.key(self._seed, impl=impl)
        key: jax.Array
        key, self._keys[impl] = jax.random.split(self._keys[impl])
        return key


def recreate_meta_values(
    values: Mapping[Any, Any], seed: int | None = None
) -> dict[Any, Any]:
    """Returns a dict of ``values`` with new counts and keys.

    Call it only for values that a checkpoint lacks: only the shape of a value and its
    kind of key (typed with an implementation, or raw key data) are kept.

    Args:
        values: ``nnx.RngCount`` and ``nnx.RngKey`` Variables in a State, a nested
            dict, or a flat dict with tuple keys. The result has the same keys.
        seed: Seed of the keys; 42 by default.

    Raises:
        TypeError: A leaf is neither a count nor a key, or ``values`` is not a
            mapping.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"expected a dict or an nnx.State, got {type(values).__name__}")
    recreator = MetaValueRecreator() if seed is None else MetaValueRecreator(seed)

    def recreate_node(node: Mapping[Any, Any], path: GraphPath) -> dict[Any, Any]:
        return {
            key: recreate_node(at, (*path, key))
            if isinstance(at, Mapping)
            else recreate_leaf(at, recreator, (*path, key))
            for key, at in node.items()
        }

    return recreate_node(values, ())


def fill_rng_values(state: GraphState) -> GraphState:
    """Returns a State with new values for its abstract counts and keys.

    EasyDeL's quantization leaves such counts and keys in its layers.
    """
    leaves = graph_leaves(state)
    abstract = {path: leaf for path, leaf in leaves.items() if is_abstract_rng(leaf)}
    if not abstract:
        return state
    return nnx.State(nest_leaves({**leaves, **recreate_meta_values(abstract)}))


def is_abstract_rng(leaf: Any) -> bool:
    """Returns whether a leaf is a count or a key without a value."""
    is_rng = isinstance(leaf, nnx.RngState)
    return is_rng and isinstance(stored_value(leaf), jax.ShapeDtypeStruct)


def recreate_leaf(leaf: Any, recreator: MetaValueRecreator, path: GraphPath) -> Any:
    """Returns a Variable like the given count or key, with a new value."""
    match leaf:
        case nnx.RngCount():
            shape = leaf_shape(stored_value(leaf))
            return leaf.replace(jnp.broadcast_to(recreator.get_count(), shape))
        case nnx.RngKey():
            return leaf.replace(_like_key(stored_value(leaf), recreator))
        case _:
            raise TypeError(
                f"leaf {path_text(path)}: expected RngCount or RngKey, "
                f"got {type(leaf).__name__}"
            )


def stored_value(variable: "nnx.Variable[Any]") -> Any:
    """Returns the value of a Variable, read without its hooks.

    A hook computes the value that a model uses, such as a dequantised weight; the
    stored value is a different one.
    """
    value: Any = variable.get_raw_value()
    return value[...] if variable.get_metadata().get("ref") else value


def _like_key(value: Any, recreator: MetaValueRecreator) -> jax.Array:
    """Returns a new key, or array of keys, of the same kind: typed, or raw key data."""
    if value is None:
        return recreator.get_key()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        # key_impl rejects a ShapeDtypeStruct, but accepts a tracer that stands for it
        impls: list[Hashable] = []
        jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), value)
        key, shape = recreator.get_key(impls[0]), leaf_shape(value)
        return jax.random.split(key, shape) if shape else key
    # Raw data has no implementation; only its width identifies it.
    impl = "rbg" if value.shape[-1] == _RBG_WORDS else "threefry2x32"
    key, shape = recreator.get_key(impl), value.shape[:-1]
    return jax.random.key_data(jax.random.split(key, shape) if shape else key)


_OTHER: Final = dict(zip(PARTS, reversed(PARTS), strict=True))


@dataclass(frozen=True, slots=True)
class Sources:
    """Source of each Variable of a blueprint."""

    blueprint: Blueprint
    held: Mapping[VariablePath, str]
    """Variables in the checkpoint, with the part that holds them there."""
    recreated: Mapping[VariablePath, Any]
    """Counts and keys to recreate, abstract."""
    initialised: Mapping[VariablePath, Any]
    """Variables to initialise, abstract."""

    @classmethod
    @collector_paused()
    def find(
        cls, blueprint: Blueprint, keys: Container[str], *, initialising: bool
    ) -> "Sources":
        """Returns the sources of a blueprint's Variables.

        A Variable without a source counts as held, so that the restore reports it.
        """
        held: dict[VariablePath, str] = {}
        recreated: dict[VariablePath, Any] = {}
        initialised: dict[VariablePath, Any] = {}
        for place, leaf in _variables(blueprint):
            part, path = place
            if _holds(keys, part, path, leaf):
                held[place] = part
            elif isinstance(leaf, nnx.RngState):
                recreated[place] = leaf
            elif initialising and _holds(keys, _OTHER[part], path, leaf):
                held[place] = _OTHER[part]
            elif initialising:
                initialised[place] = leaf
            else:
                held[place] = part
        return cls(blueprint, held, recreated, initialised)

    def like(self) -> dict[str, GraphState]:
        """Returns the parts of the checkpoint to restore, abstract."""
        return join_parts(
            ((source, place[1]), leaf)
            for place, leaf in _variables(self.blueprint)
            if (source := self.held.get(place)) is not None
        )

    def merge(
        self,
        restored: Mapping[str, Any],
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        indivisible: Indivisible,
    ) -> tuple[GraphState, GraphState]:
        """Returns the complete ``graphstate`` and ``graphother``."""
        found = {part: graph_leaves(restored[part]) for part in PARTS}
        held = {place: found[source][place[1]] for place, source in self.held.items()}
        flat = {(part, *path): leaf for (part, path), leaf in self.recreated.items()}
        fresh = recreate_meta_values(flat)
        if mesh is not None:
            fresh = jax.device_put(fresh, NamedSharding(mesh, PartitionSpec()))
        recreated = {(part, tuple(path)): leaf for (part, *path), leaf in fresh.items()}
        initialised = self._initialise(mesh, rules, indivisible)
        parts = join_parts({**held, **recreated, **initialised}.items())
        return parts["graphstate"], parts["graphother"]

    def _initialise(
        self,
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        indivisible: Indivisible,
    ) -> dict[VariablePath, Any]:
        if not self.initialised:
            return {}
        make = self.blueprint.make
        places = list(self.initialised)
        if make is None:  # they keep the values of the instance
            leaves = jax.tree.leaves(list(self.initialised.values()))
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
                raise InvalidRequestError(
                    "missing='init': expected model= a class, a factory or a module "
                    "with values, got an abstract module"
                )
            return {**self.initialised}

        def values() -> list[Any]:
            parts = dict(zip(PARTS, split_module(make())[1:], strict=True))
            made = {part: graph_leaves(state) for part, state in parts.items()}
            return [
                _like(made[part][path], self.initialised[part, path])
                for part, path in places
            ]

        # One jitted program, so that XLA drops the initialisers of all other Variables.
        shardings = _shardings(self.initialised, mesh, rules, indivisible)
        made = jax.jit(values, out_shardings=shardings)()
        return dict(zip(places, made, strict=True))


def with_saved_dtypes(
    like: Any, leaves: Mapping[str, LeafInfo], *, casting: bool
) -> tuple[Any, list[Difference]]:
    """Returns the tree with stand-ins of the saved leaves, and the dtype differences.

    In a trace, Python numbers and 64-bit NumPy arrays become 32-bit arrays; they are
    restored as saved. Scalars of the optimizer, such as a decay rate of 0.999, are not
    cast when parameters are. The dtype of an optimizer's state may have changed since
    its initialisation, and PRNG keys may be raw or typed: these are restored as saved
    and returned as differences.

    Args:
        like: A pytree, abstract if it comes from a trace.
        leaves: Leaves of the checkpoint, by key.
    """
    named, treedef = named_leaves(like)
    values: list[Any] = []
    changed: list[Difference] = []
    for leaf in named:
        value, saved = leaf.value, leaves.get(leaf.key)
        given = _abstract(value)
        if given is not None and saved is not None:
            kept = _saved_form(given, saved, casting=casting)
            if isinstance(kept, jax.ShapeDtypeStruct) and kept.dtype != given.dtype:
                change = Difference(leaf.key, str(kept.dtype), str(given.dtype))
                changed.append(change)
                value = kept
            elif isinstance(value, jax.ShapeDtypeStruct):
                value = kept
        values.append(value)
    return jax.tree.unflatten(treedef, values), changed


def _abstract(value: Any) -> jax.ShapeDtypeStruct | None:
    """Returns shape, dtype and sharding of a device array, or None for a host value."""
    if isinstance(value, jax.Array):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
    return value if isinstance(value, jax.ShapeDtypeStruct) else None


def _saved_form(like: jax.ShapeDtypeStruct, leaf: LeafInfo, *, casting: bool) -> Any:
    """Returns the stand-in that restores a leaf in its saved form, or ``like``."""
    # 1. A raw PRNG key for a typed one, or the reverse.
    if _is_key(like) != (leaf.prng_impl is not None):
        return _saved_key_form(like, leaf)
    dtype = DTYPES[leaf.dtype]
    in_optimizer = leaf.key.startswith("opt_state/")
    same_shape = like.shape == leaf.shape
    # 2. The optimizer's arrays keep the dtype that training gave them.
    is_moment = in_optimizer and leaf.kind == "array" and same_shape
    if is_moment and not (casting or would_narrow(leaf.dtype)):
        return jax.ShapeDtypeStruct(like.shape, dtype, sharding=like.sharding)
    same_family = any(
        jnp.issubdtype(like.dtype, family) and jnp.issubdtype(dtype, family)
        for family in (jnp.integer, jnp.floating, jnp.complexfloating, jnp.bool_)
    )
    # 3. Equal dtypes need no change, and matching reports other differences. A Python
    #    number, which a trace turned into an array, is restored as a Python number.
    if not same_family or not same_shape or like.dtype == dtype:
        return stand_in(leaf) if leaf.kind == "python_scalar" and same_family else like
    # 4. A cast applies to parameters, but not to the optimizer's scalars.
    if casting and jnp.issubdtype(dtype, jnp.floating):
        if in_optimizer and like.shape == ():
            return jax.ShapeDtypeStruct((), dtype, sharding=like.sharding)
        return like
    # 5. Device arrays keep the code's dtype, except a scalar that jax would narrow, for
    #    example a step that was counted in 64 bits.
    if leaf.kind == "array":
        narrows = like.shape == () and would_narrow(leaf.dtype)
        return np.zeros((), dtype) if narrows else like
    # 6. Host values are restored as saved.
    return stand_in(leaf)


def _is_key(like: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(like.dtype, jax.dtypes.prng_key)


def _saved_key_form(like: jax.ShapeDtypeStruct, leaf: LeafInfo) -> Any:
    """Returns raw key data for a typed key that was saved raw, or the reverse."""
    known = stand_in(leaf)
    if not isinstance(known, jax.ShapeDtypeStruct):
        return like
    typed, raw = (like, known) if _is_key(like) else (known, like)
    data = jax.eval_shape(jax.random.key_data, typed)
    if (data.shape, data.dtype) != (raw.shape, raw.dtype):
        return like
    sharding = like.sharding
    if sharding is not None and not sharding.is_fully_replicated:
        sharding = None
    return jax.ShapeDtypeStruct(known.shape, known.dtype, sharding=sharding)


def _variables(blueprint: Blueprint) -> Iterator[tuple[VariablePath, Any]]:
    for part in PARTS:
        for path, leaf in graph_leaves(getattr(blueprint, part)).items():
            yield (part, path), leaf


def _holds(keys: Container[str], part: str, path: GraphPath, leaf: Any) -> bool:
    prefix = join_key((part, *map(str, path)))
    if not isinstance(leaf, nnx.Variable):
        return prefix in keys
    if hasattr(leaf.get_raw_value(), "shape"):
        return f"{prefix}/value" in keys
    return all(f"{prefix}/{below.key}" in keys for below in named_leaves(leaf)[0])


def _like(made: Any, wanted: Any) -> Any:
    """Returns the created values in the requested dtypes."""
    old, treedef = jax.tree.flatten(wanted)
    pairs = zip(jax.tree.leaves(made), old, strict=True)
    cast = [jnp.asarray(value, getattr(like, "dtype", None)) for value, like in pairs]
    return jax.tree.unflatten(treedef, cast)


def _shardings(
    variables: Mapping[VariablePath, Any],
    mesh: Mesh | None,
    rules: "Rules | Literal['recorded'] | None",
    indivisible: Indivisible,
) -> Any:
    if mesh is None:
        return None
    # Leaves that the checkpoint lacks have no recorded sharding.
    ordered = [("", PartitionSpec())] if isinstance(rules, str) or not rules else rules
    tree = join_parts(variables.items())
    found = shardings_by_rules(tree, mesh, ordered, indivisible)
    placed = {part: graph_leaves(found[part]) for part in PARTS}
    return [placed[part][path] for part, path in variables]
