"""A mismatch says which side is which, and names options that work in the call."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import storesvc_client as store

SAVED: Final = {
    "params": {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)},
    "layers": [np.full(2, i) for i in range(12)],
    "step": 7,
}
PARAMS: Final = SAVED["params"]

CASES: Final[dict[str, tuple[Any, str]]] = {
    "more in the checkpoint": (
        {"params": {"w": np.zeros((8, 4), np.float32)}, "step": 0},
        "only what like= has, pass select=['params/w', 'step']",
    ),
    "more in the target": ({**SAVED, "lr": 0.5}, "what fits, pass missing='keep'"),
    "another dtype": (
        SAVED | {"params": {"w": jnp.zeros((8, 4), "bfloat16"), "b": np.zeros(4)}},
        "what fits, pass cast='like'",
    ),
    "another shape": (
        SAVED | {"params": {"w": np.zeros((8, 8)), "b": np.zeros(4, np.float32)}},
        "what fits, pass select=['layers/**', 'params/b', 'step'], missing='keep'",
    ),
    "all of these": (
        {
            "params": {"w": np.zeros((8, 4), np.float16), "b": np.zeros(5)},
            "layers": SAVED["layers"],
            "lr": 0.5,
        },
        "what fits, pass cast='like', select=['layers/**', 'params/w'], missing='keep'",
    ),
    "integers": (
        {**SAVED, "step": 0.5},
        "what fits, pass select=['layers/**', 'params/**'], missing='keep'",
    ),
    "one part": (
        PARAMS,
        "what is in 'params', pass like={'params': like}, select=['params/**']",
    ),
    "another tree": ({"x": 1}, ""),
    "no values": ({"x": jax.ShapeDtypeStruct((2,), np.float32), "step": 1}, ""),
}


def run_of(run: store.Run, folder: Path) -> Callable[..., Any]:
    return lambda **how: run.restore(0, **how)


def opened(run: store.Run, folder: Path) -> Callable[..., Any]:
    return run.open(0).restore


def mounted(run: store.Run, folder: Path) -> Callable[..., Any]:
    run.export(0, f"orbax:{folder}")
    return store.open_foreign(f"orbax:{folder}").restore


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", [run_of, opened, mounted])
def test_each_advice_works(
    run: store.Run, tmp_path: Path, place: Any, case: str
) -> None:
    run.save(0, SAVED).result()
    restore = place(run, tmp_path / "to")
    like, advice = CASES[case]

    with pytest.raises(store.MismatchError) as caught:
        restore(like=like)
    found = re.search(r"; to restore (.*, pass (.*))$", str(caught.value))

    assert advice == (found[1] if found else "")
    assert "easydel" not in str(caught.value).lower()
    if found:
        how = {"like": like, **eval(f"dict({found[2]})", {"like": like})}
        assert kinds(how["like"]) == kinds(restore(**how))


def kinds(tree: Any) -> list[Any]:
    """Returns the paths and types of the leaves of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(path, getattr(leaf, "dtype", type(leaf))) for path, leaf in leaves]


def test_the_advice_for_rules_works(run: store.Run) -> None:
    run.save(0, {"w": jnp.arange(6.0)}).result()
    how: dict[str, Any] = {"mesh": jax.make_mesh((4, 2), ("a", "b"))}
    how["rules"] = [("", P("a"))]

    with pytest.raises(store.MismatchError) as caught:
        run.restore(0, **how)
    found = re.search(r"; to leave .* whole, pass (.*)$", str(caught.value))

    assert found is not None
    back = run.restore(0, **how, **eval(f"dict({found[1]})"))
    assert 15 == float(back["w"].sum())


def test_a_call_without_options_gets_no_advice_about_them(run: store.Run) -> None:
    run.save(0, SAVED).result()

    with (
        run.loop(every=store.Steps(1)) as loop,
        pytest.raises(store.MismatchError) as caught,
    ):
        loop.restore_or({**SAVED, "lr": 0.5})

    assert str(caught.value).endswith(
        "leaf 'lr': not in the checkpoint, in the target a Python scalar (float64)"
    )


def test_a_long_list_of_patterns_is_no_advice(run: store.Run) -> None:
    saved = {f"a-long-name-of-a-leaf-{i}": np.ones(1) for i in range(100)}
    run.save(0, saved).result()

    with pytest.raises(store.MismatchError) as caught:
        run.restore(0, like=dict(list(saved.items())[::2]))

    assert str(caught.value).endswith("; and 30 more")
