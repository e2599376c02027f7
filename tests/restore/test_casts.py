"""``cast=`` has one meaning and one spelling wherever something is cast."""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state
from storesvc_client.nnx import restore_into, save
from tests.support.examples import sampled
from tests.support.stable_ids import stable_id


def module() -> Any:
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


def in_place(run: store.Run, cast: Any, _: Path) -> Any:
    model = module()
    restore_into(run, model, cast=cast)
    return model.kernel[...]


def exported(kind: str) -> Callable[[store.Run, Any, Path], Any]:
    def restore(run: store.Run, cast: Any, folder: Path) -> Any:
        url = f"{kind}:{folder / 'x'}"
        run.export(1, url, cast=cast)
        back = store.open_foreign(url).restore(like=None)
        return back["graphstate"]["kernel"]["value"]

    return restore


def mounted(run: store.Run, cast: Any, folder: Path) -> Any:
    if not (folder / "y").exists():
        run.export(1, f"orbax:{folder / 'y'}")
    back = store.open_foreign(f"orbax:{folder / 'y'}").restore(cast=cast)
    return back["graphstate"]["kernel"]["value"]


ROUTES: Final = MappingProxyType(
    {
        "run": lambda run, cast, _: run.restore(1, cast=cast)["graphstate"]["kernel"][
            "value"
        ],
        "open": lambda run, cast, _: run.open(1).restore(
            like={"graphstate": {"kernel": {"value": jnp.ones((4, 2))}}},
            select="graphstate/kernel/**",
            cast=cast,
        )["graphstate"]["kernel"]["value"],
        "into": in_place,
        "model": lambda run, cast, _: restore_model(run, cast=cast).kernel[...],
        "factory": lambda run, cast, _: restore_model(
            run, model=module, cast=cast
        ).kernel[...],
        "state": lambda run, cast, _: restore_state(
            run, model=module, tx=optax.adam(0.1), cast=cast
        ).graphstate["kernel"][...],
        "containers": lambda run, cast, _: restore_state(run, cast=cast)["graphstate"][
            "kernel"
        ]["value"],
        "orbax": exported("orbax"),
        "foreign": mounted,
    }
)


SPELLINGS: Final = [
    ("bf16", "bfloat16"),
    (jnp.bfloat16, "bfloat16"),
    (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    ("f16", "float16"),
]


@pytest.mark.parametrize(
    ("route", "cast", "name"),
    sampled(((route, *case) for route in ROUTES for case in SPELLINGS), every=5),
    ids=stable_id,
)
def test_each_spelling_of_a_dtype_casts_on_each_route(
    run: store.Run, tmp_path: Path, route: str, cast: Any, name: str
) -> None:
    model = module()
    save(run, 1, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)).result()

    back = ROUTES[route](run, cast, tmp_path)

    expected = np.asarray(model.kernel[...].astype(name))
    assert (name, expected.tobytes()) == (str(back.dtype), np.asarray(back).tobytes())


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_no_floating_dtype_is_rejected_on_each_route(
    run: store.Run, tmp_path: Path, route: str
) -> None:
    model = module()
    save(run, 1, model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)).result()

    for cast in ("int8", "bf17", "Like", object()):
        with pytest.raises(store.InvalidRequestError, match=r"cast=: expected a float"):
            ROUTES[route](run, cast, tmp_path)


def test_a_cast_wins_over_the_dtypes_of_the_target(run: store.Run) -> None:
    mesh = jax.make_mesh((8,), ("x",))
    place = NamedSharding(mesh, P("x"))
    saved = {
        "w": jnp.linspace(0, 1, 8),
        "host": np.linspace(0, 1, 8),
        "half": jnp.ones(2, jnp.float16),
        "count": jnp.asarray(3),
        "key": jax.random.key(1),
        "rate": 0.1,
    }
    run.save(1, saved).result()
    like = saved | {"w": jax.device_put(saved["w"], place)}

    back: Any = run.restore(1, like=like, cast="bfloat16")

    kinds = {name: str(getattr(leaf, "dtype", "float")) for name, leaf in back.items()}
    assert {
        "w": "bfloat16",
        "host": "bfloat16",
        "half": "bfloat16",
        "count": "int32",
        "key": "key<fry>",
        "rate": "float",
    } == kinds
    assert place == back["w"].sharding
    assert isinstance(back["host"], np.ndarray)
    with pytest.raises(store.MismatchError, match="'count'"):
        run.restore(1, like=like | {"count": jnp.ones(())}, cast="bfloat16")


def test_leaves_that_keep_the_values_of_the_target_are_cast_too(run: store.Run) -> None:
    run.save(1, {"a": jnp.ones(2)}).result()
    like: dict[str, Any] = {"a": jnp.ones(2), "b": jnp.ones(2), "c": np.ones(2)}
    like["n"] = jnp.arange(2)

    back = run.restore(1, like=like, cast="f16", missing="keep")

    assert ["float16", "float16", "float16", "int32"] == [
        str(leaf.dtype) for leaf in back.values()
    ]
    with pytest.raises(store.MismatchError, match="leaf 'b': jax would narrow float64"):
        run.restore(1, like={**like, "a": np.ones(2)}, cast="f64", missing="keep")


def test_the_target_decides_with_a_cast_like_it(run: store.Run) -> None:
    run.save(1, {"a": jnp.ones(3), "b": np.ones(3), "n": jnp.arange(2)}).result()
    like = {
        "a": jax.ShapeDtypeStruct((3,), jnp.float16),
        "b": np.zeros(3, np.float32),
        "n": jnp.zeros(2, jnp.int32),
    }

    back: Any = run.restore(1, like=like, cast="like")

    assert ["float16", "float32", "int32"] == [str(x.dtype) for x in back.values()]
    with pytest.raises(store.MismatchError, match=r"cast='like'"):
        run.restore(1, like=like)
    with pytest.raises(store.InvalidRequestError, match=r"cast=: expected a float"):
        run.restore(1, cast="like")  # there is nothing like which it could be


def test_an_unknown_keyword_names_the_function_that_was_called(run: store.Run) -> None:
    model = module()
    save(run, 1, model).result()
    calls: dict[str, Callable[..., Any]] = {
        "restore_into": lambda **x: restore_into(run, model, **x),
        "restore_model": lambda **x: restore_model(run, **x),
        "restore_state": lambda **x: restore_state(run, **x),
        "save": lambda **x: save(run, 2, model, **x),
    }

    for name, call in calls.items():
        for given in ("like", "document", "tree"):
            with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyw"):
                call(**{given: b""})
