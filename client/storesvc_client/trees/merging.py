"""Parameters from a tree, attached to an NNX state or module.

The tree is what other formats give: arrays, or Variables, in dicts nested or flat. A
state takes its parameters from it by path; all that is no parameter stays what it
was.

* **A parameter that is absent, or of another shape or dtype, is an error,** never
  None and never converted. One error lists all of them.
* **Digits may stand for integers,** as formats without integer keys write layers. A
  tree that has both is refused.
* **Inputs stay as they were.** Arrays are shared, Variables are not.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from storesvc_client.trees.dicts import (
    GraphPath,
    integer_of_text,
    mapping_leaves,
    nest_leaves,
    path_text,
    string_key_to_int,
)
from storesvc_client.trees.graphs import (
    GraphState,
    fresh_leaf,
    graph_leaves,
    merge_by_path,
)
from storesvc_client.trees.meta_values import recreate_meta_values

__all__ = ["merge_model_and_tree", "merge_state_and_tree"]

M = TypeVar("M", bound=nnx.Module)


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
        ValueError: The tree lacks parameters, or has ones of another shape or dtype;
            or it has an integer and its text for keys of one mapping.
    """
    leaves = graph_leaves(state)
    params = {path: v for path, v in leaves.items() if isinstance(v, nnx.Param)}
    lacking = {path: v for path, v in leaves.items() if _is_abstract_rng(v)}
    rest = {p: v for p, v in leaves.items() if p not in params and p not in lacking}
    return nnx.State(
        nest_leaves(
            _with_values(params, _given(tree))
            | recreate_meta_values(lacking)
            | {path: fresh_leaf(leaf) for path, leaf in rest.items()}
        )
    )


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
        ValueError: The tree lacks parameters, or has ones of another shape or dtype;
            or it has an integer and its text for keys of one mapping.
    """
    graphdef, state = nnx.split(model)
    return merge_by_path(graphdef, merge_state_and_tree(tree, state))


def _given(tree: Mapping[Any, Any]) -> dict[GraphPath, tuple[GraphPath, Any]]:
    """Path and value of each leaf, by the path with integers for digits."""
    leaves = graph_leaves(tree)
    # Nested, as an integer beside its text is refused even where no leaves collide.
    nested = string_key_to_int(nest_leaves({path: path for path in leaves}))
    return {
        path: (own_path, _value(leaves[own_path]))
        for path, own_path in mapping_leaves(nested).items()
    }


def _with_values(
    params: Mapping[GraphPath, Any],
    given: Mapping[GraphPath, tuple[GraphPath, Any]],
) -> dict[GraphPath, Any]:
    result: dict[GraphPath, Any] = {}
    misfits: list[str] = []
    for path, param in params.items():
        found, value = given.get(tuple(map(integer_of_text, path)), ((), None))
        if not all(map(_addresses, found, path)):
            value = None
        wanted = param.get_value()
        if not _fits(value, wanted):
            place = path_text(path)
            misfits.append(
                f"leaf {place}: expected {_kind(wanted)}, got {_kind(value)}"
            )
        result[path] = param.replace(value)
    if misfits:
        raise ValueError(
            f"{len(misfits)} of {len(params)} parameters do not fit: "
            + "; ".join(misfits)
        )
    return result


def _addresses(key: Any, wanted: Any) -> bool:
    """Whether a tree's key stands for a state's: text for integers, never back."""
    return bool(key == wanted or (isinstance(wanted, int) and key == str(wanted)))


def _value(leaf: Any) -> Any:
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _fits(value: Any, wanted: Any) -> bool:
    if _is_array(value) and _is_array(wanted):
        return bool(value.shape == wanted.shape and value.dtype == wanted.dtype)
    return _kind(value) == _kind(wanted)


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
        leaf.get_value(), jax.ShapeDtypeStruct
    )
