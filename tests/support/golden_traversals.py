"""What ``easydel.utils.traversals`` of easydel 0.3.0 answers, case by case.

``RECORDED`` was recorded from easydel itself, with flax 0.12.3 and jax 0.9.2. A case
runs against any module that offers the functions, so the same cases hold ours to the
record and the record to easydel:

>>> for name, run, deviation in cases():
...     assert (outcome(run, ours) == RECORDED[name]) == (deviation is None)

A deviation says why ours differs. Eight CPU devices are expected.
"""

import warnings
from ast import literal_eval
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

RECORDED: dict[str, Any] = literal_eval(
    Path(__file__).with_name("recorded_traversals.txt").read_text()
)
"""The answers of easydel, by case."""


class Case(NamedTuple):
    """One question to an implementation."""

    name: str
    run: Callable[[Any], Any]
    """Takes the implementation, a module, and returns its answer."""

    deviation: str | None = None
    """Why ours answers otherwise; none if it does not."""


_CASES: list[Case] = []

TYPED = "typed keys stay typed, easydel makes them raw key data"
KEPT = "concrete counts and keys stay, easydel resets all"
KEPT_INPUT = "inputs stay as they were, easydel changes them"
DOCUMENTED = "the documented error is a TypeError"
ONE_VALUE = "two values for one place are refused"
LOSSLESS = "nothing is lost: easydel drops or replaces without a word"
WORKS = "easydel fails on current flax where its documentation promises a result"


def _case(
    deviation: str | None = None,
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        _CASES.append(Case(run.__name__, run, deviation))
        return run

    return add


def cases() -> Iterator[Case]:
    """Returns all cases: name, function of an implementation, deviation."""
    yield from _CASES


def outcome(run: Callable[[Any], Any], implementation: Any) -> Any:
    """Returns the normalised answer, or "raises" and the error's name."""
    try:
        with warnings.catch_warnings():
            # Some cases ask for what jax or flax no longer recommend.
            warnings.simplefilter("ignore", DeprecationWarning)
            return normalise(run(implementation))
    except Exception as e:  # noqa: BLE001 - whatever is raised is the answer
        return f"raises {type(e).__name__}"


def normalise(value: Any) -> Any:
    """Returns the value as literals, equal for equal answers of two modules."""
    match value:
        case nnx.Variable():
            tags = {k: v for k, v in value.get_metadata().items() if k == "tag"}
            return (type(value).__name__, normalise(value.get_value()), *tags.values())
        case jax.ShapeDtypeStruct():
            return ("abstract", str(value.dtype), value.shape)
        case jax.Array() if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(value).tolist()
            return ("key", str(jax.random.key_impl(value)), data)
        case jax.Array() | np.ndarray():
            return (str(value.dtype), value.shape, np.asarray(value).tolist())
        case nnx.State():
            return ("State", normalise(dict(value.raw_mapping)))
        case nnx.GraphDef():
            return ("GraphDef", value.num_leaves)
        case nnx.Module():
            return ("module", type(value).__name__, normalise(nnx.state(value)))
        case NamedSharding():
            return ("NamedSharding", dict(value.mesh.shape), str(value.spec))
        case type():
            return f"type {value.__name__}"
        case _:
            return _normalised_container(value)


def _normalised_container(value: Any) -> Any:
    # First: ours is a mapping as well, and easydel's is not.
    if type(value).__name__ == "StateValidationResult":
        keys = sorted(value.missing_keys)
        return (value.is_valid, keys, normalise(value.invalid_types))
    match value:
        case dict():
            return {key: normalise(at) for key, at in value.items()}
        case list() | tuple():
            return type(value)(map(normalise, value))
        case None | bool() | int() | float() | str():
            return value
        case _:
            return f"a {type(value).__name__}"


class Small(nnx.Module):
    """A layer of ones, and an RNG stream."""

    def __init__(self, n: int = 2, *, rngs: nnx.Rngs) -> None:
        ones = nnx.initializers.ones
        self.linear = nnx.Linear(n, 2, kernel_init=ones, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Normed(nnx.Module):
    """A layer of ones, and statistics."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        ones = nnx.initializers.ones
        self.linear = nnx.Linear(2, 2, kernel_init=ones, rngs=rngs)
        self.norm = nnx.BatchNorm(2, rngs=rngs)


class Bare(nnx.Module):
    """A parameter, and a constructor that takes no RNG."""

    def __init__(self, n: int) -> None:
        self.weight = nnx.Param(jnp.zeros(n))


class Deep(nnx.Module):
    """Twelve layers, so that text order and number order differ."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        ones = nnx.initializers.ones
        self.layers = nnx.List(
            [nnx.Linear(1, 1, kernel_init=ones, rngs=rngs) for _ in range(12)]
        )


PATH = (DictKey("a"), DictKey(3), SequenceKey(1), GetAttrKey("x"), FlattenedIndexKey(7))
NESTED = {"a": [1, {"b": 2}], "c": (3,)}
P = PartitionSpec


def _state(model: Any = Small) -> Any:
    return nnx.split(model(rngs=nnx.Rngs(0)))[1]


def _rng() -> Any:
    return nnx.split_state(_state(), nnx.Param, ...)[1]


def _flat_rng(t: Any) -> Any:
    return t.flatten_dict(_rng())


def _whole(t: Any) -> Any:
    return t.flatten_dict(_state())


def _partial(t: Any) -> Any:
    return {k: v for k, v in _whole(t).items() if "rngs" not in k}


def _tree() -> dict[str, Any]:
    kernel, bias = np.full((2, 2), 5, np.float32), np.full(2, 6, np.float32)
    return {"linear": {"kernel": kernel, "bias": bias}}


def _one() -> Any:
    return nnx.Param(jnp.ones(1))


def _mesh() -> Mesh:
    auto = jax.sharding.AxisType.Auto
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(auto, auto))


def _linear() -> Any:
    return nnx.Linear(2, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))


@_case()
def specs_over_the_mesh_of_the_context(t: Any) -> Any:
    with _mesh():
        return t.specs_to_name_sharding({"a": P("y")})


@_case()
def graphdef(t: Any) -> Any:
    lazy = t.create_graphdef(Small, n=3)
    eager = nnx.graphdef(Small(3, rngs=nnx.Rngs(0)))
    return [lazy, lazy == eager, lazy == t.create_graphdef(Small, n=4)]


@_case()
def copy_of_a_module(t: Any) -> Any:
    model = Small(rngs=nnx.Rngs(0))
    copied = t.deepcopy_model(model)
    copied.linear.kernel.set_value(jnp.zeros((2, 2)))
    return [copied, model.linear.kernel, copied.linear.kernel is model.linear.kernel]


@_case(WORKS)
def redefine_counts_and_keys(t: Any) -> Any:
    missing = t.differentiate_state(_partial(t), _whole(t), validate=False)
    return t.redefine_state(_partial(t), missing)


@_case()
def recreate_raw_keys(t: Any) -> Any:
    def keys() -> dict[Any, Any]:
        raw = jax.random.PRNGKey(5)
        return {(name,): nnx.RngKey(raw, tag="t") for name in "kl"}

    return [t.recreate_meta_values(keys()), t.recreate_meta_values(keys(), 7)]


@_case()
def recreate_with_the_default_seed(t: Any) -> Any:
    default = t.recreate_meta_values(_flat_rng(t))
    return normalise(default) == normalise(t.recreate_meta_values(_flat_rng(t), 42))


@_case("0 is a seed, not the absence of one")
def recreate_with_seed_0(t: Any) -> Any:
    zero = t.recreate_meta_values(_flat_rng(t), seed=0)
    return normalise(zero) == normalise(t.recreate_meta_values(_flat_rng(t), 42))


@_case(TYPED)
def recreate_counts_and_keys(t: Any) -> Any:
    count = jnp.zeros((), jnp.uint32)
    values: dict[Any, Any] = {
        (name, kind): variable
        for name in ("a", "b")
        for kind, variable in (
            ("count", nnx.RngCount(count, tag="t")),
            ("key", nnx.RngKey(jax.random.key(1), tag="t")),
        )
    }
    return t.recreate_meta_values(values)


@_case(KEPT_INPUT)
def recreate_and_look_at_the_input(t: Any) -> Any:
    values = _flat_rng(t)
    result = t.recreate_meta_values(values)
    return [result is values, [result[k] is values[k] for k in values], values]


@_case()
def recreator(t: Any) -> Any:
    source = t.MetaValueRecreator(42)
    draws = (source.get_count, source.get_rng) * 2
    return [draw() for draw in draws]


@_case()
def recreator_with_the_default_seed(t: Any) -> Any:
    seeds = t.MetaValueRecreator(), t.MetaValueRecreator(42)
    first, second = (normalise(source.get_rng()) for source in seeds)
    return first == second


@_case("no Variable is shared, so that no use of the result changes the input")
def refine_and_look_for_the_input(t: Any) -> Any:
    state: Any = nnx.State({"a": _one()})
    return [t.refine_graphs(state) is state, t.refine_graphs(state)["a"] is state["a"]]


@_case()
def refine_the_parts_of_a_module(t: Any) -> Any:
    graphdef, *states = nnx.split(Small(rngs=nnx.Rngs(0)), nnx.Param, ...)
    return nnx.merge(graphdef, t.refine_graphs(*reversed(states)))


@_case(LOSSLESS)
def merge_a_tree_with_a_leaf_too_few(t: Any) -> Any:
    tree = _tree()
    del tree["linear"]["kernel"]
    return t.merge_state_and_tree(tree, _state())


@_case("a shape that does not fit is refused")
def merge_a_tree_of_another_shape(t: Any) -> Any:
    tree = _tree()
    tree["linear"]["kernel"] = np.zeros(7, np.float32)
    return t.merge_state_and_tree(tree, _state())


@_case(WORKS)
def merge_a_tree_beside_statistics(t: Any) -> Any:
    norm = {"scale": np.ones(2, np.float32), "bias": np.ones(2, np.float32)}
    return t.merge_state_and_tree(_tree() | {"norm": norm}, _state(Normed))


@_case()
def merge_a_tree_with_digits_for_integers(t: Any) -> Any:
    bias = np.zeros(1, np.float32)
    layers = {
        str(i): {"kernel": np.full((1, 1), i, np.float32), "bias": bias}
        for i in range(12)
    }
    merged = t.merge_state_and_tree({"layers": layers}, _state(Deep))
    return [merged["layers"][i]["kernel"].get_value().item() for i in range(12)]


@_case(KEPT_INPUT)
def merge_a_tree_and_look_at_the_state(t: Any) -> Any:
    state = _state()
    merged = t.merge_state_and_tree(_tree(), state)
    kernel = state["linear"]["kernel"]
    return [merged["linear"]["kernel"] is kernel, kernel]


@_case(KEPT)
def merge_a_model(t: Any) -> Any:
    model = Small(rngs=nnx.Rngs(0))
    merged = t.merge_model_and_tree(model, _tree())
    return [merged is model, merged]


@_case(KEPT_INPUT)
def merge_a_model_and_look_at_it(t: Any) -> Any:
    model = Small(rngs=nnx.Rngs(0))
    t.merge_model_and_tree(model, _tree())
    return model


@_case()
def flax_merges_by_sorted_position(t: Any) -> Any:
    graphdef, state = nnx.split(_linear())
    renamed = nnx.State({"a": state["kernel"], "z": state["bias"]})
    return nnx.merge(graphdef, renamed).bias


@_case()
def flax_permutes_layers_under_text(t: Any) -> Any:
    state: Any
    graphdef, state = nnx.split(Deep(rngs=nnx.Rngs(0)))
    for i in range(12):
        state["layers"][i]["kernel"].set_value(jnp.full((1, 1), float(i)))
    layers = {str(i): dict(state["layers"][i]) for i in range(12)}
    merged = nnx.merge(graphdef, nnx.State({"layers": layers}))
    return [layer.kernel.get_value().item() for layer in merged.layers]


@_case()
def flax_shares_variables_with_the_state(t: Any) -> Any:
    model: Any = Small(rngs=nnx.Rngs(0))
    graphdef, state = nnx.graphdef(model), _state()
    nnx.merge(graphdef, state).dropout(jnp.ones((1, 4)))
    return state["dropout"]["rngs"]["count"]


_CASES += [
    Case("path_as_a_tuple", lambda t: t.tree_path_to_string(PATH)),
    Case("path_with_slashes", lambda t: t.tree_path_to_string(PATH, sep="/")),
    Case(
        "path_with_dots",
        lambda t: t.tree_path_to_string((DictKey("a"), SequenceKey(0)), sep="."),
    ),
    Case(
        "path_that_is_empty",
        lambda t: [t.tree_path_to_string(()), t.tree_path_to_string((), "/")],
    ),
    Case(
        "path_of_a_foreign_key",
        lambda t: t.tree_path_to_string(("raw", ("t", 1)), sep="/"),
    ),
    Case(
        "path_with_the_separator_in_a_key",
        lambda t: [
            t.tree_path_to_string((DictKey("a/b"),), "/"),
            t.tree_path_to_string((DictKey("a"), DictKey("b")), "/"),
        ],
    ),
    Case("path_of_a_state", lambda t: sorted(t.flatten_tree(_state(), sep="/"))),
    Case("flatten_tree_to_tuples", lambda t: t.flatten_tree(NESTED)),
    Case("flatten_tree_to_text", lambda t: t.flatten_tree(NESTED, sep=".")),
    Case(
        "flatten_tree_skips_none",
        lambda t: t.flatten_tree({"a": None, "b": 1}, sep="."),
    ),
    Case(
        "flatten_tree_up_to_leaves",
        lambda t: t.flatten_tree(
            {"a": None, "b": [1]},
            is_leaf=lambda x: x is None or isinstance(x, list),
            sep=".",
        ),
    ),
    Case(
        "flatten_tree_with_two_leaves_of_one_name",
        lambda t: t.flatten_tree({"a": {"b": 2}, "a/b": 1}, sep="/"),
        ONE_VALUE,
    ),
    Case(
        "flatten_tree_with_an_integer_beside_its_text",
        lambda t: t.flatten_tree({0: 1, "0": 2}, sep="/"),
    ),
    Case("flatten_tree_of_a_leaf", lambda t: t.flatten_tree(5, sep="/")),
    Case(
        "map_to_names",
        lambda t: t.named_tree_map(
            lambda n, x: n, {"a": [1, 2], "b": {"c": 3}}, sep="/"
        ),
    ),
    Case(
        "map_with_two_trees",
        lambda t: t.named_tree_map(
            lambda n, x, y: [n, x + y], {"a": [1, 2]}, {"a": [10, 20]}, sep="."
        ),
    ),
    Case("map_to_tuple_names", lambda t: t.named_tree_map(lambda n, x: n, {"a": [1]})),
    Case(
        "map_up_to_leaves",
        lambda t: t.named_tree_map(
            lambda n, x: (n, len(x)),
            {"a": [1, 2]},
            is_leaf=lambda x: isinstance(x, list),
            sep="/",
        ),
    ),
    Case(
        "apply",
        lambda t: t.tree_apply(
            {"a": lambda x: x + 1, "b": {"c": str}}, {"a": 1, "b": {"c": 2}}
        ),
    ),
    Case(
        "apply_to_subtrees",
        lambda t: t.tree_apply({"a": sorted}, {"a": {"b": 1, "c": 2}}),
    ),
    Case(
        "apply_with_a_key_too_few", lambda t: t.tree_apply({"a": str}, {"a": 1, "b": 2})
    ),
    Case(
        "specs_over_a_mesh",
        lambda t: t.specs_to_name_sharding(
            {"a": P("x"), "b": None, "c": [P(), P(("x", "y"))]}, _mesh()
        ),
    ),
    Case("specs_without_a_mesh", lambda t: t.specs_to_name_sharding({"a": P("x")})),
    Case(
        "specs_of_an_unknown_axis",
        lambda t: t.specs_to_name_sharding({"a": P("zz")}, _mesh()),
    ),
    Case(
        "is_flatten",
        lambda t: [
            t.is_flatten(d)
            for d in (
                {},
                {"a": 1},
                {("a",): 1},
                {("a",): 1, "b": 2},
                {"a/b": 1},
                nnx.State({"a": 1}),
            )
        ],
    ),
    Case("is_flatten_of_a_list", lambda t: t.is_flatten([])),
    Case(
        "flatten_dict",
        lambda t: t.flatten_dict({"a": {"b": 1, "c": {}}, "d": 2, 5: {"x": 3}}),
    ),
    Case(
        "flatten_dict_with_empty_nodes",
        lambda t: t.flatten_dict(
            {"a": {"b": 1, "c": {}}, "d": {}}, keep_empty_nodes=True
        ),
    ),
    Case(
        "flatten_dict_of_nothing",
        lambda t: [t.flatten_dict({}), t.flatten_dict({}, keep_empty_nodes=True)],
    ),
    Case(
        "flatten_dict_to_text",
        lambda t: t.flatten_dict({"a": {"b": 1}, 5: {"x": 3}}, sep="."),
    ),
    Case(
        "flatten_dict_to_text_with_empty_nodes",
        lambda t: t.flatten_dict(
            {"a": {"b": 1, "c": {}}}, sep=".", keep_empty_nodes=True
        ),
        LOSSLESS,
    ),
    Case(
        "flatten_dict_up_to_leaves",
        lambda t: t.flatten_dict(
            {"a": {"b": {"c": 1}}}, is_leaf=lambda path, _: len(path) == 2
        ),
    ),
    Case(
        "flatten_dict_takes_lists_for_leaves",
        lambda t: t.flatten_dict({"a": [1, {"b": 2}]}),
    ),
    Case("flatten_dict_of_a_list", lambda t: t.flatten_dict([1]), DOCUMENTED),
    Case(
        "flatten_dict_of_a_flat_one_to_text",
        lambda t: t.flatten_dict({("a", 0): 1}, sep="."),
        WORKS,
    ),
    Case(
        "flatten_dict_of_a_state",
        lambda t: t.flatten_dict(nnx.State({"a": {"b": _one()}, 0: _one()})),
    ),
    Case(
        "flatten_dict_of_a_state_to_text",
        lambda t: t.flatten_dict(nnx.State({"a": {"b": _one()}}), sep="/"),
    ),
    Case(
        "flatten_dict_of_a_state_with_integers_to_text",
        lambda t: t.flatten_dict(nnx.State({"a": {0: _one()}}), sep="/"),
        WORKS,
    ),
    Case(
        "flatten_dict_of_a_state_with_fumap",
        lambda t: t.flatten_dict(nnx.State({"a": 1}), fumap=True),
        "a State is a mapping, and is flattened",
    ),
    Case("unflatten_dict", lambda t: t.unflatten_dict({("a", 0): 1, ("b",): 2})),
    Case(
        "unflatten_dict_of_text",
        lambda t: t.unflatten_dict(t.flatten_dict({"a": {0: 1}}, sep="."), sep="."),
    ),
    Case(
        "string_keys_to_integers",
        lambda t: t.string_key_to_int({"a": {"0": 1, "007": 2, "x1": 3, "-1": 4}}),
        "007 is no spelling of 7, which would take the place of another 7",
    ),
    Case("integer_keys_to_strings", lambda t: t.int_key_to_string({"a": {0: 1}})),
    Case(
        "graphdef_of_two_seeds",
        lambda t: (
            t.create_graphdef(Small, _seed=1) == t.create_graphdef(Small, _seed=2)
        ),
    ),
    Case(
        "graphdef_without_rngs", lambda t: t.create_graphdef(Bare, _add_rngs=False, n=2)
    ),
    Case(
        "graphdef_with_rngs_where_none_are_taken",
        lambda t: t.create_graphdef(Bare, n=2),
    ),
    Case("graphstate", lambda t: t.init_graphstate(Small)),
    Case(
        "graphstate_with_values",
        lambda t: t.init_graphstate(Small, _lazy=False, _seed=3),
    ),
    Case("init", lambda t: t.nnx_init(Small, n=3)),
    Case(
        "copy_of_a_tree",
        lambda t: t.deepcopy_model({"a": [jnp.ones(2), np.zeros(1), None, 3]}),
    ),
    Case("validate_the_same", lambda t: t.validate_state(_whole(t), _whole(t))),
    Case(
        "validate_with_keys_missing", lambda t: t.validate_state(_partial(t), _whole(t))
    ),
    Case("validate_with_more_keys", lambda t: t.validate_state(_whole(t), _partial(t))),
    Case(
        "validate_with_other_types",
        lambda t: t.validate_state({"a": 1.5, "b": True}, {"a": 1, "b": 1}),
    ),
    Case(
        "differentiate_with_keys_missing",
        lambda t: t.differentiate_state(_partial(t), _whole(t)),
    ),
    Case(
        "differentiate_without_validation",
        lambda t: t.differentiate_state(_partial(t), _whole(t), validate=False),
    ),
    Case(
        "differentiate_the_same", lambda t: t.differentiate_state(_whole(t), _whole(t))
    ),
    Case(
        "differentiate_what_is_no_variable",
        lambda t: t.differentiate_state({}, {"a": 1}, validate=False),
    ),
    Case(
        "redefine_an_empty_parameter",
        lambda t: t.redefine_state({}, {("a",): nnx.Param(None)}),
    ),
    Case("redefine_a_parameter", lambda t: t.redefine_state({}, {("a",): _one()})),
    Case(
        "redefine_statistics",
        lambda t: t.redefine_state({}, {("a",): nnx.BatchStat(jnp.ones(1))}),
    ),
    Case("redefine_nothing", lambda t: t.redefine_state({"x": 1}, {})),
    Case("recreate_a_state", lambda t: t.recreate_meta_values(_rng()), TYPED),
    Case("recreate_a_flat_dict", lambda t: t.recreate_meta_values(_flat_rng(t)), TYPED),
    Case(
        "recreate_with_seed_7",
        lambda t: t.recreate_meta_values(_flat_rng(t), seed=7),
        TYPED,
    ),
    Case(
        "recreate_statistics",
        lambda t: t.recreate_meta_values({("a",): nnx.BatchStat(jnp.ones(1))}),
        DOCUMENTED,
    ),
    Case(
        "recreate_a_parameter",
        lambda t: t.recreate_meta_values({("a",): _one()}),
        DOCUMENTED,
    ),
    Case(
        "recreate_an_array",
        lambda t: t.recreate_meta_values({("a",): jnp.ones(1)}),
        DOCUMENTED,
    ),
    Case(
        "recreate_nothing",
        lambda t: [t.recreate_meta_values({}), t.recreate_meta_values(nnx.State({}))],
    ),
    Case(
        "refine_two_dicts",
        lambda t: t.refine_graphs({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}),
    ),
    Case(
        "refine_a_flat_dict_and_a_state",
        lambda t: t.refine_graphs(
            {("a", "x"): _one()}, nnx.State({"a": {"y": _one()}})
        ),
    ),
    Case(
        "refine_two_leaves_at_one_path",
        lambda t: t.refine_graphs({"a": {"x": 1}}, {"a": {"x": 2}}),
        ONE_VALUE,
    ),
    Case(
        "refine_a_leaf_and_one_below_it",
        lambda t: t.refine_graphs({"a": 1}, {"a": {"x": 2}}),
        "refused naming both, with a ValueError as all refusals of places",
    ),
    Case(
        "refine_a_leaf_and_one_above_it",
        lambda t: t.refine_graphs({"a": {"x": 2}}, {"a": 1}),
        ONE_VALUE,
    ),
    Case("refine_nothing", lambda t: t.refine_graphs()),
    Case(
        "refine_one_graph",
        lambda t: [t.refine_graphs({"a": 1}), t.refine_graphs({}, {})],
    ),
    Case(
        "refine_integers_beside_their_text",
        lambda t: t.refine_graphs({("a", 0): 1}, {("a", "0"): 2}),
    ),
    Case(
        "refine_a_list",
        lambda t: t.refine_graphs([1]),
        "what is no graph is a TypeError, with a message; easydel trips over keys()",
    ),
    Case("merge_a_tree", lambda t: t.merge_state_and_tree(_tree(), _state()), KEPT),
    Case(
        "merge_a_flat_tree",
        lambda t: t.merge_state_and_tree(t.flatten_dict(_tree()), _state()),
        KEPT,
    ),
    Case(
        "merge_a_tree_into_no_rng",
        lambda t: t.merge_state_and_tree(
            {"kernel": np.ones((1, 2), np.float32), "bias": np.ones(2, np.float32)},
            nnx.state(nnx.Linear(1, 2, rngs=nnx.Rngs(0))),
        ),
    ),
    Case(
        "merge_a_tree_with_a_leaf_too_many",
        lambda t: t.merge_state_and_tree(_tree() | {"more": np.ones(1)}, _state()),
        KEPT,
    ),
    Case(
        "merge_a_tree_of_variables",
        lambda t: t.merge_state_and_tree(
            {
                "linear": {
                    k: nnx.Param(jnp.asarray(v)) for k, v in _tree()["linear"].items()
                }
            },
            _state(),
        ),
        WORKS,
    ),
    Case(
        "flax_has_one_class_of_variables", lambda t: nnx.VariableState is nnx.Variable
    ),
]
