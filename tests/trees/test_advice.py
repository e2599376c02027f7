"""Each call that a message about a state, a model or an optimizer advises works."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.nnx import restore_into, save
from storesvc_client.trees.easydel import EasyDeLState
from tests.trees.test_rehearsal import Concrete, Sized

TX: Final = optax.adamw(1e-3)


class Settings:
    """A config."""

    def __init__(self, width: int = 3) -> None:
        self.width = width


class Other(Settings):
    """A config of another model."""


class Configured(nnx.Module):
    """A model of the same structure with a config, which it may keep."""

    def __init__(self, config: Settings, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, config.width, rngs=rngs)
        self.config = config


class Unlike(nnx.Module):
    """A model that takes another config."""

    def __init__(self, config: "Unrelated", *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, config.width, rngs=rngs)


class Unrelated:
    """A config that is no ``Settings``."""

    width = 3


class Paired(EasyDeLState):
    """A state with a field whose containers no document has."""

    pair: Any = None


class Made(Paired):
    """A state that creates the field itself."""

    @classmethod
    def create(cls, **options: Any) -> Any:
        return super().create(**options).replace(pair=optax.TraceState(jnp.zeros(2)))


def make() -> Sized:
    return Sized(3, rngs=nnx.Rngs(0))


def state_of(model: Any = None, tx: Any = TX, cls: Any = EasyDeLState) -> Any:
    return cls.create(
        step=1, model=model or make(), tx=tx, init_opt_state=tx is not None
    )


def save_paired(run: store.Run) -> Any:
    pair = optax.TraceState(jnp.ones(2))
    return save_state(run, state_of(cls=Paired).replace(pair=pair))


def save_pytree(run: store.Run) -> Any:
    model = make()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return run.save(1, nnx.state((model, optimizer)))


def restore_pytree(run: store.Run) -> Any:
    model = make()
    return restore_into(run, model, nnx.Optimizer(model, TX, wrt=nnx.Param))


def restore_in_context(run: store.Run) -> Any:
    with jax.set_mesh(jax.make_mesh((2,), ("a",))):
        return run.restore(like=ABSTRACT)


ABSTRACT: Final = {
    "w": jax.ShapeDtypeStruct(
        (2,),
        jnp.float32,
        sharding=jax.NamedSharding(jax.sharding.AbstractMesh((2,), ("a",)), jax.P("a")),
    )
}
OUTSIDE: Final = nnx.Rngs(0)
SAVED: Final = state_of()
Call = Callable[[store.Run], Any]
CASES: Final[dict[str, tuple[Call, Call, str, Sequence[Call]]]] = {
    # the save; a call that is refused, its advice; what this says
    "no optimizer is given": (
        lambda run: save_state(run, SAVED),
        lambda run: restore_state(run, model=make),
        "give tx=, the optimizer, or opt_state='skip'",
        [
            lambda run: restore_state(run, model=make, tx=TX),
            lambda run: restore_state(run, model=make, opt_state="skip"),
        ],
    ),
    "no optimizer was saved": (
        lambda run: save_state(run, state_of(tx=None)),
        lambda run: restore_state(run, model=make, tx=TX),
        "leave it out, or give missing='init' to initialise its state",
        [
            lambda run: restore_state(run, model=make),
            lambda run: restore_state(run, model=make, tx=TX, missing="init"),
        ],
    ),
    "an optimizer to initialise": (
        lambda run: save_state(run, SAVED),
        lambda run: restore_state(run, model=make, opt_state="init"),
        "give the optimizer",
        [lambda run: restore_state(run, model=make, tx=TX, opt_state="init")],
    ),
    "a factory of an optimizer": (
        lambda run: save_state(run, SAVED),
        lambda run: restore_state(run, model=make, tx=optax.adamw),
        r"call it: optax.adam\(1e-3\)",
        [lambda run: restore_state(run, model=make, tx=optax.adamw(1e-3))],
    ),
    "an optimizer without a model": (
        lambda run: save_state(run, SAVED),
        lambda run: restore_state(run, tx=TX),
        "give model=, because without it a state is restored as dicts and lists",
        [
            lambda run: restore_state(run, model=make, tx=TX),
            lambda run: restore_state(run)["graphstate"],
        ],
    ),
    "values of a factory": (
        lambda run: save_state(run, SAVED),
        lambda run: restore_state(run, model=make, tx=TX, missing="keep"),
        "give missing='init'",
        [lambda run: restore_state(run, model=make, tx=TX, missing="init")],
    ),
    "a class with arguments": (
        lambda run: save_model(run, 1, make()),
        lambda run: restore_model(run, model=Sized),
        r"give a factory, model=lambda: Sized\(width=width, rngs=nnx.Rngs\(0\)\)",
        [
            lambda run: restore_model(
                run, model=lambda width=3: Sized(width=width, rngs=nnx.Rngs(0))
            )
        ],
    ),
    "rngs of the caller": (
        lambda run: save_model(run, 1, make()),
        lambda run: restore_model(run, model=lambda: Sized(3, rngs=OUTSIDE)),
        "create the rngs and the layers inside the factory",
        [lambda run: restore_model(run, model=make)],
    ),
    "concrete values": (
        lambda run: save_model(run, 1, Concrete(rngs=nnx.Rngs(0))),
        lambda run: restore_model(run, model=Concrete),
        "or give a module instance",
        [lambda run: restore_model(run, model=Concrete(rngs=nnx.Rngs(0)))],
    ),
    "no code": (
        lambda run: save_model(run, 1, make()),
        restore_model,
        r"pass it in allow=; or give the model's code in model=: .* or a factory",
        [
            lambda run: restore_model(run, allow=[Sized]),
            lambda run: restore_model(run, model=make),
        ],
    ),
    "no structure": (
        lambda run: run.save(1, {"graphstate": SAVED.graphstate}),
        restore_model,
        "give model=$",
        [lambda run: restore_model(run, model=make)],
    ),
    "another config": (
        lambda run: save_model(run, 1, Configured(Settings(), rngs=nnx.Rngs(0))),
        lambda run: restore_model(run, model=Unlike),
        "give the class that was saved, or a factory",
        [
            lambda run: restore_model(run, model=Configured),
            lambda run: restore_model(
                run, model=lambda: Configured(config=Settings(), rngs=nnx.Rngs(0))
            ),
        ],
    ),
    "a config that was not saved": (
        lambda run: save_model(run, 1, make()),
        lambda run: restore_model(run, model=Configured, on_mismatch="log"),
        r"give a factory, model=lambda: Configured\(config=config, rngs=nnx.Rngs\(0\)",
        [
            lambda run: restore_model(
                run,
                model=lambda: Configured(config=Settings(), rngs=nnx.Rngs(0)),
                on_mismatch="log",
            )
        ],
    ),
    "a field with containers": (
        save_paired,
        lambda run: restore_state(run, model=make, tx=TX, state_class=Paired),
        "give model= a state of Paired with it, or create the field in Paired.create",
        [
            lambda run: restore_state(
                run,
                model=state_of(cls=Paired).replace(pair=optax.TraceState(jnp.ones(2))),
                tx=TX,
            ),
            lambda run: restore_state(run, model=make, tx=TX, state_class=Made),
        ],
    ),
    "nnx.state of both": (
        save_pytree,
        lambda run: restore_state(run, model=make, tx=TX),
        r"restore it with storesvc_client.nnx.restore_into\(run, model, optimizer\)",
        [restore_pytree],
    ),
    "a state as a dict": (
        lambda run: save_state(run, SAVED),
        lambda run: save_state(run, {"a": 1}),
        "save a module with save_model, any other tree with run.save",
        [
            lambda run: save_model(run, 2, make()).result(),
            lambda run: run.save(3, {"a": 1}).result(),
        ],
    ),
    "an optimizer of another kind": (
        lambda run: save_state(run, SAVED),
        lambda run: save(run, 2, make(), TX.init({"w": jnp.ones(2)})),
        "save the state of another optimizer with run.save",
        [lambda run: run.save(2, TX.init({"w": jnp.ones(2)})).result()],
    ),
    "the optimizer of another module": (
        lambda run: save_state(run, SAVED),
        lambda run: save(
            run,
            2,
            make(),
            nnx.Optimizer(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), TX, wrt=nnx.Param),
        ),
        "create it from the module that is given",
        [
            lambda run: save(
                run, 2, model := make(), nnx.Optimizer(model, TX, wrt=nnx.Param)
            ).result()
        ],
    ),
    "two ways to the code": (
        lambda run: save_model(run, 1, make()),
        lambda run: restore_model(run, model=make, allow=[Sized]),
        "allow= is for restoring without code",
        [lambda run: restore_model(run, allow=[Sized])],
    ),
    "values of no tree": (
        lambda run: run.save(1, {"w": np.ones(2)}),
        lambda run: run.restore(missing="keep"),
        "pass like= with values for the leaves that the checkpoint lacks",
        [
            lambda run: run.restore(
                like={"w": np.zeros(2), "b": np.zeros(2)}, missing="keep"
            )
        ],
    ),
    "a mesh without rules": (
        lambda run: run.save(1, {"w": jnp.ones(2)}),
        lambda run: run.restore(rules=[("", jax.P())]),
        r"rules=\[\('', PartitionSpec\(\)\)\] replicates every leaf, rules='recorded'",
        [
            lambda run: run.restore(
                mesh=jax.make_mesh((2,), ("a",)), rules=[("", jax.P())]
            ),
            lambda run: run.restore(mesh=jax.make_mesh((2,), ("a",)), rules="recorded"),
        ],
    ),
    "no rule for a leaf": (
        lambda run: run.save(1, {"w": jnp.ones(2)}),
        lambda run: run.restore(
            mesh=jax.make_mesh((2,), ("a",)), rules=[("kernel", jax.P("a"))]
        ),
        r"end the rules with \('', PartitionSpec\(\)\)",
        [
            lambda run: run.restore(
                mesh=jax.make_mesh((2,), ("a",)),
                rules=[("kernel", jax.P("a")), ("", jax.P())],
            )
        ],
    ),
    "keys of two types": (
        lambda run: run.save(1, {"w": jnp.ones(2)}),
        lambda run: run.save(2, {1: jnp.ones(2), "w": jnp.ones(2)}),
        "use keys of one type, such as texts",
        [lambda run: run.save(2, {"1": jnp.ones(2), "w": jnp.ones(2)}).result()],
    ),
    "an abstract mesh": (
        lambda run: run.save(1, {"w": jnp.ones(2)}),
        lambda run: run.restore(like=ABSTRACT),
        r"restore within jax.set_mesh\(mesh\), or give mesh= and rules=",
        [
            restore_in_context,
            lambda run: run.restore(
                like=ABSTRACT,
                mesh=jax.make_mesh((2,), ("a",)),
                rules=[("", jax.P("a"))],
            ),
        ],
    ),
    "an item for all": (
        lambda run: run.save(1, {"w": jnp.ones(2)}, items={"seed": 3}),
        lambda run: run.open(1).items.per_process("seed"),
        r"use items\['seed'\]",
        [lambda run: run.open(1).items["seed"]],
    ),
    "abstract arrays": (
        lambda run: run.save(1, {"w": jnp.ones(2)}),
        lambda run: run.save(2, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}),
        "save arrays",
        [lambda run: run.save(2, {"w": jnp.ones(2)}).result()],
    ),
}


@pytest.fixture
def run() -> Iterator[store.Run]:
    with store.connect("memory://") as client:
        yield client.run("tests/advice")


@pytest.mark.parametrize("name", CASES)
def test_what_a_message_advises_works(run: store.Run, name: str) -> None:
    prepare, refused, advice, calls = CASES[name]
    prepare(run).result()

    with pytest.raises(store.StoreError, match=advice):
        refused(run)
    found = [call(run) for call in calls]

    assert None not in found


def test_a_state_without_an_optimizer_gets_one_as_the_message_says(
    run: store.Run,
) -> None:
    state = state_of(tx=None)
    with pytest.raises(AssertionError, match="see init_tx"):
        state.apply_gradients(grads=state.graphstate)

    begun = state.init_tx(TX)

    assert 2 == int(begun.apply_gradients(grads=begun.graphstate).step)
