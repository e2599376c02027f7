"""EasyDeL's models implement the protocols of this client."""

from typing import Any

import pytest

from storesvc_client.trees import protocols
from storesvc_client.trees.nnx import graphs
from tests.easydel.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def model() -> Any:
    """A model with parameters on a mesh."""
    scenario = SCENARIOS["optimizer-without-state"]
    return scenario.model(scenario.dims).shard_model()


def test_a_model_of_easydel_is_a_base_module(model: Any) -> None:
    assert isinstance(model, protocols.BaseModuleProtocol)


def test_a_model_of_easydel_may_get_adapters(model: Any) -> None:
    assert isinstance(model, protocols.HasLora)


def test_a_model_of_easydel_splits_as_it_does_itself(model: Any) -> None:
    graphdef, graphstate, graphother = graphs.split_module(model)

    assert model.graphdef == graphdef
    assert model.graphstate == graphstate
    assert model.graphother == graphother


def test_the_mesh_and_the_rules_of_a_model_of_easydel_are_found(model: Any) -> None:
    assert model.mesh == graphs.mesh_of(model)
    assert model._get_partition_rules(None) == graphs.partition_rules_of(model)
