"""Models that differ from a new model of their class: quantized, adapted, loaded."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import easydel as ed
import jax
import jax.numpy as jnp
import optax
import pytest
from easydel.infra.base_state import EasyDeLState
from easydel.layers.quantization import QuantizationConfig, QuantizationType
from flax import nnx

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from tests.easydel.digests import digests
from tests.easydel.scenarios import Scenario

SCENARIO: Final = Scenario()
PATTERN: Final = ".*(q_proj|v_proj).*"


@pytest.fixture
def run() -> Iterator[store.Run]:
    with store.connect("memory://") as client:
        yield client.run("tests/changed")


def plain(**changes: Any) -> Any:
    return SCENARIO.model(SCENARIO.dims, num_hidden_layers=1, **changes)


def lora() -> Any:
    return plain().apply_lora_to_layers(4, PATTERN, rngs=nnx.Rngs(1))


def quantized(kind: QuantizationType) -> Callable[[], Any]:
    def make() -> Any:
        return plain().quantize(quantization_config=QuantizationConfig(dtype=kind))

    return make


def qlora() -> Any:
    model = quantized(QuantizationType.NF4)()
    return model.apply_lora_to_layers(4, PATTERN, rngs=nnx.Rngs(1))


def of_qat() -> Any:
    config = SCENARIO.config(SCENARIO.dims, num_hidden_layers=1)
    config.quantization_config = QuantizationConfig(
        dtype=QuantizationType.INT8, simulate=True, group_size=32
    )
    return ed.LlamaForCausalLM(
        config=config,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision=None,
        rngs=nnx.Rngs(0),
    )


KINDS: Final = ("mxfp8", "mxfp4", "nvfp8", "nvfp4", "nf4", "affine", "int8")
CHANGED: Final[dict[str, Callable[[], Any]]] = {
    "lora": lora,
    "qlora": qlora,
    **{kind: quantized(QuantizationType(kind)) for kind in KINDS},
}


def tx() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_changed_model_comes_back_from_its_factory_and_from_itself(
    run: store.Run, kind: str
) -> None:
    model = CHANGED[kind]()
    trains = "lora" in kind
    state = EasyDeLState.create(
        model=model, tx=tx() if trains else None, init_opt_state=trains
    )
    save = save_state(run, state)
    save.result()
    options = {"tx": state.tx, "mesh": model.mesh, "state_class": EasyDeLState}

    for given in (CHANGED[kind], state, model):
        back = restore_state(run, model=given, **options)
        assert digests(state) == digests(back)

    assert save.rehearsal is not None
    found = save.rehearsal.result(120)
    assert not found.ok  # its class alone would make another model
    assert "model=lambda: LlamaForCausalLM(config=config" in found.message


@pytest.mark.parametrize("kind", ["nf4", "int8", "qlora"])
def test_a_quantized_model_is_saved_with_rng_values_for_those_that_it_lacks(
    run: store.Run, kind: str
) -> None:
    model = CHANGED[kind]()
    lacking = [x for x in jax.tree.leaves(model.graphother) if _is_abstract(x)]
    assert lacking, "EasyDeL leaves abstract rngs in these layers: that is tested"

    save_model(run, 1, model).result()

    for given in (CHANGED[kind], model):
        back = restore_model(run, model=given, mesh=model.mesh)
        assert digests(model.graphstate) == digests(back.graphstate)
        assert not any(map(_is_abstract, jax.tree.leaves(back.graphother)))


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def test_a_model_for_quantization_aware_training_comes_back_by_class(
    run: store.Run,
) -> None:
    model = of_qat()
    state = EasyDeLState.create(model=model, tx=tx(), init_opt_state=True)
    save_state(run, state, rehearse="strict").result()

    back = restore_state(
        run,
        model=ed.LlamaForCausalLM,
        tx=tx(),
        mesh=model.mesh,
        state_class=EasyDeLState,
    )

    assert digests(state) == digests(back)
    saved, restored = model.config, back.model.config
    assert saved.quantization_config == restored.quantization_config
    assert isinstance(restored.quantization_config.dtype, QuantizationType)


def test_a_model_that_easydel_loaded_comes_back_by_class(
    run: store.Run, tmp_path: Path
) -> None:
    plain().save_pretrained(str(tmp_path))
    model = ed.LlamaForCausalLM.from_pretrained(
        str(tmp_path),
        sharding_axis_dims=SCENARIO.dims,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        config_kwargs={"attn_mechanism": ed.AttentionMechanisms.VANILLA},
    )
    state = EasyDeLState.create(model=model, tx=tx(), init_opt_state=True)
    raw = [
        leaf
        for leaf in jax.tree.leaves(state.graphother)
        if leaf.shape == (2,) and leaf.dtype == jnp.uint32
    ]
    save_state(run, state, rehearse="strict").result()

    for given in (ed.LlamaForCausalLM, state):
        back = restore_state(
            run, model=given, tx=tx(), mesh=model.mesh, state_class=EasyDeLState
        )
        assert digests(state) == digests(back)
    assert raw, "EasyDeL leaves raw keys there: that is what is tested"


def test_a_cast_gives_the_module_its_param_dtype(run: store.Run) -> None:
    save_state(run, EasyDeLState.create(model=plain())).result()

    back = restore_model(run, model=ed.LlamaForCausalLM, cast="bfloat16")

    assert jnp.bfloat16 == back.param_dtype
    assert {jnp.dtype("bfloat16")} == {
        leaf.dtype for leaf in jax.tree.leaves(back.graphstate)
    }


EXECUTION: Final[dict[str, Any]] = {
    "attn_mechanism": ed.AttentionMechanisms.SDPA,
    "blocksize_k": 128,
    "decode_attn_mechanism": ed.AttentionMechanisms.VANILLA,
    "easy_method": "serve",
    "gradient_checkpointing": ed.EasyDeLGradientCheckPointers.NOTHING_SAVEABLE,
    "lmhead_chunksize": 8,
    "platform": "triton",
    "precompute_masks": False,
    "use_scan_mlp": True,
    "use_sharding_constraint": True,
}
NUMBERS: Final[dict[str, Any]] = {
    "attn_softmax_dtype": jnp.bfloat16,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-3,
    "rope_theta": 9.0,
}


def with_setting(name: str, value: Any) -> Any:
    config = SCENARIO.config(SCENARIO.dims, num_hidden_layers=1)
    setattr(config, name, value)
    return ed.LlamaForCausalLM(
        config=config,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        precision=None,
        rngs=nnx.Rngs(0),
    )


def test_how_a_model_is_computed_is_logged_and_what_is_computed_rejected(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    save_state(run, EasyDeLState.create(model=plain())).result()

    for name, value in EXECUTION.items():
        caplog.clear()
        with caplog.at_level("INFO", "storesvc_client"):
            restore_model(run, model=partial(with_setting, name, value))
        text = "\n".join(r.getMessage() for r in caplog.records if name in r.message)
        assert (
            f"computed in another way than when it was saved: {name}: expected" in text
        )
    for name, value in NUMBERS.items():
        with pytest.raises(store.MismatchError, match=name):
            restore_model(run, model=partial(with_setting, name, value))


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 80}, {"num_hidden_layers": 2}],
    ids=["larger vocabulary", "more layers"],
)
def test_the_options_that_a_message_names_start_another_model_warm(
    run: store.Run, changes: dict[str, int]
) -> None:
    state = EasyDeLState.create(model=plain(), tx=tx(), init_opt_state=True)
    state = state.replace(
        opt_state=jax.tree.map(lambda x: x + 1, state.opt_state), step=7
    )
    save_state(run, state).result()

    def other() -> Any:
        return SCENARIO.model(SCENARIO.dims, **{"num_hidden_layers": 1} | changes)

    given: Any = {"model": other, "tx": optax.adamw(optax.linear_schedule(1e-3, 0, 9))}
    given |= {"mesh": state.model.mesh, "state_class": EasyDeLState}
    with pytest.raises(store.MismatchError) as caught:
        restore_state(run, **given)
    named = re.search(r", or add (.*), to restore what fits$", str(caught.value))
    assert named, str(caught.value)
    back = restore_state(run, **given, **eval(f"dict({named[1]})"))

    before, after = digests(state), digests(back)
    same = {key for key in before if before[key] == after.get(key)}
    assert {".step", ".opt_state[0].count"} <= same
    for part in (".graphstate", ".opt_state[0].mu", ".opt_state[0].nu"):
        assert any(key.startswith(f"{part}['model']['layers'][0]") for key in same)
    fresh = EasyDeLState.create(model=other(), tx=given["tx"], init_opt_state=True)
    assert digests(fresh).keys() == after.keys()
