"""Linen variables in a store: saved as they are, as NNX state, and restored as
either."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from flax.core import FrozenDict, freeze
from flax.linen.spmd import logical_to_mesh_sharding
from flax.nnx import bridge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.trees.linen import linen_to_nnx, nnx_to_linen
from tests.support.examples import examples

RULES = (("embed", "a"), ("mlp", "b"), ("a", "a"), ("b", "b"))
X = jnp.ones((2, 8))


class Block(nn.Module):
    """Returns parameters in both kinds of boxes and unboxed, and two other
    collections."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        x = nn.Dense(8, kernel_init=nn.with_partitioning(init, ("a", "b")))(x)
        x = nn.Dense(
            8, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp"))
        )(x)
        x = nn.BatchNorm(use_running_average=not self.is_initializing())(x)
        seen = self.variable("ema", "seen", jnp.zeros, (3,), jnp.bfloat16)
        return x + seen.value.sum()


def block_variables(seed: int = 0) -> dict[str, Any]:
    return dict(Block().init(jax.random.key(seed), X))


def abstract_variables() -> dict[str, Any]:
    abstract: dict[str, Any] = jax.eval_shape(block_variables)
    return abstract


def mesh(*sizes: int) -> Mesh:
    return jax.make_mesh(
        sizes, ("a", "b")[: len(sizes)], axis_types=(AxisType.Auto,) * len(sizes)
    )


def raw(value: Any) -> bytes:
    return np.asarray(value).tobytes()


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)


def assert_same(expected: Any, actual: Any) -> None:
    """Asserts equal containers and boxes, with equal fields, dtypes, shapes and
    bytes."""
    assert structure(expected) == structure(actual)
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True
    ):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert raw(one) == raw(other)


def boxes(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(
        tree, is_leaf=lambda x: isinstance(x, nn.meta.AxisMetadata)
    )
    return [leaf for leaf in leaves if isinstance(leaf, nn.meta.AxisMetadata)]


def described(box: Any) -> dict[str, Any]:
    return {"type": type(box), **vars(box)} | {"value": raw(box.value)}


@pytest.mark.slow
def test_linen_variables_are_restored_with_their_boxes(run: store.Run) -> None:
    variables = block_variables()
    run.save(0, variables).result()

    back = run.restore(0, like=abstract_variables())

    assert_same(variables, back)
    assert [described(box) for box in boxes(variables)] == [
        described(box) for box in boxes(back)
    ]
    assert {nn.Partitioned, nn.LogicallyPartitioned} == {type(x) for x in boxes(back)}
    assert raw(Block().apply(variables, X)) == raw(Block().apply(back, X))


def test_frozen_variables_are_restored_frozen(run: store.Run) -> None:
    variables = freeze(block_variables())
    run.save(0, variables).result()

    back = run.restore(0, like=variables)

    assert isinstance(back, FrozenDict)
    assert_same(variables, back)
    assert_same(variables.unfreeze(), run.restore(0, like=abstract_variables()))


def test_an_nnx_meta_box_is_restored_from_a_store(run: store.Run) -> None:
    param = nnx.Param(jnp.arange(4.0), note="kept")
    variables = nnx_to_linen({"kernel": param})
    run.save(0, variables).result()

    back = run.restore(0, like=jax.eval_shape(lambda: variables))

    assert isinstance(back["params"]["kernel"], bridge.NNXMeta)
    assert_same(variables, back)


def sharded_like(variables: Any, devices: Mesh) -> Any:
    """Returns abstract variables with the shardings of their boxes."""
    shardings = logical_to_mesh_sharding(
        nn.get_partition_spec(variables), devices, RULES
    )

    def placed(sharding: NamedSharding, leaf: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), leaf
        )

    return jax.tree.map(placed, shardings, variables)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (8, 1)])
def test_variables_are_restored_where_their_boxes_say(
    run: store.Run, sizes: tuple[int, int]
) -> None:
    variables = block_variables()
    run.save(0, variables).result()
    devices = mesh(*sizes)

    back = run.restore(0, like=sharded_like(abstract_variables(), devices))

    assert_same(variables, back)
    kernels = [back["params"][name]["kernel"].value for name in ("Dense_0", "Dense_1")]
    assert [NamedSharding(devices, P("a", "b"))] * 2 == [k.sharding for k in kernels]
    bias = back["params"]["Dense_0"]["bias"]
    assert NamedSharding(devices, P()) == bias.sharding


def test_collections_become_types_of_variables_and_back() -> None:
    variables = block_variables()

    state: Any = linen_to_nnx(variables)

    assert {
        ("Dense_0", "kernel"): nnx.Param,
        ("Dense_0", "bias"): nnx.Param,
        ("BatchNorm_0", "mean"): nnx.BatchStat,
        ("seen",): nnx.variable_type_from_name("ema"),
    }.items() <= {path: type(leaf) for path, leaf in nnx.to_flat_state(state)}.items()
    assert_same(variables, nnx_to_linen(state))
    assert_same(variables, nnx_to_linen(linen_to_nnx(freeze(variables))))
    assert (
        variables["params"]["Dense_0"]["bias"] is state["Dense_0"]["bias"].get_value()
    )


def test_both_sides_read_the_same_partition_specs() -> None:
    variables = abstract_variables()

    state: Any = linen_to_nnx(variables)

    specs: Any = nnx.get_partition_spec(state)
    assert P("a", "b") == specs["Dense_0"]["kernel"].get_raw_value()
    assert P("embed", "mlp") == specs["Dense_1"]["kernel"].get_raw_value()
    assert P() == specs["Dense_0"]["bias"].get_raw_value()
    assert nn.get_partition_spec(variables) == nn.get_partition_spec(
        nnx_to_linen(state)
    )


def test_a_box_keeps_its_own_rules_and_mesh() -> None:
    devices = mesh(4, 2)
    box = nn.LogicallyPartitioned(jnp.ones((4, 2)), ("embed", None), devices, RULES)
    before = described(box)

    state: Any = linen_to_nnx({"params": {"x": box}})
    back = nnx_to_linen(state)["params"]["x"]

    assert P("a", None) == nnx.get_partition_spec(state)["x"].get_raw_value()
    assert before == described(back)
    assert before == described(box)  # flax would have modified it
    assert box.value.sharding == back.value.sharding


class Axisless(nn.meta.AxisMetadata[Any]):
    """A box that no transformation changes."""

    def add_axis(self, index: int, params: dict[Any, Any]) -> Self:
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        return self


class Tagged(struct.PyTreeNode, Axisless):
    """A custom box whose fields describe it completely."""

    value: Any
    sharding: str = struct.field(pytree_node=False, default="tag")

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Tagged":
        boxed: Tagged = self.replace(value=val)
        return boxed


class Flagged(Tagged):
    """A box with a field named like a flag of Variables."""

    ref: str = struct.field(pytree_node=False, default="tag")


def test_a_box_of_ones_own_is_restored() -> None:
    box = Tagged(jnp.ones(2))

    state = linen_to_nnx({"params": {"x": box}})

    assert described(box) == described(nnx_to_linen(state)["params"]["x"])


@pytest.mark.parametrize("values", ["arrays", "abstract"])
def test_values_stay_where_they_are_whatever_mesh_is_set(values: str) -> None:
    variables = block_variables() if values == "arrays" else abstract_variables()

    with jax.set_mesh(mesh(8)):
        back = nnx_to_linen(linen_to_nnx(variables))

    assert structure(variables) == structure(back)
    for one, other in zip(
        jax.tree.leaves(variables), jax.tree.leaves(back), strict=True
    ):
        assert one is other


def test_variables_are_restored_as_nnx_state(run: store.Run) -> None:
    variables = block_variables()
    run.save(0, variables).result()
    like = linen_to_nnx(abstract_variables())

    state: Any = linen_to_nnx(run.restore(0, like=nnx_to_linen(like)))

    assert structure(like) == structure(state)
    assert_same(linen_to_nnx(variables), state)


def test_nnx_state_is_restored_as_variables(run: store.Run) -> None:
    variables = block_variables()
    run.save(0, linen_to_nnx(variables)).result()

    like = linen_to_nnx(sharded_like(abstract_variables(), mesh(4, 2)))
    back = nnx_to_linen(run.restore(0, like=like))

    assert_same(variables, back)
    kernel = back["params"]["Dense_1"]["kernel"].value
    assert NamedSharding(mesh(4, 2), P("a", "b")) == kernel.sharding


@pytest.fixture
def _lazy_sharding() -> Iterator[None]:
    """Allows modules with boxes to be created without a mesh."""
    with nnx.use_eager_sharding(False):
        yield


def wrapped_block() -> Any:
    return bridge.ToNNX(Block(), rngs=nnx.Rngs(0)).lazy_init(X)


@pytest.mark.usefixtures("_lazy_sharding")
def test_the_state_of_a_wrapped_linen_module_goes_through_a_store(
    run: store.Run,
) -> None:
    wrapped = wrapped_block()
    graphdef, state = nnx.split(wrapped)
    run.save(0, state).result()

    back = run.restore(0, like=jax.eval_shape(lambda: state))

    assert structure(state) == structure(back)
    assert raw(wrapped(X)) == raw(nnx.merge(graphdef, back)(X))


@pytest.mark.usefixtures("_lazy_sharding")
def test_variables_update_a_wrapped_linen_module_and_leave_it() -> None:
    wrapped = wrapped_block()
    variables = block_variables(seed=7)

    nnx.update(wrapped, linen_to_nnx(variables))

    assert raw(Block().apply(variables, X)) == raw(wrapped(X))
    _, state = nnx.split_state(nnx.state(wrapped), nnx.RngState, ...)
    assert_same(variables, nnx_to_linen(state))


def test_metadata_without_a_linen_box_stays_on_the_variable() -> None:
    partitioned = nnx.Param(
        jnp.ones(2), sharding_note="mine", linen_meta_type=nn.Partitioned, mesh=None
    )
    state = {"plain": nnx.Param(jnp.zeros(2), note=1), "box": partitioned}

    variables = nnx_to_linen(state)
    back: Any = linen_to_nnx(variables)

    assert [bridge.NNXMeta] * 2 == [type(x) for x in boxes(variables)]
    for name, variable in state.items():
        assert variable.get_metadata() == back[name].get_metadata()


class Ema(nnx.Variable[jax.Array]):
    """A Variable type without a collection."""


class Counted(nnx.Variable[jax.Array]):
    """A Variable type that gets a collection."""


class Layers(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])


@jax.tree_util.register_pytree_with_keys_class
class Hidden(Axisless):
    """A box without a method to build another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def unbox(self) -> Any:
        return self.inner

    def replace_boxed(self, val: Any) -> "Hidden":
        return Hidden(val)

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return ((jax.tree_util.GetAttrKey("inner"), self.inner),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Hidden":
        return cls(*children)


ONE = jnp.ones(1)
META: Any = bridge.NNXMeta(nnx.BatchStat, ONE, {})


@pytest.mark.parametrize(
    ("variables", "error", "said"),
    [
        (
            {"params": {"Dense_0": {"x": ONE}}, "batch_stats": {"Dense_0": {"x": ONE}}},
            ValueError,
            "got 'params/Dense_0/x' and 'batch_stats/Dense_0/x'; rename one",
        ),
        (
            {"params": {"x": {"y": ONE}}, "cache": {"x": ONE}},
            ValueError,
            "got 'cache/x' and 'params/x/y'; rename one",
        ),
        ({"params": {"x": {0: ONE}}}, TypeError, "params/x/0: expected keys that are"),
        ({1: {"x": ONE}}, TypeError, "1: expected keys that are strings, got int 1"),
        ({"params": {"x": {}}}, ValueError, "params/x: expected leaves, got an empty"),
        ({"batch_stats": {}}, ValueError, "batch_stats: expected leaves, got an"),
        ({"params": ONE}, TypeError, "collection 'params': expected a mapping"),
        ([ONE], TypeError, "Linen variables: expected a mapping, got list"),
        ({"params": {"x": nnx.Param(ONE)}}, TypeError, "params/x: expected an array"),
        ({"params": {"x": META}}, ValueError, "NNXMeta of Param, by its collection, g"),
        ({"params": {"x": Hidden(ONE)}}, TypeError, "got Hidden, which a round trip w"),
        ({"cache": {"x": Flagged(ONE)}}, TypeError, "got Flagged, which a round trip"),
        ({"RngKey": {"x": ONE}}, TypeError, "got an RNG stream's"),
        ({"a\0b": {"x": ONE}}, ValueError, "collection 'a\\x00b' cannot name a type"),
    ],
)
def test_variables_that_cannot_be_nnx_state_are_rejected(
    variables: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        linen_to_nnx(variables)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: nnx.state(Layers()),
            TypeError,
            "layers/0: expected keys that are strings, got int 0",
        ),
        (
            lambda: nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
            TypeError,
            "got RngCount of an RNG stream; split those off",
        ),
        (lambda: {"x": Ema(ONE)}, ValueError, "got Ema; name one: nnx.register_varia"),
        (lambda: {"x": ONE}, TypeError, "x: expected an nnx.Variable, whose type"),
        (lambda: {"x": {}}, ValueError, "x: expected leaves, got an empty mapping"),
        (lambda: ONE, TypeError, "NNX state: expected a mapping, got ArrayImpl"),
    ],
)
def test_state_that_cannot_be_linen_variables_is_rejected(
    make: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        nnx_to_linen(make())

    assert said in str(caught.value)


def register_type() -> Any:
    nnx.register_variable_name("counted", Counted, overwrite=True)
    return {"x": Counted(ONE)}


def split_streams_off() -> Any:
    _, *parts = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.RngState, ...)
    return parts[-1]


@pytest.mark.parametrize(
    ("convert", "refused", "advice", "advised"),
    [
        (
            linen_to_nnx,
            lambda: {"params": {"x": ONE}, "batch_stats": {"x": ONE}},
            "rename one",
            lambda: {"params": {"x": ONE}, "batch_stats": {"y": ONE}},
        ),
        (
            linen_to_nnx,
            lambda: {"params": {"x": ONE}, "batch_stats": {"x": ONE}},
            "or convert the collections separately",
            lambda: {"params": {"x": ONE}},
        ),
        (
            linen_to_nnx,
            lambda: {"params": {0: ONE}},
            "give layers names, such as 'layers_0', instead of numbers",
            lambda: {"params": {"layers_0": ONE}},
        ),
        (
            linen_to_nnx,
            lambda: {"params": {"x": ONE, "y": {}}},
            "leave it out",
            lambda: {"params": {"x": ONE}},
        ),
        (
            linen_to_nnx,
            lambda: {"params": {"x": nnx.Param(ONE)}},
            "convert NNX state with nnx_to_linen",
            lambda: nnx_to_linen({"x": nnx.Param(ONE)}),
        ),
        (
            linen_to_nnx,
            lambda: {"params": {"x": Hidden(ONE)}},
            "or unbox it with flax.linen.meta.unbox",
            lambda: nn.meta.unbox({"params": {"x": Hidden(ONE)}}),
        ),
        (
            linen_to_nnx,
            lambda: {"params": {"x": ONE}, "RngKey": {"y": ONE}},
            "remove it, and pass streams as rngs=",
            lambda: {"params": {"x": ONE}},
        ),
        (
            nnx_to_linen,
            lambda: {"x": ONE},
            "wrap it in an nnx.Variable",
            lambda: {"x": nnx.Param(ONE)},
        ),
        (
            nnx_to_linen,
            lambda: nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(0))),
            r"split those off: nnx.split\(module, nnx.RngState, ...\)",
            split_streams_off,
        ),
        (
            nnx_to_linen,
            lambda: {"x": Ema(ONE)},
            r"name one: nnx.register_variable_name\('...', Ema\)",
            register_type,
        ),
    ],
)
def test_what_a_rejection_advises_is_converted(
    convert: Callable[[Any], Any],
    refused: Callable[[], Any],
    advice: str,
    advised: Callable[[], Any],
) -> None:
    with pytest.raises((TypeError, ValueError), match=advice):
        convert(refused())

    assert jax.tree.leaves(convert(advised()))


def test_a_number_in_text_stays_a_text() -> None:
    variables = {"params": {"layers": {"0": ONE, "10": ONE}}}

    state: Any = linen_to_nnx(variables)

    assert {"0", "10"} == set(state["layers"])
    assert_same(variables, nnx_to_linen(state))


def test_values_that_are_trees_stay_one_variable() -> None:
    variables = {"intermediates": {"Dense_0": {"sown": (ONE, [ONE, ONE])}}}

    state: Any = linen_to_nnx(variables)

    assert isinstance(state["Dense_0"]["sown"], nnx.Intermediate)
    assert_same(variables, nnx_to_linen(state))


DEVICES = mesh(8)
COLLECTIONS = st.sampled_from(
    ["params", "batch_stats", "cache", "intermediates", "ema", "Param", "é/stats"]
)
NAMES = st.one_of(
    st.text(max_size=4).filter(lambda s: not any("\ud800" <= c < "\ue000" for c in s)),
    st.sampled_from(["Dense_0", "kernel", "0", "value", "a/b", ".."]),
)


def some_array(dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    values = np.random.default_rng(seed).integers(0, 2**31, shape)
    spec = P("a") if shape[:1] == (8,) else P()
    array: jax.Array = jax.device_put(
        values.astype(dtype), NamedSharding(DEVICES, spec)
    )
    return array


def boxed(kind: str, collection: str, value: jax.Array) -> Any:
    names = ("embed", *[None] * value.ndim)[: value.ndim]
    match kind:
        case "partitioned":
            return nn.Partitioned(value, names, DEVICES if value.ndim else None)
        case "logical":
            return nn.LogicallyPartitioned(value, names, None, RULES)
        case "meta":
            metadata = nnx.Variable(None).get_metadata() | {"note": names}
            variable_type = nnx.variable_type_from_name(collection, allow_register=True)
            return bridge.NNXMeta(variable_type, value, metadata)
    return value


ARRAYS = st.builds(
    some_array,
    st.sampled_from(["float32", "bfloat16", "int8", "uint32", "bool", "complex64"]),
    st.sampled_from([(), (3,), (8,), (8, 2), (0, 8)]),
    st.integers(0, 99),
)
BOXES = st.sampled_from(["none", "partitioned", "logical", "meta"])
LEAVES = st.tuples(COLLECTIONS, BOXES, ARRAYS)
MODULES: st.SearchStrategy[Any] = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        max_leaves=6,
    ),
    max_size=3,
)


def collected(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Draws variables whose leaves show collection, kind of box and value."""
    variables: dict[str, Any] = {}

    def add(path: tuple[str, ...], node: Any) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                add((*path, key), value)
            return
        collection, kind, value = node
        into = variables.setdefault(collection, {})
        for key in path[:-1]:
            into = into.setdefault(key, {})
        into[path[-1]] = boxed(kind, collection, value)

    add((), modules)
    return variables


_numbers: Callable[[], int] = iter(range(10**9)).__next__


@settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(modules=MODULES)
def test_any_variables_are_converted_and_restored_through_a_store(
    client: store.Client, modules: Mapping[str, Any]
) -> None:
    variables = collected(modules)
    run = client.run(f"tests/linen-{_numbers()}")

    state: Any = linen_to_nnx(variables)
    assert_same(variables, nnx_to_linen(state))

    run.save(0, variables)
    run.save(1, state).result()
    as_variables = nnx_to_linen(run.restore(1, like=state))
    as_state = linen_to_nnx(run.restore(0, like=variables))
    assert_same(variables, as_variables)
    assert_same(state, as_state)
    assert [x.sharding for x in jax.tree.leaves(variables)] == [
        x.sharding for x in jax.tree.leaves(as_variables)
    ]
