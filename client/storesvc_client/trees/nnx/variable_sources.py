"""Decides the source of each Variable of a restored module.

Most come from the checkpoint's leaves with their names. A Variable may be in
``graphstate`` in one and in ``graphother`` in the other, because LoRA freezes
parameters that way. RNG counts and keys that the checkpoint lacks are recreated. Other
missing Variables are initialised by the model's own code, if requested.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc.format.dtypes import DTYPES
from storesvc.format.keys import join_key
from storesvc_client._chunks.host_memory import collector_paused
from storesvc_client._pytree.leaves import named_leaves
from storesvc_client._pytree.partition_rules import Rules, shardings_by_rules
from storesvc_client._pytree.paths import GraphPath
from storesvc_client._pytree.restore_target import would_narrow
from storesvc_client._values.options import Indivisible
from storesvc_client._values.values import LeafInfo
from storesvc_client.errors import InvalidRequestError
from storesvc_client.trees.nnx.blueprints import PARTS, Blueprint, stand_in
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    graph_leaves,
    refine_graphs,
)
from storesvc_client.trees.nnx.model_parts import split_module
from storesvc_client.trees.nnx.rng_values import recreate_meta_values
from storesvc_client.trees.structure import Difference

__all__ = ["Sources", "with_saved_dtypes"]

Place: TypeAlias = tuple[str, GraphPath]
"""Part of the state that holds a Variable, and its path in that part."""

_OTHER: Final = dict(zip(PARTS, reversed(PARTS), strict=True))


@dataclass(frozen=True, slots=True)
class Sources:
    """Source of each Variable of a blueprint."""

    blueprint: Blueprint
    held: Mapping[Place, str]
    """Variables in the checkpoint, with the part that holds them there."""
    recreated: Mapping[Place, Any]
    """Counts and keys to recreate, abstract."""
    initialised: Mapping[Place, Any]
    """Variables to initialise, abstract."""

    @classmethod
    @collector_paused()
    def find(
        cls, blueprint: Blueprint, keys: Container[str], *, initialising: bool
    ) -> "Sources":
        """Returns the sources of a blueprint's Variables.

        A Variable without a source counts as held, so that the restore reports it.

        Args:
            blueprint: The model.
            keys: The leaf keys of the checkpoint.
            initialising: True if missing Variables may be initialised, or be in the
                other part.
        """
        held: dict[Place, str] = {}
        recreated: dict[Place, Any] = {}
        initialised: dict[Place, Any] = {}
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
        parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
        for (part, path), leaf in _variables(self.blueprint):
            source = self.held.get((part, path))
            if source is not None:
                parts[source][path] = leaf
        return {part: refine_graphs(leaves) for part, leaves in parts.items()}

    def merge(
        self,
        restored: Mapping[str, Any],
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        indivisible: Indivisible,
    ) -> tuple[GraphState, GraphState]:
        """Returns the complete ``graphstate`` and ``graphother``.

        Args:
            restored: The restored ``like``.
            mesh: The mesh for new values; None: the default device.
            rules: Partition rules for new values.
            indivisible: As for ``Run.restore``.

        Raises:
            InvalidRequestError: A Variable must be initialised, but the model was given
                as an abstract instance.
        """
        found = {part: graph_leaves(restored[part]) for part in PARTS}
        parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
        for (part, path), source in self.held.items():
            parts[part][path] = found[source][path]
        for (part, path), leaf in self._recreated(mesh).items():
            parts[part][path] = leaf
        for (part, path), leaf in self._initialised(mesh, rules, indivisible).items():
            parts[part][path] = leaf
        graphstate, graphother = (refine_graphs(parts[part]) for part in PARTS)
        return graphstate, graphother

    def _recreated(self, mesh: Mesh | None) -> dict[Place, Any]:
        flat = {(part, *path): leaf for (part, path), leaf in self.recreated.items()}
        fresh = recreate_meta_values(flat)
        if mesh is not None:
            fresh = jax.device_put(fresh, NamedSharding(mesh, PartitionSpec()))
        return {(part, tuple(path)): leaf for (part, *path), leaf in fresh.items()}

    def _initialised(
        self,
        mesh: Mesh | None,
        rules: "Rules | Literal['recorded'] | None",
        indivisible: Indivisible,
    ) -> dict[Place, Any]:
        if not self.initialised:
            return {}
        make = self.blueprint.make
        places = list(self.initialised)
        if make is None:
            return {place: _own_value(self.initialised[place]) for place in places}

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
        casting: True if floating-point leaves are cast.
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
    is_cast = casting and jnp.issubdtype(dtype, jnp.floating)
    # 4. A cast applies to parameters, but not to the optimizer's scalars.
    if is_cast:
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
    """Returns raw key data for a typed key that was saved raw, or the reverse.

    Returns ``like`` if the saved leaf is not a key.
    """
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


def _variables(blueprint: Blueprint) -> Iterator[tuple[Place, Any]]:
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


def _own_value(variable: Any) -> Any:
    """Returns the value of an instance for a Variable that the checkpoint lacks."""
    if any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(variable)
    ):
        raise InvalidRequestError(
            "missing='init': expected model= a class, a factory or a module with "
            "values, got an abstract module"
        )
    return variable


def _like(made: Any, wanted: Any) -> Any:
    """Returns the created values in the requested dtypes."""
    new = jax.tree.leaves(made)
    old, treedef = jax.tree.flatten(wanted)
    cast = [
        jnp.asarray(value, getattr(like, "dtype", None))
        for value, like in zip(new, old, strict=True)
    ]
    return jax.tree.unflatten(treedef, cast)


def _shardings(
    variables: Mapping[Place, Any],
    mesh: Mesh | None,
    rules: "Rules | Literal['recorded'] | None",
    indivisible: Indivisible,
) -> Any:
    if mesh is None:
        return None
    # Leaves that the checkpoint lacks have no recorded sharding.
    ordered = [("", PartitionSpec())] if isinstance(rules, str) or not rules else rules
    parts: dict[str, dict[GraphPath, Any]] = {part: {} for part in PARTS}
    for (part, path), leaf in variables.items():
        parts[part][path] = leaf
    tree = {part: refine_graphs(leaves) for part, leaves in parts.items()}
    found = shardings_by_rules(tree, mesh, ordered, indivisible)
    placed = {part: graph_leaves(found[part]) for part in PARTS}
    return [placed[part][path] for part, path in variables]
