"""Merges parameters from a tree into an NNX state or module.

The tree comes from other formats: arrays or Variables in nested or flat dicts. A state
takes its parameters from it by path; everything except parameters is unchanged.

* **A parameter that is absent, or has another shape or dtype, is an error.** It is
  never None and never converted. One error lists all of them.
* **A shared parameter has one value.** A tree may contain it at each of its paths if
  the values are equal.
* **Hooks have no effect.** Variables are read and written as stored.
* **Digits may replace integers,** because formats without integer keys write layers so.
  A tree with both is rejected.
* **Inputs are never modified.** Arrays are shared, Variables are copied.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from storesvc_client._pytree.paths import (
    GraphPath,
    integer_of_text,
    mapping_leaves,
    nest_leaves,
    path_text,
    string_key_to_int,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    fresh_leaf,
    graph_leaves,
    merge_by_path,
)
from storesvc_client.trees.nnx.rng_values import (
    is_abstract_rng,
    recreate_meta_values,
    stored_value,
)

__all__ = ["merge_model_and_tree", "merge_state_and_tree"]

M = TypeVar("M", bound=nnx.Module)

Given: TypeAlias = Mapping[GraphPath, tuple[GraphPath, Any]]
"""Original path and value of each leaf of a tree, by its path with integers for
digits."""


def merge_state_and_tree(
    tree: Mapping[Any, Any], state: GraphState, *, silence: bool = False
) -> GraphState:
    """Returns the state with the parameters of the tree.

    Every ``nnx.Param`` with a value, also an abstract one, gets the tree's value.
    Counts and keys are kept, except abstract ones, which are recreated. All other
    Variables are kept.

    Args:
        tree: Arrays or Variables, nested, or flat with tuple keys. Leaves that are not
            parameters of the state are ignored.
        state: The state.
        silence: Keep the values of parameters that the tree lacks.

    Raises:
        TypeError: ``tree`` or ``state`` is not a mapping.
        ValueError: The tree lacks parameters, has some with another shape or dtype, has
            two values for a parameter with two paths, or has an integer and its text as
            keys of one mapping.
    """
    paths: dict[int, list[GraphPath]] = defaultdict(list)
    for path, leaf in graph_leaves(state).items():
        paths[id(leaf)].append(path)
    shared = [same for same in paths.values() if len(same) > 1]
    return _merged(tree, state, shared, silence=silence)


def merge_model_and_tree(
    model: M, tree: Mapping[Any, Any], *, silence: bool = False
) -> M:
    """Returns a copy of ``model`` with the parameters of the tree.

    Every ``nnx.Param`` with a value, also an abstract one, gets the tree's value.
    Counts and keys are kept, except abstract ones, which are recreated. All other
    Variables are kept.

    Args:
        model: The module.
        tree: Arrays or Variables, nested, or flat with tuple keys. Leaves that are not
            parameters of the module are ignored.
        silence: Keep the values of parameters that the tree lacks.

    Raises:
        TypeError: The tree is not a mapping.
        ValueError: The tree lacks parameters, has some with another shape or dtype, has
            two values for a parameter with two paths, or has an integer and its text as
            keys of one mapping.
    """
    graphdef, state = nnx.split(model)
    merged = _merged(tree, state, nnx.find_duplicates(model), silence=silence)
    return merge_by_path(graphdef, merged)


def _merged(
    tree: Mapping[Any, Any],
    state: GraphState,
    shared: Sequence[Sequence[GraphPath]],
    *,
    silence: bool,
) -> GraphState:
    """Returns the state with the parameters of the tree.

    Args:
        tree: The tree.
        state: The state.
        shared: The paths of each Variable or module that has several.
        silence: See ``merge_state_and_tree``.
    """
    leaves = graph_leaves(state)
    given = _given(tree)
    params = {
        path: v
        for path, v in leaves.items()
        if isinstance(v, nnx.Param)
        and not (silence and tuple(map(integer_of_text, path)) not in given)
    }
    lacking = {path: v for path, v in leaves.items() if is_abstract_rng(v)}
    rest = {p: v for p, v in leaves.items() if p not in params and p not in lacking}
    found, misfits = _with_values(params, given)
    misfits += _second_values(params, given, shared)
    if misfits:
        raise ValueError(
            f"{len(misfits)} of {len(params)} parameters do not fit: "
            + "; ".join(misfits)
        )
    return nnx.State(
        nest_leaves(
            found
            | recreate_meta_values(lacking)
            | {path: fresh_leaf(leaf) for path, leaf in rest.items()}
        )
    )


def _given(tree: Mapping[Any, Any]) -> Given:
    leaves = graph_leaves(tree)
    # Nested, because an integer next to its text is rejected even if no leaves collide.
    nested = string_key_to_int(nest_leaves({path: path for path in leaves}))
    return {
        path: (own_path, _value(leaves[own_path]))
        for path, own_path in mapping_leaves(nested).items()
    }


def _with_values(
    params: Mapping[GraphPath, Any], given: Given
) -> tuple[dict[GraphPath, Any], list[str]]:
    """Returns the parameters with the given values, and the mismatches."""
    result: dict[GraphPath, Any] = {}
    misfits: list[str] = []
    for path, param in params.items():
        found, value = given.get(tuple(map(integer_of_text, path)), ((), None))
        if not all(map(_addresses, found, path)):
            value = None
        wanted = stored_value(param)
        if not _fits(value, wanted):
            place = path_text(path)
            misfits.append(
                f"leaf {place}: expected {_kind(wanted)}, got {_kind(value)}"
            )
        result[path] = param.replace(value)
    return result, misfits


def _second_values(
    params: Mapping[GraphPath, Any],
    given: Given,
    shared: Sequence[Sequence[GraphPath]],
) -> list[str]:
    """Returns the mismatches of values given by a second path of a parameter."""
    if not shared:
        return []
    first = _first_paths(shared)
    named = {first(tuple(map(integer_of_text, path))) for path in params}
    values: dict[GraphPath, tuple[GraphPath, Any]] = {}
    misfits: list[str] = []
    for path, (own_path, value) in given.items():
        param = first(path)
        before, other = values.setdefault(param, (own_path, value))
        if param in named and not _is_same(value, other):
            misfits.append(
                f"leaf {path_text(own_path)}: expected the value of "
                f"{path_text(before)}, which is the same parameter, got another value"
            )
    return misfits


def _first_paths(
    shared: Sequence[Sequence[GraphPath]],
) -> Callable[[GraphPath], GraphPath]:
    """Returns a function that maps all paths of a Variable to its first path."""
    firsts: dict[GraphPath, GraphPath] = {}
    for paths in shared:
        one, *others = (tuple(map(integer_of_text, path)) for path in paths)
        firsts.update(dict.fromkeys(others, one))

    def first(path: GraphPath) -> GraphPath:
        length = 1
        while length <= len(path):
            known = firsts.get(path[:length])
            if known is not None:
                # A first path has no alias inside; continue after it.
                path, length = known + path[length:], len(known)
            length += 1
        return path

    return first


def _addresses(key: Any, wanted: Any) -> bool:
    """Returns whether a tree's key matches a state's: text matches an integer, not
    reverse."""
    return bool(key == wanted or (isinstance(wanted, int) and key == str(wanted)))


def _value(leaf: Any) -> Any:
    return stored_value(leaf) if isinstance(leaf, nnx.Variable) else leaf


def _fits(value: Any, wanted: Any) -> bool:
    if _is_array(value) and _is_array(wanted):
        return bool(value.shape == wanted.shape and value.dtype == wanted.dtype)
    return _kind(value) == _kind(wanted)


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal, bit by bit.

    Abstract values with equal shapes are equal; traced values are never known to be.
    """
    if one is other:
        return True
    if _kind(one) != _kind(other):
        return False
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False):
        is_traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
        if a is not b and (is_traced or _bytes(a) != _bytes(b)):
            return False
    return True


def _bytes(value: Any) -> bytes | None:
    """Returns the bytes of an array; None if it is abstract."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return None
    if _is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def _kind(value: Any) -> str:
    """Returns shape and dtype of a value, or of each leaf of a tree, as text."""
    if _is_array(value):
        return f"{tuple(value.shape)} {value.dtype}"
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and leaves[0][1] is value:
        return type(value).__name__
    kinds = [f"{jax.tree_util.keystr(path)}: {_kind(leaf)}" for path, leaf in leaves]
    return ", ".join(kinds) or "none"


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
