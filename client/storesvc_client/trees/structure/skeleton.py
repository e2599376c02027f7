"""Skeleton modules: modules of a GraphDef's structure with placeholders for leaves.

The node list of a GraphDef changes between flax releases, but the module that it
describes does not. Therefore a structure is read from a skeleton module, and decoded by
building one and letting flax split it.
"""

from functools import cache
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from flax import nnx
from flax.nnx.pytreelib import PytreeState

STATE: Final = "_pytree__state"
NODES: Final = "_pytree__nodes"
"""Attributes that flax adds to modules: the setup state, and which attributes are
data."""

RESERVED: Final = "_pytree__"
"""Prefix of attribute names that flax reserves."""

Leaf: TypeAlias = "np.ndarray[Any, Any]"


def placeholder() -> Leaf:
    """Returns a new leaf, identified by its id."""
    return np.zeros((), np.float32)


def skeleton_of(graphdef: "nnx.GraphDef[Any]") -> tuple[Any, list[Leaf]]:
    """Returns a module of a structure, and the placeholders in it."""
    leaves = [placeholder() for _ in range(graphdef.num_leaves)]
    return nnx.merge(graphdef, nnx.State(dict(enumerate(leaves)))), leaves


def with_placeholders(root: Any) -> Any:
    """Returns a module with placeholders for arrays that flax 0.12.3 treats as static.

    These are attributes of abstract modules that are not in a Variable.
    """
    queue, seen = [root], {id(root)}
    while queue:
        parts = _parts(queue.pop())
        for key, value in parts.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                parts[key] = placeholder()
            elif id(value) not in seen:
                seen.add(id(value))
                queue.append(value)
    return root


def _parts(value: Any) -> dict[Any, Any]:
    """Returns the parts of a module or container; a module's own dict, to be
    modified."""
    if isinstance(value, nnx.Pytree):
        return vars(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return dict(value) if isinstance(value, (dict, nnx.State)) else {}


@cache
def _has_int_keys(cls: Any) -> bool:
    return bool(getattr(cls, "_pytree__has_int_keys", False))


def stored_key(cls: Any, key: int | str) -> int | str:
    """Returns the key of an attribute in the installed flax release."""
    return str(key) if _has_int_keys(cls) else key


def portable_key(cls: Any, key: Any) -> Any:
    """Returns the key of an attribute, the same in all flax releases."""
    has_int_keys = _has_int_keys(cls)
    is_int = isinstance(key, str) and key.isdecimal() and key.isascii()
    return int(key) if has_int_keys and is_int and str(int(key)) == key else key


def setup_flags(state: Any) -> list[bool]:
    """Returns the flags of a ``PytreeState``: initializing, is_setup."""
    treedef: Any = jax.tree.structure(state)
    _, flags = treedef.node_data() or (None, (False, False))
    return [bool(flag) for flag in flags]


def setup_state(flags: list[bool]) -> PytreeState:
    """Returns the ``PytreeState`` with these flags."""
    return PytreeState(*flags)
