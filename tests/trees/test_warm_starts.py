"""Restores into another model or optimizer: each message names a call that works."""

import copy
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client._pytree.leaves import named_leaves
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.nnx import restore_into, save
from storesvc_client.trees.easydel import EasyDeLState
from tests.support.examples import sampled


class Model(nnx.Module):
    """A model with a vocabulary and layers."""

    def __init__(self, vocabulary: int, depth: int, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, 2, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(depth)])


class Averaged(EasyDeLState):
    """A state with a field of its own."""

    ema: Any = None


@dataclass
class Base:
    """Like the configs of transformers, whose classes add attributes to its fields."""

    kind: str = "settings"

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))


class Settings(Base):
    """A config whose ``log`` may be an object of the process."""

    def __init__(self, log: Any = None) -> None:
        super().__init__()
        self.width, self.log = 2, log


class Configured(nnx.Module):
    """A model that is made of its config."""

    def __init__(self, config: Settings, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.fc = nnx.Linear(config.width, config.width, rngs=rngs)


def maker(vocabulary: int = 8, depth: int = 2) -> Callable[[], Model]:
    return lambda: Model(vocabulary, depth, rngs=nnx.Rngs(1))


def scheduled(rate: Any = None) -> Any:
    return optax.adamw(rate or optax.cosine_decay_schedule(1e-3, 100))


ADAMW: Final = optax.adamw(1e-3)
CLIPPED: Final = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
SAME: Final = maker()
CASES: Final[dict[str, tuple[Any, Any, Any, Any, set[str]]]] = {
    # saved model and optimizer, given ones, and the options that the message names
    "constant to schedule": (
        *(SAME, ADAMW, SAME, scheduled()),
        {"on_mismatch", "missing"},
    ),
    "schedule to constant": (
        *(SAME, scheduled(), SAME, ADAMW),
        {"on_mismatch", "select"},
    ),
    "adamw to adafactor": (SAME, ADAMW, SAME, optax.adafactor(1e-3), {"opt_state"}),
    "adamw to lion": (SAME, ADAMW, SAME, optax.lion(1e-3), {"opt_state"}),
    "adamw to sgd": (SAME, ADAMW, SAME, optax.sgd(1e-3), {"opt_state"}),
    "sgd to adamw": (SAME, optax.sgd(1e-3), SAME, ADAMW, {"opt_state"}),
    "clipped": (SAME, ADAMW, SAME, CLIPPED, {"opt_state"}),
    "larger vocabulary": (
        *(SAME, ADAMW, maker(16), ADAMW),
        {"on_mismatch", "select", "missing"},
    ),
    "smaller vocabulary": (
        *(SAME, ADAMW, maker(4), ADAMW),
        {"on_mismatch", "select", "missing"},
    ),
    "more layers": (SAME, ADAMW, maker(8, 3), ADAMW, {"on_mismatch", "missing"}),
    "fewer layers": (SAME, ADAMW, maker(8, 1), ADAMW, {"on_mismatch", "select"}),
    "other model and optimizer": (
        *(SAME, ADAMW, maker(16, 1), optax.adafactor(1e-3)),
        {"opt_state", "on_mismatch", "select", "missing"},
    ),
    "no optimizer was saved": (
        SAME,
        None,
        maker(8, 3),
        None,
        {"on_mismatch", "missing"},
    ),
}


@pytest.fixture
def run() -> Iterator[store.Run]:
    with store.connect("memory://") as client:
        yield client.run("tests/warm")


def state_of(make: Any, tx: Any, cls: Any = EasyDeLState, fill: float = 0.25) -> Any:
    """Returns a state of which each array is filled with a number."""
    made = cls.create(step=7, model=make(), tx=tx, init_opt_state=tx is not None)
    return jax.tree.map(
        lambda x: jnp.full_like(x, fill) if getattr(x, "ndim", 0) else x, made
    )


def advice(error: store.MismatchError) -> dict[str, Any]:
    """Returns the options that a message says to add."""
    options = re.search(r", or add (\w+=.*), to restore what fits$", str(error))
    assert options, str(error)
    found: dict[str, Any] = eval(f"dict({options[1]})")
    return found


def find_advice(restore: Callable[..., Any], *place: Any, **how: Any) -> dict[str, Any]:
    """Returns the options that a rejected restore says to add."""
    with pytest.raises(store.MismatchError) as caught:
        restore(*place, **how)
    assert "like=" not in str(caught.value)
    return advice(caught.value)


def leaves(tree: Any) -> dict[str, Any]:
    return {leaf.key: leaf.value for leaf in named_leaves(tree)[0]}


def check_warm(saved: Any, initial: Any, back: Any, options: dict[str, Any]) -> None:
    """Compares each leaf with the saved one if it fits, else with the initial one."""
    before, fresh, found = leaves(saved), leaves(initial), leaves(back)
    assert fresh.keys() == found.keys()
    for key, value in found.items():
        fits = key in before and jnp.shape(before[key]) == jnp.shape(value)
        is_initial = key.startswith("opt_state") and "opt_state" in options
        expected = before[key] if fits and not is_initial else fresh[key]
        np.testing.assert_allclose(expected, value, 1e-5, err_msg=key)


@pytest.mark.parametrize("name", sampled(CASES, every=4))
def test_the_call_that_a_message_names_restores_what_fits(
    run: store.Run, name: str
) -> None:
    make, tx, other, new_tx, names = CASES[name]
    saved = state_of(make, tx)
    save_state(run, saved).result()
    initial = EasyDeLState.create(
        model=other(), tx=new_tx, init_opt_state=new_tx is not None
    )

    options = find_advice(restore_state, run, model=other, tx=new_tx)
    back = restore_state(run, model=other, tx=new_tx, **options)

    assert names == set(options)
    check_warm(saved, initial, back, options)


@pytest.mark.parametrize(
    "name", sampled(["more layers", "constant to schedule", "clipped"], every=3)
)
def test_a_given_state_keeps_what_the_checkpoint_lacks(
    run: store.Run, name: str
) -> None:
    make, tx, other, new_tx, _ = CASES[name]
    saved = state_of(make, tx)
    save_state(run, saved).result()
    given = state_of(other, new_tx, fill=0.5)

    options = find_advice(restore_state, run, model=given, tx=new_tx)
    back = restore_state(run, model=given, tx=new_tx, **options)

    assert "init" != options.get("missing")
    if "opt_state" in options:  # the optimizer begins again
        given = given.replace(opt_state=new_tx.init(given.graphstate))
    check_warm(saved, given, back, options)


@pytest.mark.parametrize(
    "name", sampled(["larger vocabulary", "more layers", "fewer layers"], every=3)
)
def test_models_and_modules_in_place_have_the_same_options(
    run: store.Run, name: str
) -> None:
    make, tx, other, _, _ = CASES[name]
    saved = state_of(make, tx)
    save_state(run, saved).result()

    options = find_advice(restore_model, run, model=other)
    module = restore_model(run, model=other, **options)
    target = nnx.state(other())
    expected = nnx.split_state(target, nnx.Param, ...)[0]
    fresh = {"graphstate": expected}
    check_warm(saved, fresh, {"graphstate": nnx.state(module, nnx.Param)}, options)

    model = other()
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    options = find_advice(restore_into, run, model, optimizer)
    assert 7 == restore_into(run, model, optimizer, **options).step
    check_warm(saved, fresh, {"graphstate": nnx.state(model, nnx.Param)}, options)
    assert 7 == int(optimizer.step[...])


def test_an_optimizer_in_place_is_initialised_or_left_as_it_is(run: store.Run) -> None:
    model = SAME()
    save(run, 1, model, nnx.Optimizer(model, ADAMW, wrt=nnx.Param)).result()
    optimizer = nnx.Optimizer(model, optax.lion(1e-3), wrt=nnx.Param)
    optimizer.step.set_value(jnp.uint32(5))

    assert {"opt_state": "init"} == find_advice(restore_into, run, model, optimizer)
    restore_into(run, model, optimizer, opt_state="skip")
    assert 5 == int(optimizer.step[...])
    restore_into(run, model, optimizer, opt_state="init")
    assert 0 == int(optimizer.step[...])


def test_a_class_without_a_saved_field_is_told_which_leaves_to_select(
    run: store.Run,
) -> None:
    saved = state_of(SAME, ADAMW, Averaged).replace(ema=jnp.ones(2))
    save_state(run, saved).result()

    how: Any = {"model": SAME, "tx": ADAMW, "state_class": EasyDeLState}
    options = find_advice(restore_state, run, **how)
    back = restore_state(run, **how, **options)

    assert {"select": ["graphstate/**", "opt_state/**", "step"]} == options
    check_warm(saved, state_of(SAME, ADAMW), back, options)


def test_a_field_that_a_checkpoint_lacks_is_kept(run: store.Run) -> None:
    saved = state_of(SAME, ADAMW)
    save_state(run, saved).result()
    given = state_of(SAME, ADAMW, Averaged, fill=0.5).replace(ema=jnp.ones(2))

    assert {"missing": "keep"} == find_advice(restore_state, run, model=given, tx=ADAMW)
    back = restore_state(run, model=given, tx=ADAMW, missing="keep")

    np.testing.assert_array_equal(jnp.ones(2), back.ema)
    check_warm(saved, given, back, {})


def test_another_model_altogether_is_read_without_one_as_the_message_says(
    run: store.Run,
) -> None:
    save_state(run, state_of(SAME, ADAMW)).result()

    with pytest.raises(store.MismatchError, match=r"lists with run.restore\(\)$"):
        restore_state(run, model=lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tx=ADAMW)

    assert {"graphstate", "opt_state", "step"} == set(run.restore())


@pytest.mark.parametrize("kind", ["file", "lock", "thread", "socket"])
def test_a_config_with_an_object_of_its_process_is_refused_by_the_field(
    run: store.Run, tmp_path: Path, kind: str
) -> None:
    with ExitStack() as stack:

        def make_log() -> Any:
            match kind:
                case "file":
                    return stack.enter_context((tmp_path / "log").open("w"))
                case "lock":
                    return threading.Lock()
                case "thread":
                    return threading.Thread(target=print)
                case _:
                    return stack.enter_context(socket.socket())

        def make() -> Configured:
            return Configured(Settings(make_log()), rngs=nnx.Rngs(1))

        saved = make()
        save = save_model(run, 1, saved)
        save.result()
        assert save.rehearsal is not None
        assert "model=lambda: Configured(config=" in save.rehearsal.result(60).message
        with pytest.raises(store.MismatchError) as caught:
            restore_model(run, model=Configured)
        options = advice(caught.value)
        by_class = restore_model(run, model=Configured, **options)
        by_factory = restore_model(run, model=make)

    assert re.search(
        r": log: expected described [\w.]+( \(.*\))? as saved, got nothing; "
        r"config/log: expected described [\w.]+ as saved, got nothing; give the model",
        str(caught.value),
    )
    assert {"on_mismatch": "log"} == options
    assert {"kind": "settings", "width": 2} == vars(by_class.config)
    for back in (by_class, by_factory):
        np.testing.assert_array_equal(saved.fc.kernel[...], back.fc.kernel[...])


def test_what_is_not_restored_is_logged(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    save_state(run, state_of(SAME, ADAMW)).result()

    with caplog.at_level(logging.INFO, "storesvc_client"):
        restore_state(run, model=SAME, tx=ADAMW, missing="init", select="graphstate/**")

    lines = [r.getMessage() for r in caplog.records if "are initialised" in r.message]
    assert 1 == len(lines)
    assert "lacks 12 leaves of the model" in lines[0]
    assert "opt_state/0/count" in lines[0]


def test_options_that_mean_nothing_are_rejected(run: store.Run) -> None:
    save_state(run, state_of(SAME, ADAMW)).result()

    with pytest.raises(store.InvalidRequestError, match="expected tx= with opt_state"):
        restore_state(run, model=SAME, opt_state="init")
    with pytest.raises(store.InvalidRequestError, match="give missing='init'"):
        restore_state(run, model=SAME, tx=ADAMW, missing="keep")
    with pytest.raises(store.NotFoundError, match=r"nearest: .*graphstate/layers/0"):
        restore_state(run, model=SAME, tx=ADAMW, select="graphstat/layers/**")
    with pytest.raises(store.InvalidRequestError, match="missing= 'error' or 'init'"):
        restore_state(run, model=SAME, missing="zero")  # type: ignore[arg-type]  # no such choice


def test_without_a_model_only_the_selected_leaves_are_returned(run: store.Run) -> None:
    save_state(run, state_of(SAME, ADAMW)).result()

    back = restore_state(run, select=["step", "graphstate/layers/1/**"])

    assert {
        "graphstate/layers/1/bias/value",
        "graphstate/layers/1/kernel/value",
        "step",
    } == {*leaves(back)}
