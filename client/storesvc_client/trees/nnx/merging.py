"""Parameters from a tree, attached to an NNX state or module.

The tree is what other formats give: arrays, or Variables, in dicts nested or flat. A
state takes its parameters from it by path; all that is no parameter stays what it
was.

* **A parameter that is absent, or of another shape or dtype, is an error,** never
  None and never converted. One error lists all of them.
* **What is shared has one value.** A tree may name a parameter by each of its paths,
  if it says the same by all of them.
* **Hooks change nothing.** Variables are read and written as they are stored.
* **Digits may stand for integers,** as formats without integer keys write layers. A
  tree that has both is refused.
* **Inputs stay as they were.** Arrays are shared, Variables are not.
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
from storesvc_client.trees.nnx.rng_values import recreate_meta_values, stored_value

__all__ = ["merge_model_and_tree", "merge_state_and_tree"]

M = TypeVar("M", bound=nnx.Module)

Given: TypeAlias = Mapping[GraphPath, tuple[GraphPath, Any]]
"""Path and value of each leaf of a tree, by the path with integers for digits."""


def merge_state_and_tree(tree: Mapping[Any, Any], state: GraphState) -> GraphState:
    """Returns the state with the parameters of the tree.

    Every ``nnx.Param`` that has a value, an abstract one too, gets the tree's. Counts
    and keys stay, except abstract ones, which are recreated. All other Variables
    stay.

    Args:
        tree: Arrays or Variables, nested, or flat with tuple keys. Leaves that the
            state has no parameter for are ignored.
        state: The state.

    Raises:
        TypeError: One of them is not a mapping.
        ValueError: The tree lacks parameters, or has ones of another shape or dtype,
            or two values for one that has two paths; or it has an integer and its
            text for keys of one mapping.
    """
    paths: dict[int, list[GraphPath]] = defaultdict(list)
    for path, leaf in graph_leaves(state).items():
        paths[id(leaf)].append(path)
    return _merged(tree, state, [same for same in paths.values() if len(same) > 1])


def merge_model_and_tree(model: M, tree: Mapping[Any, Any]) -> M:
    """Returns another module like ``model``, with the parameters of the tree.

    Every ``nnx.Param`` that has a value, an abstract one too, gets the tree's. Counts
    and keys stay, except abstract ones, which are recreated. All other Variables
    stay.

    Args:
        model: The module.
        tree: Arrays or Variables, nested, or flat with tuple keys. Leaves that the
            module has no parameter for are ignored.

    Raises:
        TypeError: The tree is not a mapping.
        ValueError: The tree lacks parameters, or has ones of another shape or dtype,
            or two values for one that has two paths; or it has an integer and its
            text for keys of one mapping.
    """
    graphdef, state = nnx.split(model)
    merged = _merged(tree, state, nnx.find_duplicates(model))
    return merge_by_path(graphdef, merged)


def _merged(
    tree: Mapping[Any, Any], state: GraphState, shared: Sequence[Sequence[GraphPath]]
) -> GraphState:
    """The state with the parameters of the tree.

    Args:
        tree: The tree.
        state: The state.
        shared: The paths of each Variable, and each module, that has several.
    """
    leaves = graph_leaves(state)
    params = {path: v for path, v in leaves.items() if isinstance(v, nnx.Param)}
    lacking = {path: v for path, v in leaves.items() if _is_abstract_rng(v)}
    rest = {p: v for p, v in leaves.items() if p not in params and p not in lacking}
    given = _given(tree)
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
    # Nested, as an integer beside its text is refused even where no leaves collide.
    nested = string_key_to_int(nest_leaves({path: path for path in leaves}))
    return {
        path: (own_path, _value(leaves[own_path]))
        for path, own_path in mapping_leaves(nested).items()
    }


def _with_values(
    params: Mapping[GraphPath, Any], given: Given
) -> tuple[dict[GraphPath, Any], list[str]]:
    """The parameters with the values that are given, and what does not fit."""
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
    """What is given by another path of a parameter, and is another value."""
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
                f"{path_text(before)}, which is the same parameter, got another"
            )
    return misfits


def _first_paths(
    shared: Sequence[Sequence[GraphPath]],
) -> Callable[[GraphPath], GraphPath]:
    """Returns what makes one path, the first, of all paths of a Variable."""
    firsts: dict[GraphPath, GraphPath] = {}
    for paths in shared:
        one, *others = (tuple(map(integer_of_text, path)) for path in paths)
        firsts.update(dict.fromkeys(others, one))

    def first(path: GraphPath) -> GraphPath:
        length = 1
        while length <= len(path):
            known = firsts.get(path[:length])
            if known is not None:
                # No part of a first path has another: go on behind it.
                path, length = known + path[length:], len(known)
            length += 1
        return path

    return first


def _addresses(key: Any, wanted: Any) -> bool:
    """Whether a tree's key stands for a state's: text for integers, never back."""
    return bool(key == wanted or (isinstance(wanted, int) and key == str(wanted)))


def _value(leaf: Any) -> Any:
    return stored_value(leaf) if isinstance(leaf, nnx.Variable) else leaf


def _fits(value: Any, wanted: Any) -> bool:
    if _is_array(value) and _is_array(wanted):
        return bool(value.shape == wanted.shape and value.dtype == wanted.dtype)
    return _kind(value) == _kind(wanted)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are one, bit by bit. Of abstract ones nothing can be lost;
    of traced ones nothing is known."""
    if one is other:
        return True
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
    return _kind(one) == _kind(other) and all(
        a is b or (not _is_traced(a, b) and _bytes(a) == _bytes(b)) for a, b in leaves
    )


def _is_traced(*values: Any) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _bytes(value: Any) -> bytes | None:
    """What an array holds; None of an abstract one."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return None
    if _is_array(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def _kind(value: Any) -> str:
    """What must be equal of two values: shape and dtype, of each leaf if a tree."""
    if _is_array(value):
        return f"{tuple(value.shape)} {value.dtype}"
    leaves = jax.tree_util.tree_leaves_with_path(value)
    if len(leaves) == 1 and leaves[0][1] is value:
        return type(value).__name__
    kinds = [f"{jax.tree_util.keystr(path)}: {_kind(leaf)}" for path, leaf in leaves]
    return ", ".join(kinds) or "none"


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_abstract_rng(leaf: Any) -> bool:
    return isinstance(leaf, nnx.RngState) and isinstance(
        stored_value(leaf), jax.ShapeDtypeStruct
    )
