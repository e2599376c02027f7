"""Saves and restores do the same in every context of jax that the caller is in."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from tests.support.examples import sampled
from tests.support.leaf_bits import leaf_bytes

Enter = Callable[[], AbstractContextManager[Any]]


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


def flag(name: str, *value: Any) -> Enter:
    def enter() -> AbstractContextManager[Any]:
        if not hasattr(jax, name):
            pytest.skip(f"this jax has no {name}")
        context: AbstractContextManager[Any] = getattr(jax, name)(*value)
        return context

    return enter


FLAGS: Final[list[tuple[Any, ...]]] = [
    ("debug_nans", True),
    ("debug_infs", True),
    ("debug_key_reuse", True),
    ("enable_x64", True),
    ("enable_checks", True),
    ("enable_custom_prng", True),
    ("disable_jit",),
    ("checking_leaks",),
    ("default_matmul_precision", "highest"),
    ("default_prng_impl", "rbg"),
    ("numpy_dtype_promotion", "strict"),
    ("numpy_rank_promotion", "raise"),
    ("threefry_partitionable", False),
    ("thread_guard", True),
    ("no_execution", True),
    ("no_tracing", True),
    ("ensure_compile_time_eval",),
]
CONTEXTS: Final[MappingProxyType[str, Enter]] = MappingProxyType(
    {
        "set_mesh": lambda: jax.set_mesh(mesh()),
        "set_mesh_explicit": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
        "abstract_mesh": lambda: jax.sharding.use_abstract_mesh(mesh().abstract_mesh),
        "default_device": lambda: jax.default_device(jax.devices()[3]),
        "default_platform": lambda: jax.default_device("cpu"),
        "guard_disallow": flag("transfer_guard", "disallow"),
        "guard_explicit": flag("transfer_guard", "disallow_explicit"),
    }
    | {name: flag(name, *value) for name, *value in FLAGS}
)
each_context = pytest.mark.parametrize("name", sampled(CONTEXTS, every=4))


def tree() -> dict[str, Any]:
    """Returns leaves whose copy or move depends on what is around the call."""
    devices = jax.devices()
    part = NamedSharding(Mesh(np.array(devices[:4]), ("y",)), P("y"))
    return {
        "empty": jnp.ones((0, 3)),
        "host": np.ones(3),
        "int4": jax.device_put(jnp.ones(4, jnp.int4), devices[2]),
        "key": jax.random.key(1),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 8), part),
        "nan": jnp.array([np.nan, np.inf]),
        "one": jax.device_put(jnp.ones(3), devices[1]),
        "part": jax.device_put(jnp.arange(8.0), part),
        "rate": 0.5,
    }


def enter(name: str) -> AbstractContextManager[Any]:
    if name == "no_tracing":
        jax.clear_caches()  # what was traced before is permitted
    return CONTEXTS[name]()


def contents(found: Any) -> dict[str, bytes]:
    return {name: leaf_bytes(leaf) for name, leaf in found.items()}


@each_context
def test_each_snapshot_saves_in_each_context(run: store.Run, name: str) -> None:
    saved = tree()
    modes: list[Any] = ["host", "device", "auto", "none"]

    for step, mode in enumerate(modes):
        with enter(name):
            run.save(step, saved, snapshot=mode).result()

    for step in range(len(modes)):
        assert contents(saved) == contents(run.restore(step)), modes[step]


@each_context
def test_each_target_is_restored_in_each_context(run: store.Run, name: str) -> None:
    saved = tree()
    run.save(0, saved).result()
    bare = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if isinstance(leaf, jax.Array)
        else leaf
        for key, leaf in saved.items()
    }
    targets: list[dict[str, Any]] = [
        {},
        {"like": saved},
        {"like": bare},
        {"mesh": mesh(), "rules": [("part|keys", P("a")), ("", P())]},
        {"like": saved | {"more": jnp.ones(8)}, "missing": "keep"},
    ]

    for target in targets:
        with enter(name):
            if name == "no_execution" and "missing" in target:
                continue  # a value that is kept is moved by a computation
            back = run.restore(0, **target)

        back.pop("more", None)
        assert contents(saved) == contents(back), target
        if target.get("like") is saved:
            assert saved["part"].sharding == back["part"].sharding


def test_a_device_snapshot_is_of_the_values_before_a_donation(run: store.Run) -> None:
    array = jnp.arange(200_000.0)
    with jax.set_mesh(mesh()), jax.debug_nans(True):
        save = run.save(0, {"x": array}, snapshot="device")
    jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array)
    save.result()

    assert array.is_deleted()
    np.testing.assert_array_equal(np.arange(200_000.0), run.restore(0)["x"])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_target_on_an_abstract_mesh_is_placed_on_that_of_set_mesh(
    run: store.Run, kind: AxisType
) -> None:
    run.save(0, {"x": jnp.arange(8.0), "n": jnp.ones(())}).result()
    around = mesh(kind)
    abstract = NamedSharding(around.abstract_mesh, P(("a", "b")))
    like = {
        "x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=abstract),
        "n": jax.ShapeDtypeStruct((), jnp.float32),
    }

    with jax.set_mesh(around):
        back = run.restore(0, like=like)
        total = jax.jit(lambda x, n: x.sum() * n)(**back)

    assert 28 == float(total)
    assert NamedSharding(around, P(("a", "b"))) == back["x"].sharding
    assert NamedSharding(around, P()) == back["n"].sharding
    with pytest.raises(store.MismatchError, match=r"'a', 'b': expected .*, got none;"):
        run.restore(0, like=like)
    with (
        jax.set_mesh(jax.make_mesh((8,), ("z",))),
        pytest.raises(store.MismatchError, match="got one of 'z'; restore within jax"),
    ):
        run.restore(0, like=like)
