"""Real EasyDeL models are exported with the names of Hugging Face."""

import json
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from easydel.infra.base_state import EasyDeLState

import storesvc_client as store
from storesvc_client._restore.mapped import load_rules
from storesvc_client.easydel import save_state
from tests.easydel.scenarios import Scenario
from tests.support.safetensors_files import load_file

MODELS: Final[dict[str, dict[str, Any]]] = {
    "grouped queries": {"num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
}


def hugging_face(state: Any) -> dict[str, Any]:
    """Returns the parameters as transformers names and turns them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.graphstate):
        *above, last = [str(getattr(part, "key", "")) for part in path[:-1]]
        array = np.asarray(leaf)
        name = ".".join([*above, "bias" if last == "bias" else "weight"])
        found[name] = array.T if last == "kernel" else array
    return found


def test_easydel_does_not_compute_with_the_head_of_a_tied_model() -> None:
    """So a table leaves it out, whether it equals the embedding or not."""
    scenario = Scenario(sizes={"num_hidden_layers": 1, **MODELS["tied"]})
    model: Any = scenario.model(scenario.dims)
    words = jnp.arange(8)[None]

    with model.mesh:
        before = model(input_ids=words).logits
        model.lm_head.kernel.value = model.lm_head.kernel.value + 1
        after = model(input_ids=words).logits

    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("kind", MODELS)
def test_a_llama_is_exported_as_hugging_face_names_it(
    kind: str, run: store.Run, tmp_path: Path
) -> None:
    scenario = Scenario(sizes={"num_hidden_layers": 1, **MODELS[kind]})
    state = EasyDeLState.create(
        model=scenario.model(scenario.dims), tx=scenario.tx(), init_opt_state=True
    )
    save_state(run, state, rehearse="off").result()
    state.save_state(tmp_path / "old" / "run-3", step=3)
    other = store.connect("memory://")
    imported = other.run("tests/imported")
    imported.import_from(f"eformer:{tmp_path}/old")
    expected = hugging_face(state)
    if kind == "tied":
        del expected["lm_head.weight"]

    table = "llama-tied-inverse" if kind == "tied" else "llama-inverse"
    rules = json.dumps(dict(load_rules(table).document))
    own = json.loads(rules.replace("graphstate/", "model/").replace("/value", ""))
    own["rules"].append({"from": "tx/{rest*}", "drop": True})

    for at, (source, mapping) in enumerate([(run, table), (imported, own)]):
        source.export("latest", f"safetensors:{tmp_path}/{at}", mapping=mapping)
        found = load_file(tmp_path / str(at) / "model.safetensors")
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(array, found[name])
    other.close()
