"""Functions on NNX state trees: creating, comparing, naming and merging them.

The functions have the names, arguments and documented errors of
``easydel.utils.traversals`` and give the same results, except where those lose data.
Three guarantees:

* **Inputs are never modified.** Every result consists of new containers and new
  Variables; arrays, which are immutable, are shared. Running a module built from a
  result never advances a count in the input.
* **Integer and string keys are different keys.** ``layers[0]`` and ``layers["0"]`` are
  two paths: NNX sorts them differently, and a layer list whose keys became strings
  would merge as 0, 1, 10, 11, 2, ...
* **Nothing is overwritten.** Two values with one path, or two leaves with one name, are
  rejected.

>>> graphdef = create_graphdef(nnx.Linear, in_features=2, out_features=3)
>>> state = init_graphstate(nnx.Linear, in_features=2, out_features=3)
>>> tree = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
>>> model = merge_by_path(graphdef, merge_state_and_tree(tree, state))

Modules are created lazily by default: the constructor runs under ``nnx.eval_shape``,
every value is a ShapeDtypeStruct, and nothing is computed or allocated.

>>> nnx_init(nnx.Linear, in_features=2, out_features=3).kernel.get_value()
ShapeDtypeStruct(shape=(2, 3), dtype=float32)

A tree to merge comes from other formats: arrays or Variables in nested or flat dicts. A
state takes its parameters from it by path; everything except parameters is unchanged.

* **A parameter that is absent, or has another shape or dtype, is an error.** It is
  never None and never converted. One error lists all of them.
* **A shared parameter has one value.** A tree may contain it at each of its paths if
  the values are equal.
* **Hooks have no effect.** Variables are read and written as stored.
* **Digits may replace integers,** because formats without integer keys write layers so.
  A tree with both is rejected.

Nested dicts become flat dicts of paths, and leaves of JAX trees get names. The keys of
a flat dict are tuples of keys, or the same keys joined as text by a separator. Two
leaves of one name, a leaf above another, and a key that contains the separator are
rejected, so every flat dict can be unflattened, and a name, with a separator,
identifies exactly one path of a tree. 0 and "0" are equal only if a caller asks for
text, and then a mapping that has both is rejected.

>>> flatten_dict({"a": {0: 1}, "b": 2})
{('a', 0): 1, ('b',): 2}
>>> unflatten_dict({"a.0": 1}, sep=".")
{'a': {'0': 1}}
>>> flatten_tree({"a": [1, {"b": 2}]}, sep=".")
{'a.0': 1, 'a.1.b': 2}
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import empty_node
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc_client._pytree.leaves import (
    GraphPath,
    IsLeaf,
    add_leaves,
    is_flatten,
    mapping_leaves,
    nest_leaves,
    path_text,
    tree_path_to_string,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    fresh_leaf,
    graph_leaves,
    graph_paths,
    merge_by_path,
    refine_graphs,
)
from storesvc_client.trees.nnx.variable_sources import (
    MetaValueRecreator,
    is_abstract_rng,
    recreate_leaf,
    recreate_meta_values,
    stored_value,
)

__all__ = [
    "GraphPath",
    "GraphState",
    "MetaValueRecreator",
    "StateValidationResult",
    "create_graphdef",
    "deepcopy_model",
    "differentiate_state",
    "diffrentiate_state",
    "flatten_dict",
    "flatten_tree",
    "graph_leaves",
    "graph_paths",
    "init_garphstate",
    "init_graphstate",
    "int_key_to_string",
    "is_flatten",
    "merge_by_path",
    "merge_model_and_tree",
    "merge_state_and_tree",
    "named_tree_map",
    "nnx_init",
    "recreate_meta_values",
    "redefine_state",
    "refine_graphs",
    "specs_to_name_sharding",
    "string_key_to_int",
    "tree_apply",
    "tree_path_to_string",
    "unflatten_dict",
    "validate_state",
]

M = TypeVar("M", bound=nnx.Module)

_MAX_DIGITS = 18
"""Maximum digits of an integer key; Python limits conversions to some thousand
digits."""

# The underscores distinguish these names from arguments of the constructor, which are
# passed in the same call. Names, order and defaults are EasyDeL's.
# ruff: noqa: FBT001, FBT002


def nnx_init(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    _lazy: bool = True,
    **kwargs: Any,
) -> M:
    """Returns a module, with abstract values unless ``_lazy`` is false.

    Args:
        module: The class, or another callable that creates the module.
        _add_rngs: Pass ``nnx.Rngs`` to the constructor.
        _rng_key: Name of the argument for the rngs.
        _seed: Seed of the rngs.
        _lazy: Create abstract values.
        **kwargs: Other arguments of the constructor.

    Raises:
        TypeError: The constructor does not accept these arguments.
    """

    def make() -> M:
        rngs = {_rng_key: nnx.Rngs(_seed)} if _add_rngs else {}
        return module(**kwargs, **rngs)

    if not _lazy:
        return make()
    made: M = nnx.eval_shape(make)
    return made


def create_graphdef(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    **kwargs: Any,
) -> "nnx.GraphDef[M]":
    """Returns the structure of a module without computing any value.

    Arguments that are not listed are as for ``nnx_init``.

    Args:
        _seed: See ``nnx_init``; the structure does not depend on it.
        **kwargs: Other arguments of the constructor.

    Raises:
        TypeError: The constructor does not accept these arguments.
    """
    made = nnx_init(module, _add_rngs, _rng_key, _seed, **kwargs)
    graphdef: nnx.GraphDef[M] = nnx.split(made)[0]
    return graphdef


def init_graphstate(
    module: Callable[..., M],
    _add_rngs: bool = True,
    _rng_key: str = "rngs",
    _seed: int = 0,
    _lazy: bool = True,
    **kwargs: Any,
) -> GraphState:
    """Returns the Variables of a module, abstract unless ``_lazy`` is false.

    Arguments that are not listed are as for ``nnx_init``.

    Args:
        **kwargs: Other arguments of the constructor.

    Raises:
        TypeError: The constructor does not accept these arguments.
    """
    made = nnx_init(module, _add_rngs, _rng_key, _seed, _lazy, **kwargs)
    state: GraphState = nnx.split(made)[1]
    return state


@dataclass(frozen=True, slots=True)
class StateValidationResult(Mapping[str, Any]):
    """Problems of a state; also a mapping of its fields."""

    is_valid: bool
    """True if there are no problems."""

    missing_keys: set[Any]
    """Keys that the state lacks."""

    invalid_types: dict[Any, type]
    """Types found instead of the expected ones, by key."""

    @classmethod
    def from_tuple(cls, values: Iterable[Any]) -> Self:
        """Returns a result from its three fields, in order.

        Raises:
            TypeError: There are not exactly three values.
        """
        return cls(*values)

    def to_tuple(self) -> tuple[bool, set[Any], dict[Any, type]]:
        """Returns the three fields in order."""
        return self.is_valid, self.missing_keys, self.invalid_types

    def replace(self, **kwargs: Any) -> Self:
        """Returns a copy with other values in some fields.

        Raises:
            TypeError: There is no such field.
        """
        return replace(self, **kwargs)

    def __getitem__(self, name: str) -> Any:
        """Returns the field with a name.

        Raises:
            KeyError: There is no such field.
        """
        if name not in tuple(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        """Returns the names of the fields."""
        return iter([field.name for field in fields(self)])

    def __len__(self) -> int:
        """Returns the number of fields."""
        return len(fields(self))


def validate_state(
    state: Mapping[Any, Any], init_state: Mapping[Any, Any]
) -> StateValidationResult:
    """Returns the keys that a state lacks of ``init_state``, and values of another
    type.

    Keys that are not in ``init_state`` are allowed.

    >>> validate_state({"a": 1.5}, {"a": 1, "b": 2})["missing_keys"]
    {'b'}

    Args:
        state: Values by key or path.
        init_state: The expected values, by the same keys.
    """
    missing = {key for key in init_state if key not in state}
    invalid = {
        key: type(value)
        for key, value in state.items()
        if key in init_state and not isinstance(value, type(init_state[key]))
    }
    return StateValidationResult(
        is_valid=not missing and not invalid,
        missing_keys=missing,
        invalid_types=invalid,
    )


def differentiate_state(
    state: Mapping[Any, Any], init_state: Mapping[Any, Any], validate: bool = True
) -> dict[Any, Any]:
    """Returns the Variables of ``init_state`` that ``state`` lacks.

    Args:
        state: Values by key or path.
        init_state: Variables by the same keys.
        validate: Reject a state that lacks keys or has values of another type.

    Raises:
        TypeError: A missing value is not a Variable.
        ValueError: The state is not valid, and ``validate`` is true.
    """
    if validate:
        result = validate_state(state, init_state)
        if not result.is_valid:
            missing = sorted(map(_place, result.missing_keys))
            types = {
                _place(key): f"expected {type(init_state[key]).__name__}, "
                f"got {found.__name__}"
                for key, found in result.invalid_types.items()
            }
            raise ValueError(
                f"state is not valid: missing {missing}, of other types {types}"
            )
    lacking = {key: value for key, value in init_state.items() if key not in state}
    for key, value in lacking.items():
        if not isinstance(value, nnx.Variable):
            raise TypeError(
                f"leaf {_place(key)}: expected a Variable, got {type(value).__name__}"
            )
    return {key: fresh_leaf(value) for key, value in lacking.items()}


def redefine_state(
    state: Mapping[Any, Any], missings: Mapping[Any, Any]
) -> dict[Any, Any]:
    """Returns the state with new values for the keys that it lacks.

    Counts and keys come from ``MetaValueRecreator()``, in the order of ``missings``,
    each with the shape and kind of the Variable it replaces.

    Args:
        state: Values by key or path.
        missings: A result of ``differentiate_state``: ``nnx.RngCount``, ``nnx.RngKey``,
            and ``nnx.Param`` without a value.

    Raises:
        AttributeError: A Variable has another type.
        ValueError: A parameter has a value, which cannot be recreated, or the state
            already has one of the keys.
    """
    recreator = MetaValueRecreator()
    result = dict(state)
    for key, value in missings.items():
        if key in state:
            raise ValueError(f"leaf {_place(key)}: expected none in the state, got one")
        match value:
            case nnx.Param():
                if stored_value(value) is not None:
                    raise ValueError(
                        f"leaf {_place(key)}: expected a Param without a value, got "
                        "one with a value, which cannot be recreated"
                    )
                result[key] = fresh_leaf(value)
            case nnx.RngCount() | nnx.RngKey():
                result[key] = recreate_leaf(value, recreator, (key,))
            case _:
                raise AttributeError(
                    f"leaf {_place(key)}: expected RngCount, RngKey or an empty "
                    f"Param, got {type(value).__name__}"
                )
    return result


def _place(key: Any) -> str:
    return path_text(key if isinstance(key, tuple) else (key,))


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
    return _merge_tree(tree, state, shared, silence=silence)


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
    merged = _merge_tree(tree, state, nnx.find_duplicates(model), silence=silence)
    return merge_by_path(graphdef, merged)


def _merge_tree(
    tree: Mapping[Any, Any],
    state: GraphState,
    shared: Sequence[Sequence[GraphPath]],
    *,
    silence: bool,
) -> GraphState:
    """Returns the state with the tree's parameters; ``shared``: paths of one leaf."""
    leaves = graph_leaves(state)
    given = _index_tree(tree)
    params = {
        path: v
        for path, v in leaves.items()
        if isinstance(v, nnx.Param)
        and not (silence and tuple(map(parse_integer, path)) not in given)
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


def _index_tree(tree: Mapping[Any, Any]) -> Given:
    leaves = graph_leaves(tree)
    # Nested, because an integer next to its text is rejected even if no leaves collide.
    nested = string_key_to_int(nest_leaves({path: path for path in leaves}))
    given = {}
    for path, own_path in mapping_leaves(nested).items():
        leaf = leaves[own_path]
        value = stored_value(leaf) if isinstance(leaf, nnx.Variable) else leaf
        given[path] = own_path, value
    return given


def _with_values(
    params: Mapping[GraphPath, Any], given: Given
) -> tuple[dict[GraphPath, Any], list[str]]:
    result: dict[GraphPath, Any] = {}
    misfits: list[str] = []
    for path, param in params.items():
        found, value = given.get(tuple(map(parse_integer, path)), ((), None))
        for key, wanted in zip(found, path, strict=False):
            # text in the tree matches an integer of the state, not the reverse
            if key != wanted and not (isinstance(wanted, int) and key == str(wanted)):
                value = None
        own = stored_value(param)
        if not _fits(value, own):
            place = path_text(path)
            misfits.append(f"leaf {place}: expected {_kind(own)}, got {_kind(value)}")
        result[path] = param.replace(value)
    return result, misfits


def _second_values(
    params: Mapping[GraphPath, Any], given: Given, shared: Sequence[Sequence[GraphPath]]
) -> list[str]:
    """Returns the mismatches of values given by a second path of a parameter."""
    if not shared:
        return []
    first = _first_paths(shared)
    named = {first(tuple(map(parse_integer, path))) for path in params}
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
        one, *others = (tuple(map(parse_integer, path)) for path in paths)
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


def flatten_dict(
    xs: Mapping[Any, Any],
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
    fumap: bool = False,
) -> dict[Any, Any]:
    """Returns the leaves of nested mappings by path.

    Everything except mappings is a leaf, lists too. Tuple keys of ``xs`` are already
    paths.

    Args:
        xs: A dict, an ``nnx.State`` or another mapping.
        keep_empty_nodes: Keep an empty mapping as a leaf, flax's ``empty_node``. An
            empty ``xs`` still gives an empty dict.
        is_leaf: Returns True if the mapping at a path is to be treated as a leaf.
        sep: Separator that joins the keys of a path to text; None: paths are tuples.
        fumap: Accept an ``xs`` that is not a mapping, as a leaf at the empty path.

    Raises:
        TypeError: ``xs`` is not a mapping.
        ValueError: Two leaves have one path, one is below another, or, with ``sep``,
            two have one name or a key contains ``sep``.
    """
    if not isinstance(xs, Mapping) and not fumap:
        raise TypeError(f"expected a dict or another mapping, got {type(xs).__name__}")
    leaves = mapping_leaves(xs, is_leaf=is_leaf, keep_empty_nodes=keep_empty_nodes)
    if sep is None:
        return leaves
    paths = [tuple(map(str, path)) for path in leaves]
    return dict(zip(join_names(paths, sep), leaves.values(), strict=True))


def unflatten_dict(xs: Mapping[Any, Any], sep: str | None = None) -> dict[Any, Any]:
    """Returns the nested dict of a flat dict.

    Args:
        xs: Leaves by path. ``empty_node`` becomes an empty dict.
        sep: Separator that splits a path of text; the parts stay text. None: paths are
            tuples.

    Raises:
        TypeError: ``xs`` is not a mapping, or a key is not a path.
        ValueError: A path is empty, occurs twice, or is below another leaf.
    """
    if not isinstance(xs, Mapping):
        raise TypeError(f"expected a dict or another mapping, got {type(xs).__name__}")
    leaves: dict[GraphPath, Any] = {}
    for key, value in xs.items():
        # Compared by type: a tree map creates another instance.
        leaf = {} if isinstance(value, type(empty_node)) else value
        if sep is not None and isinstance(key, str):
            path: GraphPath = tuple(key.split(sep))
        elif sep is None and isinstance(key, tuple):
            path = key
        else:
            expected = "a tuple" if sep is None else "text"
            raise TypeError(
                f"key {key!r}: expected {expected}, got {type(key).__name__}"
            )
        add_leaves(leaves, [(path, leaf)])
    return nest_leaves(leaves)


def int_key_to_string(xs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the dict, nested or flat, with its integer keys converted to text.

    Raises:
        TypeError: ``xs`` is not a mapping.
        ValueError: A mapping contains an integer and the same integer as text.
    """

    def integer_text(key: Any) -> Any:
        is_integer = isinstance(key, int) and not isinstance(key, bool)
        return str(key) if is_integer else key

    return _with_keys(xs, integer_text, ())


def string_key_to_int(xs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the dict, nested or flat, with keys that spell an integer converted.

    Only the results of ``str`` for 0, 1, 2, ... are converted: "007", "-1" and "²" stay
    text.

    Raises:
        TypeError: ``xs`` is not a mapping.
        ValueError: A mapping contains an integer and the same integer as text.
    """
    return _with_keys(xs, parse_integer, ())


def parse_integer(key: Any) -> Any:
    """Returns the integer that a key spells, or the key itself."""
    if not isinstance(key, str) or len(key) > _MAX_DIGITS:
        return key
    # isdigit alone accepts superscripts, which int rejects.
    spells_one = key.isascii() and key.isdigit() and (key == "0" or key[0] != "0")
    return int(key) if spells_one else key


def _with_keys(
    xs: Mapping[Any, Any], convert: Callable[[Any], Any], above: GraphPath
) -> dict[Any, Any]:
    if not isinstance(xs, Mapping):
        raise TypeError(f"expected a dict or another mapping, got {type(xs).__name__}")
    result: dict[Any, Any] = {}
    for key, value in xs.items():
        is_path = isinstance(key, tuple) and not above
        new = tuple(map(convert, key)) if is_path else convert(key)
        if new in result:
            raise ValueError(
                f"two keys become {new!r} in {path_text(above)}: expected at most one"
            )
        nested = isinstance(value, Mapping)
        result[new] = _with_keys(value, convert, (*above, key)) if nested else value
    return result


def join_names(paths: Iterable[tuple[str, ...]], sep: str) -> list[str]:
    """Returns the joined names of paths."""
    names: dict[str, tuple[str, ...]] = {}
    for path in paths:
        name = sep.join(path)
        # Splitting also detects parts that together form a separator of several
        # characters.
        if sep and path and name.split(sep) != list(path):
            raise ValueError(
                f"leaf {path_text(path)}: expected keys without the separator {sep!r}"
            )
        if name in names:
            raise ValueError(
                f"two leaves have the name {name!r}: {path_text(names[name])} and "
                f"{path_text(path)}; expected unique names"
            )
        names[name] = path
    return list(names)


def flatten_tree(
    xs: Any, is_leaf: Callable[[Any], bool] | None = None, sep: str | None = None
) -> dict[Any, Any]:
    """Returns the leaves of a JAX tree by name.

    Args:
        xs: The tree.
        is_leaf: Returns True for nodes to treat as leaves.
        sep: Separator between the parts of a name; None: names are tuples of text.

    Raises:
        ValueError: Two leaves have one name, a key contains ``sep``, or JAX cannot sort
            the keys of a dict.
    """
    leaves = jax.tree_util.tree_leaves_with_path(xs, is_leaf=is_leaf)
    names = _names([path for path, _ in leaves], sep)
    return dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def named_tree_map(
    f: Callable[..., Any],
    tree: Any,
    *rest: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> Any:
    """Returns the tree with each leaf replaced by ``f(name, leaf, *others)``.

    Args:
        f: Called for each leaf.
        tree: The tree.
        *rest: Other trees with the structure of ``tree``, or with that structure as a
            prefix.
        is_leaf: Returns True for nodes to treat as leaves.
        sep: Separator between the parts of a name; None: names are tuples of text.

    Raises:
        ValueError: Another tree has a different structure, two leaves have one name, or
            a key contains ``sep``.
    """
    paths = [p for p, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]
    # tree.map visits the leaves in the order in which flattening lists them.
    names = iter(_names(paths, sep))
    return jax.tree.map(
        lambda *leaves: f(next(names), *leaves), tree, *rest, is_leaf=is_leaf
    )


def _names(paths: list[Any], sep: str | None) -> list[Any]:
    parts = [tree_path_to_string(path) for path in paths]
    if sep is not None:
        return join_names(parts, sep)
    seen: set[tuple[str, ...]] = set()
    for name in parts:
        if name in seen:
            raise ValueError(f"two leaves have the name {name}: expected unique names")
        seen.add(name)
    return parts


def tree_apply(fns: Any, tree: Any) -> Any:
    """Returns the tree with each function applied to the node at its position.

    Args:
        fns: Functions, in a tree whose structure is a prefix of ``tree``'s.
        tree: The tree.

    Raises:
        ValueError: The trees have different structures.
    """
    # Some callables, for example jax.tree_util.Partial, are pytrees themselves.
    return jax.tree.map(lambda fn, x: fn(x), fns, tree, is_leaf=callable)


def deepcopy_model(model: Any) -> Any:
    """Returns a copy of a module or tree that shares no array or Variable with it.

    A Variable that a module holds in two places is one Variable in the copy, too.
    """

    def is_module(node: Any) -> bool:
        return isinstance(node, nnx.Pytree)

    def copied_module(module: Any) -> Any:
        graphdef, state = nnx.split(module)
        return nnx.merge(graphdef, jax.tree.map(deepcopy, state))

    leaves, structure = jax.tree.flatten(model, is_leaf=is_module)
    copies = [copied_module(leaf) for leaf in leaves if is_module(leaf)]
    # One deepcopy call for all, so that a leaf that occurs twice is copied once.
    others = deepcopy([None if is_module(leaf) else leaf for leaf in leaves])
    modules = iter(copies)
    copied = [
        next(modules) if is_module(leaf) else other
        for leaf, other in zip(leaves, others, strict=True)
    ]
    return jax.tree.unflatten(structure, copied)


def specs_to_name_sharding(tree: Any, mesh: Mesh | None = None) -> Any:
    """Returns the tree with a NamedSharding for each PartitionSpec.

    Args:
        tree: A tree of PartitionSpecs; None stays None.
        mesh: The mesh; by default the mesh of the context.

    Raises:
        TypeError: A leaf is not a PartitionSpec.
        ValueError: There is no mesh, or it lacks an axis; the message names the leaf.
    """
    if mesh is None:  # that of ``with mesh:``, or of ``jax.set_mesh``
        with warnings.catch_warnings():
            # Deprecated like ``with mesh:``, but the only access to that mesh.
            warnings.simplefilter("ignore", DeprecationWarning)
            threads = getattr(pxla, "thread_resources", None)
        mesh = None if threads is None else threads.env.physical_mesh
        if mesh is None or mesh.empty:
            mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            "expected mesh= or a mesh in the context, got none; pass mesh= or use "
            "jax.set_mesh"
        )

    def sharding(path: tuple[Any, ...], spec: Any) -> NamedSharding:
        place = path_text(tree_path_to_string(path))
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"leaf {place}: expected a PartitionSpec, got {type(spec).__name__}"
            )
        try:
            return NamedSharding(mesh, spec)
        except ValueError as e:
            raise ValueError(f"leaf {place}: {e}") from e

    return jax.tree_util.tree_map_with_path(
        sharding, tree, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )


diffrentiate_state = differentiate_state
init_garphstate = init_graphstate
