"""A restore returns what was saved, bit by bit: every dtype, shape, kind and
sharding."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc.format.dtypes import DTYPES
from storesvc_client._items.values import CONTAINERS, pack_document
from tests.support.examples import examples, sampled
from tests.support.leaf_bits import leaf_bytes as raw

SHAPES = [(), (0,), (3, 0, 2), (1,) * 8, (7, 11, 13), (10_007,)]

# jax has no arrays of the other dtypes.
JAX_DTYPES = {
    name: dtype
    for name, dtype in DTYPES.items()
    if not name.startswith("float6_") and name not in ("int1", "uint1")
}


@pytest.fixture(scope="module", autouse=True)
def _wide_types() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module", params=["streamed", "direct"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[store.Client]:
    directory = tmp_path_factory.mktemp("store")
    target = "memory://" if request.param == "streamed" else directory.as_uri()
    with store.connect(target) as connected:
        yield connected


def mesh(*sizes: int) -> Mesh:
    names = tuple("abc"[: len(sizes)])
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), names)


def some_bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Draws any bit pattern of the dtype, including NaN payloads and -0.0."""
    rng = np.random.default_rng(7)
    size = math.prod(shape)
    if dtype.name == "bool":
        return rng.integers(0, 2, size).astype(bool).reshape(shape)
    if dtype.itemsize == 1 and dtype.name not in ("int8", "uint8"):
        bits = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
        bits |= {"int1": 1, "uint1": 1, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
        top = 2 ** bits.get(dtype.name, 8)
        raw = rng.integers(0, top, size, dtype=np.uint16).astype(np.uint8)
        return raw.view(dtype).reshape(shape)
    raw = rng.integers(0, 256, size * dtype.itemsize, dtype=np.uint16)
    return raw.astype(np.uint8).view(dtype).reshape(shape)


def assert_same(expected: Any, actual: Any) -> None:
    """Asserts equal structure, types, dtypes, shapes and bytes."""
    assert str(jax.tree.structure(expected)) == str(jax.tree.structure(actual))
    for one, other in zip(
        jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True
    ):
        assert type(one) is type(other)
        if type(one) in (int, str, bytes):  # int64 cannot hold every int
            assert one == other
            continue
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
        assert getattr(one, "shape", None) == getattr(other, "shape", None)
        assert raw(one) == raw(other)


def there_and_back(run: store.Run, tree: Any, *, step: int = 0, **target: Any) -> Any:
    run.save(step, tree).result()
    return run.restore(step, **target)


@pytest.mark.parametrize("dtype", sampled(DTYPES.values(), every=3), ids=list(DTYPES))
def test_every_dtype_and_shape_is_restored_on_the_host(
    run: store.Run, dtype: np.dtype[Any]
) -> None:
    tree = {str(shape): some_bytes(shape, dtype) for shape in SHAPES}

    assert_same(tree, there_and_back(run, tree))


@pytest.mark.parametrize(
    "dtype", sampled(JAX_DTYPES.values(), every=4), ids=list(JAX_DTYPES)
)
def test_every_dtype_of_jax_is_restored_on_devices(
    run: store.Run, dtype: np.dtype[Any]
) -> None:
    tree = {str(shape): jax.device_put(some_bytes(shape, dtype)) for shape in SHAPES}

    assert_same(tree, there_and_back(run, tree, like=jax.eval_shape(lambda: tree)))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_prng_keys_are_restored_typed(run: store.Run, impl: str) -> None:
    key = jax.random.key(5, impl=impl)
    tree = {"one": key, "many": jax.random.split(key, (4, 2))}

    back = there_and_back(run, tree)
    again = run.restore(0, like=jax.eval_shape(lambda: tree))

    assert_same(tree, back)
    assert_same(tree, again)
    assert raw(jax.random.split(key)) == raw(jax.random.split(back["one"]))


def test_python_and_numpy_scalars_keep_their_types(run: store.Run) -> None:
    tree = {
        "bool": True,
        "int": -(2**63),
        "float": float("-0.0"),
        "nan": float("nan"),
        "complex": 1 - 2j,
        "generic": np.float16(1.5),
        "zero-d": np.array(3, np.int8),
    }

    back = there_and_back(run, tree)

    assert {k: type(v) for k, v in tree.items()} == {
        k: type(v) for k, v in back.items()
    }
    assert math.copysign(1, back["float"]) == -1
    assert_same(tree, back)


class Pair(NamedTuple):
    first: Any
    second: Any


class Nothing(NamedTuple):
    """Optax's ``EmptyState`` and ``MaskedNode`` are such tuples."""


@jax.tree_util.register_dataclass
@dataclass
class Record:
    weights: Any
    bias: Any


def test_containers_of_every_kind_are_restored_through_a_template(
    run: store.Run,
) -> None:
    model = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    tree = {
        "list": [np.ones(2), (np.zeros(1), None)],
        "tuple": Pair(np.arange(3), {"empty": {}, "x": 1}),
        "dataclass": Record(np.ones(1), np.zeros(1)),
        "nnx": model,
        7: np.int64(7),
    }
    tree = {"top": {str(k): v for k, v in tree.items()}, "ints": {7: 1, 30: 2}}

    assert_same(tree, there_and_back(run, tree, like=tree))


def test_without_a_template_named_tuples_are_dicts(run: store.Run) -> None:
    tree = {"t": Pair(1, (2, [3, None, 4])), "ints": {7: 1, 30: 2}}

    back = there_and_back(run, tree)

    assert {
        "t": {"first": 1, "second": (2, [3, None, 4])},
        "ints": {7: 1, 30: 2},
    } == back


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ((Nothing(), {"w": 1}, Nothing()), ({}, {"w": 1}, {})),
        (
            {"a": Pair(1, Nothing()), "b": [Nothing()]},
            {"a": {"first": 1, "second": {}}, "b": [{}]},
        ),
        (Nothing(), {}),
        ((Nothing(), Nothing()), ({}, {})),
    ],
    ids=["tuple", "fields", "root", "no leaf"],
)
def test_without_a_template_named_tuples_without_fields_are_empty_dicts(
    run: store.Run, tree: Any, expected: Any
) -> None:
    back = there_and_back(run, tree)

    assert expected == back
    assert_same(tree, run.restore(0, like=tree))


@jax.tree_util.register_dataclass
@dataclass
class Masked:
    weights: Any
    mask: Any = field(metadata={"static": True})


@pytest.mark.parametrize(
    "trees",
    [
        [Masked(1.0, np.ones(3)), Masked(2.0, np.ones(3))],
        [{(1, 2): 1.0}, {np.int64(3): 2.0}],
    ],
    ids=["static fields", "dict keys"],
)
def test_states_that_cannot_be_compared_are_saved_again_and_again(
    run: store.Run, trees: list[Any]
) -> None:
    for step, tree in enumerate(trees):
        assert_same(tree, there_and_back(run, tree, step=step, like=tree))


@pytest.mark.parametrize("tree", [5, np.arange(3), {}, [], {"a": {}}])
def test_degenerate_trees_are_restored(run: store.Run, tree: Any) -> None:
    back = there_and_back(run, tree, like=tree)

    assert_same(tree, back)


SPECS = [P(), P("a"), P("b"), P("a", "b"), P(None, "b"), P(("a", "b")), P(None, "a")]


@pytest.mark.parametrize("saved", sampled(SPECS, every=3), ids=str)
def test_any_sharding_is_restored_on_any_other(run: store.Run, saved: P) -> None:
    values = some_bytes((16, 24, 3), np.dtype(np.float32))
    run.save(1, {"x": jax.device_put(values, NamedSharding(mesh(4, 2), saved))})
    run.wait()

    targets: list[Sharding] = [NamedSharding(mesh(2, 4), spec) for spec in SPECS]
    targets += [NamedSharding(mesh(2, 2, 2), P("c", ("a", "b")))]
    targets += [SingleDeviceSharding(jax.devices()[3])]
    for target in targets:
        like = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=target)
        back = run.restore(1, like={"x": like})["x"]
        assert target == back.sharding
        assert values.tobytes() == raw(back)
    host = run.restore(1, like={"x": values})["x"]
    assert isinstance(host, np.ndarray)
    assert values.tobytes() == raw(host)


def test_the_saved_sharding_is_the_default_where_it_fits(run: store.Run) -> None:
    sharding = NamedSharding(mesh(4, 2), P("b", "a"))
    run.save(0, {"x": jax.device_put(jnp.zeros((4, 8)), sharding)})
    few = NamedSharding(mesh(2, 2), P("a"))
    run.save(1, {"x": jax.device_put(jnp.zeros((4, 8)), few)})
    run.wait()

    assert sharding == run.restore(0)["x"].sharding
    assert isinstance(run.restore(1)["x"], np.ndarray)


@pytest.mark.slow
def test_a_leaf_of_many_chunks_is_restored_on_other_shards(run: store.Run) -> None:
    values = np.random.default_rng(0).integers(0, 2**31, (4_099, 4_096), np.int32)
    run.save(0, {"x": values}).result()
    assert run.open(0).leaves["x"].chunk_count > 3

    for sizes, spec in ((1, P()), (8, P(None, "a"))):
        target = NamedSharding(mesh(sizes), spec)
        like = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=target)
        assert values.tobytes() == raw(run.restore(0, like={"x": like})["x"])


@pytest.mark.slow
def test_one_leaf_of_256_mib_is_restored(run: store.Run) -> None:
    values = np.arange(2**26, dtype=np.float32).reshape(2**13, 2**13)
    sharded = jax.device_put(values, NamedSharding(mesh(4, 2), P("a", "b")))
    run.save(0, {"x": sharded}).result()

    back = run.restore(0)["x"]

    assert sharded.sharding == back.sharding
    assert np.array_equal(values, back)


@pytest.mark.slow
def test_ten_thousand_small_leaves_are_restored(run: store.Run) -> None:
    tree = {f"leaf-{i}": np.full(i % 5, i, np.float32) for i in range(10_000)}

    assert_same(tree, there_and_back(run, tree))


@pytest.mark.parametrize("snapshot", ["host", "device"])
def test_a_save_survives_the_donation_of_its_arrays(
    run: store.Run, snapshot: Literal["host", "device"]
) -> None:
    array = jax.device_put(jnp.arange(2**20), NamedSharding(mesh(8), P("a")))
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    save = run.save(0, {"x": array}, snapshot=snapshot)
    for _ in range(5):
        array = bump(array)

    save.result()

    assert np.array_equal(np.arange(2**20), run.restore(0)["x"])


def test_the_replicas_of_a_restored_array_may_be_donated_and_change_apart(
    run: store.Run,
) -> None:
    # On CPU they share the buffer that the restore filled.
    run.save(0, {"x": np.ones((1024, 1024), np.float32)}).result()
    devices = mesh(8)
    like = jax.ShapeDtypeStruct(
        (1024, 1024), np.float32, sharding=NamedSharding(devices, P())
    )
    restored = run.restore(0, like={"x": like})["x"]

    def differ(x: jax.Array) -> jax.Array:
        return x + jax.lax.axis_index("a")

    differing = jax.jit(
        jax.shard_map(
            differ, mesh=devices, in_specs=P(), out_specs=P(), check_vma=False
        ),
        donate_argnums=0,
    )(restored)

    for number, shard in enumerate(differing.addressable_shards):
        assert (np.asarray(shard.data) == 1 + number).all()


KEYS = st.one_of(
    st.text(max_size=8).filter(lambda s: not any("\ud800" <= c < "\ue000" for c in s)),
    st.sampled_from(
        ["a/b", "a.b", "%2F", " ", "..", ".", "", "\n", "é", "\u202e", "c"]
    ),
)
LEAVES = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-(2**80), 2**80),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.binary(max_size=8),
    st.floats(),
    st.booleans(),
    st.builds(np.zeros, st.lists(st.integers(0, 3), max_size=3)),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.integers(-3, 30), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    )


TREES: st.SearchStrategy[Any] = st.recursive(LEAVES, containers, max_leaves=8)
PLAIN: st.SearchStrategy[Any] = TREES | st.recursive(
    LEAVES | st.sampled_from([None, (), [], {}]), containers, max_leaves=8
)
_numbers: Callable[[], int] = iter(range(10**9)).__next__


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tree=TREES)
def test_any_tree_is_restored(client: store.Client, tree: Any) -> None:
    run = client.run(f"tests/tree-{_numbers()}")

    assert_same(tree, there_and_back(run, tree, like=tree))


def shape(tree: Any) -> Any:
    """Describes a tree by its leaves; None counts as a leaf."""
    return jax.tree.map(
        lambda leaf: "None" if leaf is None else type(leaf).__name__,
        tree,
        is_leaf=lambda node: node is None,
    )


@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tree=PLAIN)
def test_any_tree_of_plain_containers_is_restored_without_a_target(
    client: store.Client, tree: Any
) -> None:
    run = client.run(f"tests/tree-{_numbers()}")

    back = there_and_back(run, tree)

    assert shape(tree) == shape(back)
    assert_same(tree, back)


def test_empty_containers_are_restored_if_selected(run: store.Run) -> None:
    tree = {
        "params": {"w": np.ones(2), "bias": None, "none": {}},
        "opt": ((), [None, np.zeros(1)]),
        "empty": {"a": (), "b": []},
        "pair": Pair(1, None),
    }
    run.save(0, tree).result()

    found = {
        select: shape(run.restore(0, select=select))
        for select in ("params/**", "empty/**", "opt/1/1", "**/b")
    }

    assert shape(run.restore(0)) == shape(tree | {"pair": {"first": 1, "second": None}})
    assert found == {
        "params/**": {"params": {"w": "ndarray", "bias": "None", "none": {}}},
        "empty/**": {"empty": {"a": (), "b": []}},
        "opt/1/1": {"opt": ("None", ["None", "ndarray"])},
        "**/b": {"empty": {"b": []}},
    }
    with pytest.raises(store.NotFoundError, match="no leaf of"):
        run.restore(0, select="empty/c")
    assert run.open(0).document == b""


def test_a_document_of_the_caller_is_stored_unchanged(run: store.Run) -> None:
    run.save(0, {"a": (1, None)}, document=b"mine").result()

    assert b"mine" == run.open(0).document
    assert {"a": [1]} == run.restore(0)


@pytest.mark.slow
def test_a_malformed_document_of_containers_is_rejected(run: store.Run) -> None:
    for rows in (
        [["{}", "a", "k"]],
        [["{}", "a/b", "kk"]],
        [["{}", "b/0", "kk"], ["()", "b/1", "ki"]],
        [["set", "c", "k"]],
        [["{}", "c", "kk"]],
        ["{}"],
        {"{}": 1},
        None,
    ):
        document = CONTAINERS + pack_document({"containers": rows})
        run.save(run_step := _numbers(), {"a": 1}, document=document).result()
        with pytest.raises(store.StructureError, match="restore with like="):
            run.restore(run_step)
        assert {"a": 1} == run.restore(run_step, like={"a": 0})


class Moments(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a": [1.0, (2.0, None)], "b": {}, "c": {3: 1}}, ()),
        (
            {"opt": (Moments([1.0], {"x": Moments(1.0, 2.0)}), Moments(1.0, None))},
            ("opt/0: Moments", "opt/0/second/x: Moments", "opt/1: Moments"),
        ),
        (Moments(1.0, 2.0), ("the tree itself: Moments",)),
        ({"by": {1.5: 1.0, 2.5: 2.0}}, ("by: dict",)),
        ([1.0, Nothing()], ("1: Nothing",)),
    ],
    ids=["plain", "named tuples", "root", "keys", "no fields"],
)
def test_a_save_reports_which_containers_need_like(
    client: store.Client, tree: Any, expected: tuple[str, ...]
) -> None:
    run = client.run(f"tests/needs-like-{len(expected)}-{len(str(tree))}")

    for step in (1, 2):  # the second save reuses the plan of the first
        report = run.save(step, tree).report()
        assert sorted(expected) == sorted(report.needs_like)

    saved: Any = jax.tree.structure(tree)
    assert saved == jax.tree.structure(run.restore(2, like=tree))
    assert (not expected) is (saved == jax.tree.structure(run.restore(2)))


@pytest.mark.parametrize(
    "value",
    [
        np.array(["x"], dtype=np.dtypes.StringDType()),
        np.array("x", dtype=np.dtypes.StringDType()),
        np.array(["x"]),
        np.array([b"x"]),
        np.array([None], dtype=object),
        np.zeros(1, dtype=[("a", "f4")]),
        np.zeros(1, dtype="V4"),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.array([1], dtype="m8[s]"),
        np.ones(1, np.longdouble),
        np.ones(1, np.clongdouble),
        np.ma.masked_array([1.0], mask=[True]),
    ],
    ids=lambda value: f"{str(value.dtype)[:20]}-{value.ndim}",
)
def test_a_dtype_that_no_checkpoint_holds_is_named_with_its_leaf(
    run: store.Run, value: Any
) -> None:
    run.save(0, {"m": np.ones(1)}).result()

    for mode in ("host", "device"):
        snapshot: Any = mode
        with pytest.raises(
            store.UnsupportedLeafError, match="leaf 'm': expected an arr"
        ):
            run.save(1, {"m": value}, snapshot=snapshot)
    with pytest.raises(store.MismatchError, match="leaf 'm': "):
        run.restore(0, like={"m": value})
