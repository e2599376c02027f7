"""Fields that the class of a state adds: averages, loss scales, counters, settings."""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx, struct
from flax.training.dynamic_scale import DynamicScale

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.trees.easydel import EasyDeLState


class Ema(EasyDeLState):
    """A state with an average of the parameters and a setting."""

    ema: Any = None
    note: str = struct.field(pytree_node=False, default="none")


class Scaled(EasyDeLState):
    """A state whose class creates its field."""

    ema: Any = None

    @classmethod
    def create(cls, **parts: Any) -> Self:
        """Returns a state with a loss scale."""
        made: Self = super().create(**parts).replace(ema=DynamicScale())
        return made


class Pair(NamedTuple):
    first: Any
    second: Any


def make_model() -> nnx.Module:
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def ema_of(state: EasyDeLState) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float16) * 0.5, state.graphstate)


TX: Final = optax.adam(1e-3)
PLAIN: Final[dict[str, Callable[[EasyDeLState], Any]]] = {
    "average of the parameters": ema_of,
    "second optimizer state": lambda state: state.opt_state,
    "array": lambda _: jnp.arange(3.0),
    "number": lambda _: 0.5,
    "dicts and lists": lambda _: {"a": [jnp.ones(2), {"b": jnp.zeros(())}]},
    "nothing": lambda _: None,
}
OTHER: Final[dict[str, Callable[[EasyDeLState], Any]]] = {
    "loss scale": lambda _: DynamicScale(),
    "named tuple": lambda _: Pair(jnp.ones(2), jnp.zeros(2)),
    "tuple": lambda _: (jnp.ones(2), jnp.zeros(2)),
}


@pytest.fixture
def run() -> Iterator[store.Run]:
    with store.connect("memory://") as client:
        yield client.run("tests/fields")


def state_with(make: Callable[[EasyDeLState], Any], cls: Any = Ema) -> Any:
    made = cls.create(model=make_model(), tx=TX, init_opt_state=True, step=3)
    return made.replace(ema=make(made))


def check_equal(expected: Any, actual: Any) -> None:
    assert type(expected) is type(actual)
    assert str(jax.tree.structure(expected.ema)) == str(jax.tree.structure(actual.ema))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        assert jnp.array_equal(a, b)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_field_of_plain_containers_or_like_a_part_comes_back_by_every_route(
    run: store.Run, kind: str
) -> None:
    state = state_with(PLAIN[kind])
    save_state(run, state, rehearse="strict").result()

    for given in ({"model": make_model, "state_class": Ema}, {"model": state}):
        check_equal(state, restore_state(run, tx=TX, **given))


@pytest.mark.parametrize("kind", OTHER)
def test_a_field_of_other_containers_needs_a_state_as_the_message_says(
    run: store.Run, kind: str
) -> None:
    state = state_with(OTHER[kind])
    with pytest.raises(store.MismatchError, match=r"restore_state\(run, model=state"):
        save_state(run, state, rehearse="strict")
    save_state(run, state, rehearse="off").result()

    with pytest.raises(store.MismatchError, match="give model= a state of Ema with it"):
        restore_state(run, model=make_model, tx=TX, state_class=Ema)
    check_equal(state, restore_state(run, model=state, tx=TX))


def test_a_field_that_the_class_creates_comes_back_by_class(run: store.Run) -> None:
    scale = DynamicScale(scale=jnp.float32(512.0))
    state = state_with(lambda _: scale, Scaled)
    save_state(run, state, rehearse="strict").result()

    back = restore_state(run, model=make_model, tx=TX, state_class=Scaled)

    check_equal(state, back)


def test_a_field_with_other_containers_than_saved_is_rejected(run: store.Run) -> None:
    save_state(run, state_with(OTHER["tuple"]), rehearse="off").result()

    with pytest.raises(store.MismatchError, match="ema: expected tuple as saved, got"):
        restore_state(run, model=state_with(lambda _: [jnp.ones(2)] * 2), tx=TX)


def test_a_given_state_lends_its_class_and_its_settings(run: store.Run) -> None:
    state = state_with(ema_of).replace(note="mine")
    save_state(run, state).result()

    assert "mine" == restore_state(run, model=state, tx=TX).note
    made = restore_state(run, model=make_model, tx=TX, state_class=Ema)
    assert "none" == made.note
