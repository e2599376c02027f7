"""``EasyDeLState.save_state`` and ``load_state``: a directory, or a run of a client."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client.trees.easydel import EasyDeLState

TX = optax.adam(1e-2)


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def state(seed: int = 0, step: int = 4) -> EasyDeLState:
    model = Model(rngs=nnx.Rngs(seed))
    return EasyDeLState.create(step=step, model=model, tx=TX, init_opt_state=True)


def kernel(of: Any) -> Any:
    return of.graphstate["linear"]["kernel"].get_value()


def advanced(before: EasyDeLState) -> EasyDeLState:
    return before.apply_gradients(grads=before.graphstate)


@pytest.mark.slow
def test_a_directory_holds_the_steps_of_a_state(tmp_path: Path) -> None:
    first, second = state(), advanced(state())

    saved = first.save_state(tmp_path / "ckpts")
    second.save_state(tmp_path / "ckpts", labels={"note": "later"})

    assert 4 == saved.step
    back = EasyDeLState.load_state(tmp_path / "ckpts", model=Model, tx=TX)
    assert 5 == back.step
    np.testing.assert_array_equal(kernel(second), kernel(back))


@pytest.mark.slow
def test_a_run_of_a_client_is_named_with_or_without_a_step(run: store.Run) -> None:
    client = store.connect(run._session.connection.address)
    state().save_state(run.name, client=client)
    advanced(state()).save_state(run, metrics={"loss": 1.0})

    with client:
        for name, step in (
            (run.name, 5),
            (f"{run.name}@latest", 5),
            (f"{run.name}@4", 4),
        ):
            back = EasyDeLState.load_state(name, client=client, model=Model, tx=TX)
            assert step == back.step
        with pytest.raises(store.InvalidRequestError, match="at its own step"):
            state().save_state(f"{run.name}@4", client=client)
        with pytest.raises(store.InvalidRequestError, match="such as 'prod/llama@100'"):
            EasyDeLState.load_state(f"{run.name}@best", client=client, model=Model)


def test_parameters_are_saved_in_another_dtype_when_asked(tmp_path: Path) -> None:
    state().save_state(tmp_path, jnp.bfloat16, save_optimizer=False)

    back = EasyDeLState.load_state(tmp_path, model=Model, cast=jnp.bfloat16)

    assert (jnp.bfloat16, None) == (kernel(back).dtype, back.opt_state)


def test_the_optimizer_alone_is_loaded(tmp_path: Path) -> None:
    saved = advanced(state())
    saved.save_state(tmp_path)
    other: Any = state(seed=1)

    loaded: Any = other.load_optimizer(tmp_path)
    fresh: Any = other.replace(opt_state=None).load_optimizer(tmp_path)

    expected: Any = saved
    moment = expected.opt_state[0].mu["linear"]["kernel"].get_value()
    for got in (loaded, fresh):
        np.testing.assert_array_equal(
            moment, got.opt_state[0].mu["linear"]["kernel"].get_value()
        )
        assert 1 == int(got.opt_state[0].count)
        np.testing.assert_array_equal(kernel(other), kernel(got))


def test_an_optimizer_of_another_kind_is_rejected(tmp_path: Path) -> None:
    state().save_state(tmp_path)

    with pytest.raises(
        store.MismatchError, match=r"ScaleByAdamState as saved.*give the state the"
    ):
        state().replace(tx=optax.lion(1e-2), opt_state=None).load_optimizer(tmp_path)
    with pytest.raises(AssertionError, match="expected a state with tx"):
        state().replace(tx=None).load_optimizer(tmp_path)


def test_a_directory_without_a_store_is_not_found_and_stays_as_it_was(
    tmp_path: Path,
) -> None:
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(FileNotFoundError, match="that a state was saved to"):
            EasyDeLState.load_state(missing, model=Model)

    assert [] == list(tmp_path.iterdir())
