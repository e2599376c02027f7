"""EasyDeL's own states: saved by one process, rebuilt by another, on any mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from easydel.infra.base_state import EasyDeLState
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

import storesvc_client as store
from storesvc_client.easydel import restore_state
from tests.easydel.digests import digest, digests
from tests.easydel.saving import Original, run_of
from tests.easydel.scenarios import SCENARIOS, Scenario, stepper
from tests.support.examples import sampled

each_scenario = pytest.mark.parametrize("name", sampled(SCENARIOS, every=3))
one_scenario = pytest.mark.parametrize("name", ["bfloat16"])


@pytest.fixture
def run(client: store.Client, name: str) -> store.Run:
    """The run of the scenario's checkpoint."""
    return run_of(client, name)


def restored(run: store.Run, scenario: Scenario, **changes: Any) -> Any:
    """Returns the state of EasyDeL's class, on the mesh that it was saved from."""
    model = scenario.model_class  # its config comes from the checkpoint
    if scenario.lora is not None:
        model = partial(scenario.model, scenario.dims)
    arguments = {
        "model": model,
        "tx": scenario.tx(),
        "mesh": scenario.config(scenario.dims).mesh,
        "state_class": EasyDeLState,
    }
    return restore_state(run, **(arguments | changes))


def with_leaves_of(other: Any, state: Any) -> Any:
    """Returns the state with the values of another one, and its own shardings."""
    values = {keystr(path): leaf for path, leaf in tree_leaves_with_path(other)}

    def value(path: Any, leaf: Any) -> Any:
        return jax.device_put(values[keystr(path)], leaf.sharding)

    return tree_map_with_path(value, state)


@each_scenario
def test_a_state_comes_back_as_easydels_own_and_goes_on_as_the_original_did(
    run: store.Run, scenario: Scenario, original: Original
) -> None:
    back = restored(run, scenario)

    assert EasyDeLState is type(back)
    assert original.leaves == digests(back)
    after, logits = stepper(back)(back)
    assert original.logits == digest(logits)
    assert original.next_leaves == digests(after)


@each_scenario
def test_a_state_on_another_mesh_is_what_easydel_would_have_put_there(
    run: store.Run, scenario: Scenario, original: Original
) -> None:
    dims = scenario.other_dims

    back = restored(
        run,
        scenario,
        model=partial(scenario.model, dims),
        mesh=scenario.config(dims).mesh,
    )

    assert EasyDeLState is type(back)
    assert original.leaves == digests(back)
    fresh = scenario.state(dims, seed=7)
    expected = {keystr(p): leaf for p, leaf in tree_leaves_with_path(fresh)}
    assert [] == [
        f"{key}: expected {expected[key].sharding}, got {leaf.sharding}"
        for path, leaf in tree_leaves_with_path(back)
        if not leaf.sharding.is_equivalent_to(
            expected[key := keystr(path)].sharding, leaf.ndim
        )
    ]
    fresh = with_leaves_of(back, fresh)
    expected_after, expected_logits = stepper(fresh)(fresh)
    after, logits = stepper(back)(back)
    assert digest(expected_logits) == digest(logits)
    assert digests(expected_after) == digests(after)


@one_scenario
def test_a_model_that_is_given_as_a_class_is_built_for_the_mesh_of_the_restore(
    run: store.Run, scenario: Scenario, original: Original
) -> None:
    mesh = scenario.config(scenario.other_dims).mesh

    back = restored(run, scenario, mesh=mesh)

    assert original.leaves == digests(back)
    assert mesh == back.model.mesh


@one_scenario
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers: expected 2 as saved, got 3"),
        ({"vocab_size": 512}, "vocab_size: expected 256 as saved, got 512"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps: expected 1e-06 as saved, got 0.001"),
        (
            {"param_dtype": jnp.float32},
            r"checkpoint \(64, 256\) bfloat16, .*cast='like'",
        ),
    ],
    ids=["layers", "vocabulary", "epsilon", "dtype"],
)
def test_another_model_is_rejected(
    run: store.Run,
    scenario: Scenario,
    original: Original,
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(store.MismatchError, match=message):
        restored(run, scenario, model=partial(scenario.model, scenario.dims, **changes))


@one_scenario
def test_another_optimizer_is_rejected_with_its_leaves(
    run: store.Run, scenario: Scenario, original: Original
) -> None:
    with pytest.raises(
        store.MismatchError,
        match="opt_state/0: expected ScaleByAdamState as saved, got TraceState",
    ):
        restored(run, scenario, tx=optax.sgd(1e-2, momentum=0.9))


@one_scenario
def test_a_state_with_moments_is_rejected_without_the_optimizer(
    run: store.Run, scenario: Scenario, original: Original
) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected tx=, got None"):
        restored(run, scenario, tx=None)
