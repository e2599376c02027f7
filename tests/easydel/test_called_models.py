"""Models that were called outside of jit keep caches, which are no part of a model."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import easydel as ed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from easydel.infra.base_state import EasyDeLState
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.nnx import restore_into, save
from tests.easydel.digests import digests
from tests.easydel.registry import DIMS, registered
from tests.easydel.scenarios import Scenario
from tests.support.examples import sampled

SCENARIO: Final = Scenario()
IDS: Final = jnp.arange(8).reshape(1, 8)
CACHING: Final = (
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "GPTJForCausalLM", "MptForCausalLM"),
    *("Grok1ForCausalLM", "PixtralVisionModel", "CLIPTextModel", "DbrxForCausalLM"),
)
"""Classes with each kind of cached property: Variables and arrays, in layers and
around them."""


@pytest.fixture
def run() -> Iterator[store.Run]:
    with store.connect("memory://") as client:
        yield client.run("tests/called")


def plain() -> Any:
    return SCENARIO.model(SCENARIO.dims, num_hidden_layers=1)


def logits(model: Any) -> Any:
    with model.mesh:
        return model(input_ids=IDS).logits


def called(model: Any) -> Any:
    logits(model)
    return model


def lora() -> Any:
    return plain().apply_lora_to_layers(4, ".*q_proj.*", rngs=nnx.Rngs(1))


def caches_of(model: Any) -> list[str]:
    """Returns the Variables and arrays that a model keeps of a call."""
    found = []
    for path, node in nnx.iter_graph(model):
        for name in [*vars(node)] if isinstance(node, nnx.Pytree) else ():
            cached = inspect.getattr_static(type(node), str(name), None)
            if isinstance(cached, functools.cached_property):
                value = vars(node)[name]
                if isinstance(value, nnx.Variable | jax.Array):
                    found.append("/".join(map(str, (*path, name))))
    return found


def use_caches(model: Any) -> None:
    """Uses each cached property of a model that its config allows."""
    for _, node in [*nnx.iter_graph(model)]:
        for name in dir(type(node)) if isinstance(node, nnx.Module) else ():
            cached = inspect.getattr_static(type(node), name, None)
            if isinstance(cached, functools.cached_property):
                with suppress(Exception):  # of EasyDeL's own, for other configs
                    getattr(node, name)


def test_a_called_model_comes_back_by_class_factory_and_into_itself(
    run: store.Run,
) -> None:
    model = called(plain())
    assert ["model/frequencies"] == caches_of(model)
    fresh = digests(EasyDeLState.create(model=plain()))
    save_model(run, 1, model, rehearse="strict").result()
    assert not [key for key in run.open().leaves if "frequencies" in key]

    for given in (ed.LlamaForCausalLM, plain, model, plain()):
        back = restore_model(run, model=given, mesh=model.mesh)
        assert fresh == digests(EasyDeLState.create(model=back))
        np.testing.assert_allclose(logits(model), logits(back), atol=1e-6)

    save(run, 2, model).result()
    assert 2 == restore_into(run, model).step
    assert ["model/frequencies"] == caches_of(model)


def test_a_state_of_a_called_model_comes_back_and_trains(run: store.Run) -> None:
    model, tx = called(plain()), optax.adamw(1e-3)
    state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
    save_state(run, state, rehearse="strict").result()
    options: Any = {"tx": tx, "mesh": model.mesh, "state_class": EasyDeLState}

    for given in (ed.LlamaForCausalLM, plain, state):
        back = restore_state(run, model=given, **options)
        saved = digests(state)
        assert ["model/frequencies"] == caches_of(state.model)
        assert digests(back).items() <= saved.items()
        assert 1 == len(saved) - len(digests(back))  # the table
        np.testing.assert_allclose(logits(state.model), logits(back.model), atol=1e-6)


def test_a_checkpoint_of_an_uncalled_model_fits_a_called_one(run: store.Run) -> None:
    save_model(run, 1, plain()).result()

    back = restore_model(run, model=called(plain()))

    assert digests(nnx.state(plain())) == digests(nnx.state(back))


def test_an_adapted_model_is_unwrapped_called_and_saved(run: store.Run) -> None:
    called(adapted := lora())
    model = called(adapted.unwrap_lora_to_layers())
    save_model(run, 1, model, rehearse="strict").result()

    back = restore_model(run, model=ed.LlamaForCausalLM, mesh=model.mesh)

    np.testing.assert_allclose(logits(model), logits(back), atol=1e-6)


def test_a_value_that_was_assigned_or_a_layer_is_no_cache(run: store.Run) -> None:
    class Model(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        @functools.cached_property
        def table(self) -> Any:
            return nnx.Cache(jnp.ones(3))

        @functools.cached_property
        def layer(self) -> Any:
            return nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    model = Model(rngs=nnx.Rngs(0))
    model.table = nnx.Cache(jnp.zeros(3))
    model.layer  # noqa: B018 - creates it
    save = save_model(run, 1, model)
    save.result()

    kept = {"graphother/table/value", "graphstate/layer/kernel/value"}
    assert kept <= run.open().leaves.keys()
    assert save.rehearsal is not None
    assert "layer: expected" in save.rehearsal.result(60).message
    back = restore_model(run, model=model)
    np.testing.assert_array_equal(np.zeros(3), back.table.get_value())


@pytest.mark.parametrize("name", sampled(CACHING, every=8))
def test_every_cache_of_a_class_is_left_out(run: store.Run, name: str) -> None:
    one = registered()[name]
    model = one.model(DIMS)
    fresh = digests(nnx.state(model))
    use_caches(model)
    caches = caches_of(model)
    assert caches
    with model.mesh:
        save_model(run, 1, model, rehearse="strict").result()

    assert len(fresh) == len(run.open().leaves)
    back = restore_model(run, model=one.model_class, mesh=model.mesh)
    assert fresh == digests(nnx.state(back))
    assert [] == caches_of(back)
