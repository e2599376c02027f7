"""Rehearsals of restores: an impossible restore is reported at the first save."""

import gc
import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.rehearsal import Rehearser
from tests.support.examples import sampled
from tests.support.leaf_bits import leaf_bits

SECONDS = 60


@pytest.fixture
def client() -> Iterator[store.Client]:
    with store.connect("memory://") as connected:
        yield connected


@pytest.fixture
def run(client: store.Client) -> store.Run:
    return client.run("tests/rehearsal")


class Plain(nnx.Module):
    """A model that its class builds without arguments."""

    def __init__(self, width: int = 3, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, width, rngs=rngs)


class Sized(nnx.Module):
    """A model with an argument that no checkpoint has."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, width, rngs=rngs)


@dataclass
class Config:
    width: int = 4


class Configured(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.linear = nnx.Linear(2, config.width, rngs=rngs)


class Dropping(nnx.Module):
    """A model that draws from one stream and keeps another."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class Drawing(nnx.Module):
    """A model that keeps all streams."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.rngs = rngs


class Moody(nnx.Module):
    """A model that differs each time it is built."""

    built = 0

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        type(self).built += 1
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.name = f"number {self.built}"


def state_of(model: Any, step: int = 1) -> EasyDeLState:
    return EasyDeLState.create(
        step=step, model=model, tx=optax.adam(1e-3), init_opt_state=True
    )


def bits_of(model: nnx.Module) -> Any:
    return leaf_bits(nnx.state(model))


def rehearsed(save: store.Save) -> Any:
    assert save.rehearsal is not None
    return save.rehearsal.result(SECONDS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Plain(rngs=nnx.Rngs(0)),
        lambda: Sized(5, rngs=nnx.Rngs(0)),
        lambda: Configured(Config(5), rngs=nnx.Rngs(0)),
        lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
        lambda: nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))]),
        lambda: Dropping(rngs=nnx.Rngs(params=0, dropout=1)),
        lambda: Dropping(rngs=nnx.Rngs(0)),
        lambda: Drawing(rngs=nnx.Rngs(params=0, dropout=1)),
        lambda: Drawing(rngs=nnx.Rngs(0, noise=2)),
    ],
    ids=[
        "class",
        "factory",
        "config",
        "flax's own",
        "list",
        "two streams, one kept",
        "one stream for all",
        "kept streams",
        "kept streams and a default",
    ],
)
def test_a_restorable_state_is_saved_without_a_warning(
    client: store.Client, run: store.Run, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    with caplog.at_level(logging.WARNING):
        assert rehearsed(save_state(run, state_of(make()))).ok
        assert rehearsed(save_model(client.run("tests/model"), 1, make())).ok
        assert rehearsed(save_state(client.run("tests/s"), state_of(make()))).ok
        strict = save_state(run, state_of(make(), 2), rehearse="strict")
        assert 2 == strict.result().step

    assert [] == caplog.records


class Placed(nnx.Module):
    """A model with partition rules of its own, of which none matches its leaves."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)

    @property
    def mesh(self) -> Any:
        """A mesh of all devices."""
        return jax.make_mesh((jax.device_count(),), ("x",))

    def _get_partition_rules(self, _: Any) -> Any:
        return [("other", jax.sharding.PartitionSpec())]


class Averaged(EasyDeLState):
    """A state with a field of its own."""

    ema: Any = None


def other_after_update(state: EasyDeLState) -> EasyDeLState:
    return state.replace(opt_state=(state.opt_state, jnp.ones(2)))


MODELS: dict[str, tuple[Any, Any]] = {
    "class": (Plain, lambda: Plain(rngs=nnx.Rngs(0))),
    "factory": (lambda: Sized(5, rngs=nnx.Rngs(0)), None),
    "config": (Configured, lambda: Configured(Config(5), rngs=nnx.Rngs(0))),
    "flax's own": (lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)), None),
    "own placement": (Placed, lambda: Placed(rngs=nnx.Rngs(0))),
    "other than its class": (Plain, lambda: Plain(7, rngs=nnx.Rngs(0))),
}
STATES = {
    "state": lambda state: state,
    "average": lambda s: Averaged(**vars(s) | {"ema": s.graphstate}),
    "named tuple": lambda s: Averaged(**vars(s) | {"ema": optax.EmaState(1, 2.0)}),
    "other optimizer state": other_after_update,
}


@pytest.mark.parametrize(("name", "kind"), sampled(product(MODELS, STATES), every=5))
def test_what_a_strict_rehearsal_accepts_is_restored_and_nothing_else(
    client: store.Client, name: str, kind: str
) -> None:
    model, make = MODELS[name]
    state = STATES[kind](state_of((make or model)()))
    run, other = client.run("tests/strict"), client.run("tests/off")
    save_state(other, state, rehearse="off").result()

    def restores() -> bool:
        try:
            restore_state(other, model=model, tx=state.tx, state_class=type(state))
        except (store.MismatchError, store.InvalidRequestError):
            return False
        return True

    try:
        save_state(run, state, rehearse="strict").result()
    except store.MismatchError:
        assert not restores()
    else:
        assert restores()


@pytest.mark.parametrize("cls", [Dropping, Drawing])
def test_a_class_restores_the_streams_that_its_model_kept(
    client: store.Client, cls: Any
) -> None:
    run = client.run("tests/streams")
    model = cls(rngs=nnx.Rngs(params=3, dropout=4))
    model.dropout(jnp.ones(3)) if cls is Dropping else model.rngs.dropout()
    save_model(run, 1, model).result()

    restored = restore_model(run, model=cls)

    assert bits_of(model) == bits_of(restored)


@pytest.mark.parametrize("name", ["_pytree__state", "__class__", "self", "a b", ""])
def test_streams_of_a_foreign_document_replace_nothing(name: str) -> None:
    stream = {"node": "flax.nnx:RngStream", "attributes": [["tag", {"static": name}]]}
    recipe = Recipe(
        versions={},
        model="M",
        config=None,
        arguments={},
        graphdef={"root": {"attributes": [["a", stream], "b", ["tag"]]}},
        variables={},
        opt_state=None,
    )

    kept = {"self"} if name == "self" else set()
    assert {"default"} | kept == set(recipe.rng_streams)
    nnx.Rngs(dict.fromkeys(recipe.rng_streams, 0)).default()


def test_another_size_than_the_class_has_is_warned_of_with_the_call_that_works(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = rehearsed(save_state(run, state_of(Plain(7, rngs=nnx.Rngs(0)))))

    assert not found.ok
    assert "cannot be restored by its class, restore_state(run, model=Plain)" in (
        found.message
    )
    assert "restore_state(run, model=lambda: Plain(rngs=nnx.Rngs(0)))" in found.message
    assert [f"{run.name}: {found.message}"] == [r.getMessage() for r in caplog.records]
    with pytest.raises(store.MismatchError):  # the reported error is the actual one
        restore_state(run, model=Plain, tx=optax.adam(1e-3))
    back = restore_state(
        run, model=lambda: Plain(7, rngs=nnx.Rngs(0)), tx=optax.adam(1e-3)
    )
    assert (2, 7) == back.model.linear.kernel.shape


def test_a_model_that_was_changed_is_restored_by_the_factory_that_changes_it(
    run: store.Run,
) -> None:
    def make() -> Plain:
        model = Plain(rngs=nnx.Rngs(0))
        model.linear = nnx.LoRALinear(2, 3, lora_rank=1, rngs=nnx.Rngs(0))
        return model

    model = make()
    found = rehearsed(save_model(run, 1, model))

    assert found.message.endswith(
        "restore it with restore_model(run, model=lambda: Plain(rngs=nnx.Rngs(0))), "
        "with the arguments and the later changes (adapters, quantization) that it was "
        "made with"
    )
    with pytest.raises(store.MismatchError):
        restore_model(run, model=Plain)
    assert bits_of(model) == bits_of(restore_model(run, model=make))


def test_a_strict_rehearsal_rejects_the_save_and_changes_nothing(
    run: store.Run,
) -> None:
    save_state(run, state_of(Plain(rngs=nnx.Rngs(0))), rehearse="strict").result()
    other = state_of(Plain(7, rngs=nnx.Rngs(0)), 2)

    for _ in range(2):  # the second save is not rehearsed again
        with pytest.raises(store.MismatchError, match="cannot be restored by its"):
            save_state(run, other, rehearse="strict")

    assert [1] == [checkpoint.step for checkpoint in run.checkpoints()]
    assert [] == [*run.uploads.list()]
    save_state(run, other, rehearse="off").result()
    assert [2, 1] == [checkpoint.step for checkpoint in run.checkpoints()]


def test_a_warning_names_the_call_that_still_works(run: store.Run) -> None:
    tx = optax.GradientTransformation(
        lambda params: {"a": jnp.zeros(2)}, optax.sgd(0.1).update
    )
    model = Plain(rngs=nnx.Rngs(0))
    state = EasyDeLState.create(step=1, model=model, tx=tx, opt_state={"b": [1.0]})

    found = rehearsed(save_state(run, state))

    assert not found.ok
    assert "cannot be restored by restore_state(run, model=...)" in found.message
    assert "as dicts and lists, with restore_state(run)" in found.message
    assert {"b": [1.0]} == restore_state(run)["opt_state"]


class Concrete(nnx.Module):
    """A model that needs concrete values, so it cannot be built abstractly."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, int(jnp.ones(()) * 3), rngs=rngs)


def test_a_class_that_needs_values_is_warned_of(run: store.Run) -> None:
    found = rehearsed(save_model(run, 1, Concrete(rngs=nnx.Rngs(0))))

    assert not found.ok
    assert "got code that needs concrete values" in found.message
    made = Concrete(rngs=nnx.Rngs(1))
    assert (2, 3) == restore_model(run, model=made).linear.kernel.shape


class Keeping(nnx.Module):
    """A model that needs a config but does not store it."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, config.width, rngs=rngs)


def test_a_class_that_keeps_no_config_has_a_factory(run: store.Run) -> None:
    assert rehearsed(save_model(run, 1, Keeping(Config(), rngs=nnx.Rngs(0)))).ok


def test_a_structure_is_rehearsed_once(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    Moody.built = 0
    model = Moody(rngs=nnx.Rngs(0))

    with caplog.at_level(logging.WARNING):
        saves = [save_state(run, state_of(model, step)) for step in (1, 2, 3)]
        found = [rehearsed(save) for save in saves]

    assert 2 == Moody.built
    assert [False] * 3 == [each.ok for each in found]
    assert "name: expected 'number 1' as saved, got 'number 2'" in found[0].message
    assert 1 == len(caplog.records)


def test_a_rehearsal_makes_no_array(
    run: store.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    rehearsed_by = Rehearser._rehearse

    def watched(self: Any, *given: Any) -> Any:
        gc.collect()
        before = {id(array) for array in jax.live_arrays()}
        found = rehearsed_by(self, *given)
        made.extend(a.shape for a in jax.live_arrays() if id(a) not in before)
        return found

    monkeypatch.setattr(Rehearser, "_rehearse", watched)
    state = state_of(Plain(rngs=nnx.Rngs(0)))
    save_state(run, state, rehearse="strict").result()

    assert [] == made


def test_a_state_may_be_donated_before_it_is_rehearsed(run: store.Run) -> None:
    state = state_of(Plain(rngs=nnx.Rngs(0)))
    save = save_state(run, state)
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array):
            leaf.delete()

    assert rehearsed(save).ok


def test_an_invalid_argument_is_rejected(run: store.Run) -> None:
    state, wrong = state_of(Plain(rngs=nnx.Rngs(0))), "loudly"
    with pytest.raises(store.InvalidRequestError, match="rehearse="):
        save_state(run, state, rehearse=wrong)  # type: ignore[arg-type]  # that is the test


_ENDS = """
import optax
from flax import nnx
import storesvc_client as store
from storesvc_client.easydel import save_state
from storesvc_client.trees.easydel import EasyDeLState
from tests.trees.test_rehearsal import Plain, state_of
with store.connect("memory://") as client:
    save_state(client.run("tests/run"), state_of(Plain(7, rngs=nnx.Rngs(0)))).result()
"""


@pytest.mark.slow
def test_a_process_that_ends_after_its_save_still_warns() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ENDS],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )

    assert "cannot be restored by its class" in done.stderr


def test_a_state_without_its_optimizer_at_hand_is_rehearsed_without_it(
    run: store.Run,
) -> None:
    state = state_of(Plain(rngs=nnx.Rngs(0))).replace(tx=None)
    assert rehearsed(save_state(run, state)).ok


def test_a_model_is_rehearsed_by_restore_model(run: store.Run) -> None:
    found = rehearsed(save_model(run, 1, Plain(7, rngs=nnx.Rngs(0))))

    assert "restore_model(run, model=Plain)" in found.message
    assert (2, 7) == restore_model(
        run, model=lambda: Plain(7, rngs=nnx.Rngs(0))
    ).linear.kernel.shape
