"""An EasyDeLState in a store: saved on one mesh, rebuilt on another."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import storesvc_client as store
import storesvc_client.nnx
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.blueprints import shardings_by_key
from tests.support.leaf_bits import leaf_bits

RULES = [("(fc1|mu|nu).*kernel", P("a", "b")), ("", P())]


class Model(nnx.Module):
    """Layers, dropout with its own stream, and statistics."""

    def __init__(
        self, width: int, depth: int, epsilon: float, dtype: Any, *, rngs: nnx.Rngs
    ) -> None:
        self.fc1 = nnx.Linear(4, width, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, epsilon=epsilon, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List(
            [nnx.Linear(width, width, rngs=rngs) for _ in range(depth)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the output, of shape (batch, width)."""
        x = self.dropout(self.norm(self.fc1(x)))
        for layer in self.layers:
            x = layer(x)
        return x


def make_model(
    width: int = 8, depth: int = 12, epsilon: float = 1e-5, dtype: Any = jnp.float32
) -> Model:
    return Model(width, depth, epsilon, dtype, rngs=nnx.Rngs(params=0, dropout=1))


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
BATCH = jnp.linspace(-1, 1, 16 * 4).reshape(16, 4)


def advance(state: EasyDeLState) -> EasyDeLState:
    def loss(graphstate: Any) -> tuple[jax.Array, Any]:
        model = state.merge(graphstate)
        value = jnp.mean(model(BATCH) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    grads, graphother = jax.grad(loss, has_aux=True)(state.graphstate)
    return state.apply_gradients(grads=grads).replace(graphother=graphother)


@pytest.fixture(scope="module")
def state() -> EasyDeLState:
    """Returns a state that was trained for two steps."""
    made = EasyDeLState.create(
        step=jnp.zeros((), jnp.int32), model=make_model(), tx=TX, init_opt_state=True
    )
    return advance(advance(made))


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


@pytest.fixture
def saved(run: store.Run, state: EasyDeLState) -> store.Run:
    """Returns a run with a checkpoint of the state."""
    save_state(run, state).result()
    return run


@pytest.mark.slow
def test_a_state_is_rebuilt_bit_by_bit_and_goes_on_alike(
    run: store.Run, state: EasyDeLState
) -> None:
    saved = save_state(run, state, metrics={"loss": 1.5}).result()
    assert (2, {"loss": 1.5}) == (saved.step, saved.metrics)

    back = restore_state(run, model=make_model, tx=TX)

    assert leaf_bits(state) == leaf_bits(back)
    assert leaf_bits(advance(state)) == leaf_bits(advance(back))
    assert len(back.model.layers) == 12


@pytest.mark.slow
def test_a_state_is_saved_and_restored_as_any_other_tree_is(
    run: store.Run, state: EasyDeLState
) -> None:
    saving: list[store.Progress] = []
    restoring: list[store.Progress] = []
    save_state(run, state, labels={"a": "b"}).result()
    later = advance(state)

    saved = save_state(run, later, base=None, snapshot="none", progress=saving.append)
    assert saved.done()
    report = saved.report()
    back = restore_state(run, model=make_model, tx=TX, progress=restoring.append)

    assert leaf_bits(later) == leaf_bits(back)
    assert report.sent_bytes == report.total_bytes == saving[-1].done_bytes
    assert restoring[-1].is_done
    with pytest.raises(store.InvalidRequestError, match="snapshot="):
        save_state(run, state, snapshot="nowhere")  # type: ignore[arg-type]  # no such choice


def test_a_state_is_rebuilt_on_a_mesh(
    saved: store.Run, state: EasyDeLState, mesh: Mesh
) -> None:
    back = restore_state(saved, 2, model=make_model, tx=TX, mesh=mesh, rules=RULES)

    assert leaf_bits(state) == leaf_bits(back)
    placed: Any = back
    kernel = placed.graphstate["fc1"]["kernel"].get_value()
    assert (mesh, P("a", "b")) == (kernel.sharding.mesh, kernel.sharding.spec)
    moment = placed.opt_state[1][0].mu["fc1"]["kernel"].get_value()
    assert P("a", "b") == moment.sharding.spec


@pytest.mark.slow
def test_only_rng_values_that_a_checkpoint_lacks_are_recreated(
    run: store.Run, state: EasyDeLState
) -> None:
    without, _ = nnx.split_state(state.graphother, nnx.Not(nnx.RngState), ...)
    save_state(run, state.replace(graphother=without)).result()

    back = restore_state(run, model=make_model, tx=TX)

    expected, actual = leaf_bits(state), leaf_bits(back)
    assert set(expected) == set(actual)
    fresh = {key for key in expected if "rngs" in key}
    assert fresh
    assert {k: v for k, v in expected.items() if k not in fresh} == {
        k: v for k, v in actual.items() if k not in fresh
    }
    assert {expected[k][0] for k in fresh} == {actual[k][0] for k in fresh}
    advance(back)


SAVES: dict[str, Callable[[store.Run, Any], store.Save]] = {
    "save_model": lambda run, model: save_model(run, 1, model),
    "save_state": lambda run, model: save_state(run, EasyDeLState.create(model=model)),
    "nnx.save": lambda run, model: storesvc_client.nnx.save(run, 1, model),
}


@pytest.mark.parametrize("route", SAVES)
def test_rng_values_that_a_module_lacks_are_recreated_when_it_is_saved(
    route: str, run: store.Run
) -> None:
    model = make_model()
    stream = model.dropout.rngs
    known = jax.random.key_data(stream.key.get_value())
    for variable in (stream.count, stream.key):
        value = variable.get_value()
        variable.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype))

    SAVES[route](run, model).result()

    back = restore_model(run, model=make_model).dropout.rngs
    assert 0 == back.count.get_value()
    assert known.shape == jax.random.key_data(back.key.get_value()).shape
    assert isinstance(stream.key.get_raw_value(), jax.ShapeDtypeStruct)


def test_a_step_that_was_a_python_number_is_restored_as_one(run: store.Run) -> None:
    made = EasyDeLState.create(step=7, model=make_model(), tx=TX, init_opt_state=True)
    save_state(run, made).result()

    back = restore_state(run, model=make_model, tx=TX)

    assert 7 == back.step


@pytest.mark.slow
def test_another_model_is_rejected_by_what_differs(saved: store.Run) -> None:
    with pytest.raises(
        store.MismatchError, match="fc1/out_features: expected 8 as saved, got"
    ):
        restore_state(saved, model=lambda: make_model(width=16), tx=TX)
    with pytest.raises(
        store.MismatchError, match=r"layers/11: expected flax\.nnx\.Linear as"
    ):
        restore_state(saved, model=lambda: make_model(depth=11), tx=TX)
    with pytest.raises(
        store.MismatchError, match="norm/epsilon: expected 1e-05 as saved"
    ):
        restore_state(saved, model=lambda: make_model(epsilon=1e-3), tx=TX)


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        (
            optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-2)),
            "opt_state/1/0: expected ScaleByAdamState as saved, got ScaleByLionState",
        ),
        (
            optax.chain(optax.adamw(1e-2), optax.clip_by_global_norm(1.0)),
            "opt_state/0: expected EmptyState as saved, got tuple",
        ),
    ],
    ids=["lion", "order"],
)
def test_another_optimizer_is_rejected_by_its_containers(
    saved: store.Run, tx: Any, match: str
) -> None:
    with pytest.raises(store.MismatchError, match=match):
        restore_state(saved, model=make_model, tx=tx)


def test_a_missing_optimizer_is_asked_for(saved: store.Run) -> None:
    with pytest.raises(store.InvalidRequestError, match="expected tx=, got None"):
        restore_state(saved, model=make_model)


@pytest.mark.slow
def test_a_stateless_optimizer_is_restored(run: store.Run) -> None:
    made = EasyDeLState.create(
        model=make_model(), tx=optax.sgd(0.1), init_opt_state=True
    )
    save_state(run, made).result()

    back = restore_state(run, model=make_model, tx=optax.sgd(0.1))

    assert optax.sgd(0.1).init(made.graphstate) == back.opt_state
    with pytest.raises(store.InvalidRequestError, match="expected tx=, got None"):
        restore_state(run, model=make_model)
    with pytest.raises(store.MismatchError, match="got TraceState"):
        restore_state(run, model=make_model, tx=optax.sgd(0.1, momentum=0.9))


def test_parameters_are_restored_without_the_optimizer(
    saved: store.Run, state: EasyDeLState
) -> None:
    back = restore_state(saved, model=make_model, opt_state="skip")

    assert back.opt_state is None
    assert leaf_bits(state.replace(opt_state=None)) == leaf_bits(back)


def test_parameters_are_restored_in_another_dtype(
    run: store.Run, state: EasyDeLState
) -> None:
    save_state(run, state).result()

    back: Any = restore_state(run, model=make_model, tx=TX, cast=jnp.bfloat16)

    kernel = back.graphstate["fc1"]["kernel"].get_value()
    moment = back.opt_state[1][0].mu["fc1"]["kernel"].get_value()
    mean = back.graphother["norm"]["mean"].get_value()
    assert (jnp.bfloat16, jnp.bfloat16) == (kernel.dtype, moment.dtype)
    assert jnp.float32 == mean.dtype
    saved: Any = state
    kept = saved.graphstate["fc1"]["kernel"].get_value().astype(jnp.bfloat16)
    assert np.asarray(kept).tobytes() == np.asarray(kernel).tobytes()


def test_another_dtype_without_a_cast_is_rejected_with_the_cast_that_works(
    saved: store.Run,
) -> None:
    with pytest.raises(
        store.MismatchError,
        match=r"leaf 'graphstate/fc1/bias/value': in the checkpoint \(8,\) float32, in "
        r"the target \(8,\) bfloat16.*add cast='like', to restore what fits$",
    ):
        restore_state(saved, model=lambda: make_model(dtype=jnp.bfloat16), tx=TX)
    back: Any = restore_state(
        saved, model=lambda: make_model(dtype=jnp.bfloat16), tx=TX, cast="like"
    )
    assert jnp.bfloat16 == back.graphstate["fc1"]["bias"].get_value().dtype


def test_a_difference_may_be_reported_instead(
    saved: store.Run, state: EasyDeLState, caplog: pytest.LogCaptureFixture
) -> None:
    back = restore_state(
        saved, model=lambda: make_model(epsilon=1e-3), tx=TX, on_mismatch="log"
    )

    assert leaf_bits(state) == leaf_bits(back)
    assert 1e-3 == back.model.norm.epsilon
    assert "norm/epsilon: expected 1e-05 as saved, got 0.001" in caplog.text


@pytest.mark.slow
def test_a_model_may_be_a_class_a_factory_a_module_or_a_state(
    saved: store.Run, state: EasyDeLState, mesh: Mesh
) -> None:
    abstract = nnx.eval_shape(make_model)
    spread = state.shard_state(RULES, mesh)

    by_module = restore_state(saved, model=abstract, tx=TX)
    by_state = restore_state(saved, model=spread, tx=TX, opt_state="skip")

    assert leaf_bits(state) == leaf_bits(by_module)
    assert shardings_by_key(spread.graphstate) == shardings_by_key(by_state.graphstate)
    made = EasyDeLState.create(step=9, model=Plain(rngs=nnx.Rngs(3)))
    save_state(saved, made).result()
    assert leaf_bits(made) == leaf_bits(restore_state(saved, model=Plain))
    with pytest.raises(store.InvalidRequestError, match="expected model= a module"):
        restore_state(saved, model="Plain")
    with pytest.raises(store.InvalidRequestError, match="needs width, depth, epsilon"):
        restore_state(saved, model=Model)


class Plain(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)


@dataclass
class Config:
    width: int = 4
    axes: tuple[str, ...] = ("a", "b")

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Config":
        return cls(**fields)


class Configured(nnx.Module):
    config_class = Config

    def __init__(
        self, config: Config, param_dtype: Any = jnp.float32, *, rngs: nnx.Rngs
    ) -> None:
        self.config, self.param_dtype = config, param_dtype
        self.linear = nnx.Linear(2, config.width, param_dtype=param_dtype, rngs=rngs)


def configured(param_dtype: Any = jnp.float32) -> Configured:
    return Configured(Config(), param_dtype, rngs=nnx.Rngs(0))


CAST: dict[str, dict[str, Any]] = {
    "class": {"model": Configured},
    "factory of the dtype": {"model": lambda: configured(jnp.bfloat16)},
    "factory, moments": {"model": configured, "cast": "like"},
    "factory, float32": {"model": configured, "cast": "float32"},
}


@pytest.mark.parametrize("route", CAST)
def test_parameters_that_a_save_cast_come_back_as_written_and_moments_keep_theirs(
    route: str, run: store.Run
) -> None:
    state = EasyDeLState.create(model=configured(), tx=TX, init_opt_state=True)
    state.save_state(run, jnp.bfloat16)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.graphstate)
    if "cast" in CAST[route]:
        cast = jax.tree.map(lambda x: x.astype(jnp.float32), cast)

    back = EasyDeLState.load_state(run, tx=TX, **CAST[route])

    assert leaf_bits(state.replace(graphstate=cast)) == leaf_bits(back)
    assert leaf_bits(state.opt_state) == leaf_bits(back.opt_state)


def test_a_class_is_built_of_the_config_and_dtypes_that_were_saved(
    run: store.Run,
) -> None:
    model = Configured(Config(width=5), jnp.bfloat16, rngs=nnx.Rngs(0))
    made = EasyDeLState.create(model=model)
    save_state(run, made).result()

    back = restore_state(run, model=Configured)

    assert leaf_bits(made) == leaf_bits(back)
    assert Config(width=5) == back.model.config
    other = Configured(Config(width=5, axes=("a",)), jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(
        store.MismatchError, match=r"axes\[1\]: expected 'b' as saved, got no"
    ):
        restore_state(run, model=other)


class Adapted(nnx.Module):
    """The layers of ``Model``, each with an adapter next to its parameters."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.LoRALinear(2, 3, lora_rank=2, rngs=rngs)

    @property
    def parts(self) -> Any:
        return nnx.split(self, nnx.LoRAParam, ...)

    @property
    def graphdef(self) -> Any:
        return self.parts[0]

    @property
    def graphstate(self) -> Any:
        return self.parts[1]

    @property
    def graphother(self) -> Any:
        return self.parts[2]


def test_adapters_that_were_added_are_initialised_when_asked(run: store.Run) -> None:
    base: Any = EasyDeLState.create(model=Plain(rngs=nnx.Rngs(3)))
    save_state(run, base).result()

    with pytest.raises(
        store.MismatchError, match=r"the module itself: expected .*Plain"
    ):
        restore_state(run, model=Adapted, missing="init")
    with pytest.raises(
        store.MismatchError, match=r"lora_a/value': not in the checkpoint, in the targ"
    ):
        restore_state(run, model=Adapted, on_mismatch="log")
    back = restore_state(run, model=Adapted, missing="init", on_mismatch="log")

    fresh: Any = Adapted(rngs=nnx.Rngs(0))
    assert {"lora_a", "lora_b"} == set(back.graphstate["linear"]["lora"])
    np.testing.assert_array_equal(
        fresh.linear.lora.lora_a[...], back.model.linear.lora.lora_a[...]
    )
    np.testing.assert_array_equal(
        base.graphstate["linear"]["kernel"][...], back.model.linear.kernel[...]
    )


class Owner:
    """Another library's state class: any class with a ``create``."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    @classmethod
    def create(cls, **fields: Any) -> "Owner":
        return cls(**fields)


def test_another_class_is_built_by_its_create(
    saved: store.Run, state: EasyDeLState
) -> None:
    back = restore_state(saved, model=make_model, tx=TX, state_class=Owner)

    assert isinstance(back, Owner)
    assert leaf_bits(state) == leaf_bits(EasyDeLState.create(**back.fields))


@pytest.mark.parametrize("option", ["missing", "on_mismatch", "opt_state"])
def test_invalid_options_are_rejected(run: store.Run, option: str) -> None:
    save_model(run, 0, Plain(rngs=nnx.Rngs(0))).result()

    with pytest.raises(store.InvalidRequestError, match=f"expected {option}= "):
        restore_state(run, model=Plain, **{option: "yes"})  # type: ignore[arg-type]


def test_recreated_rng_values_are_replicated_on_the_mesh(
    run: store.Run, state: EasyDeLState, mesh: Mesh
) -> None:
    without, _ = nnx.split_state(state.graphother, nnx.Not(nnx.RngState), ...)
    save_state(run, state.replace(graphother=without)).result()

    back: Any = restore_state(run, model=make_model, tx=TX, mesh=mesh, rules=RULES)

    key = back.graphother["dropout"]["rngs"]["key"].get_value()
    assert set(mesh.devices.flat) == key.devices()
    assert key.is_fully_replicated


def test_a_state_without_a_recipe_is_restored_by_its_leaves(
    run: store.Run, state: EasyDeLState
) -> None:
    run.save(2, state).result()

    assert leaf_bits(state) == leaf_bits(restore_state(run, model=make_model, tx=TX))


@pytest.mark.parametrize(
    "document",
    [
        b"no zlib",
        zlib.compress(b"[1"),
        zlib.compress(b"[" * 10**6),
        zlib.compress(b"{}"),
        zlib.compress(b'{"format": "storesvc.recipe/2"}'),
        zlib.compress(b"7"),
        zlib.compress(b'{"format": "storesvc.recipe/1"}')[:-3],
    ],
    ids=["plain", "cut", "deep", "empty", "newer", "number", "torn"],
)
def test_a_document_that_is_not_a_recipe_is_rejected(
    run: store.Run, state: EasyDeLState, document: bytes
) -> None:
    run.save(2, state, document=document).result()

    with pytest.raises(store.StoreError, match="structure of the checkpoint: expected"):
        restore_state(run, model=make_model, tx=TX)


def test_an_unknown_step_is_not_found(saved: store.Run) -> None:
    with pytest.raises(store.NotFoundError, match="nearest"):
        restore_state(saved, 5, model=make_model, tx=TX)


@pytest.mark.slow
def test_a_state_is_placed_and_trained_like_a_given_one(
    run: store.Run, state: EasyDeLState, mesh: Mesh
) -> None:
    spread = state.shard_state([("fc1.*kernel", P("a", "b")), ("", P())], mesh)
    save_state(run, spread).result()
    abstract = jax.eval_shape(lambda: spread).shard_with_shape(spread.shardings)

    for model in (spread, abstract, spread.replace(opt_state=None)):
        back = restore_state(run, model=model, tx=TX)

        assert shardings_by_key(spread) == shardings_by_key(back)
        assert leaf_bits(jax.jit(advance)(spread)) == leaf_bits(jax.jit(advance)(back))


class Odd(nnx.Module):
    """A module with host values in Variables, and a bare array."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)
        self.bare = jnp.arange(3.0)
        self.number: Any = nnx.Variable(3)
        self.ratio: Any = nnx.Variable(0.25)
        self.wide: Any = nnx.Variable(np.arange(2, dtype=np.int64))
        self.nothing: Any = nnx.Variable(None)


def test_host_values_are_restored_unchanged(run: store.Run) -> None:
    made = EasyDeLState.create(model=Odd(rngs=nnx.Rngs(3)), step=2)
    save_state(run, made).result()

    for model in (Odd, lambda: Odd(rngs=nnx.Rngs(0)), Odd(rngs=nnx.Rngs(0))):
        back: Any = restore_state(run, model=model)

        assert leaf_bits(made) == leaf_bits(back)
        number, wide = (
            back.graphother[name].get_value() for name in ("number", "wide")
        )
        assert (int, np.ndarray) == (type(number), type(wide))
        assert [0.0, 1.0, 2.0] == back.model.bare.tolist()


@pytest.mark.parametrize("step", [np.int64(5), np.asarray(5), 5, jnp.asarray(5)])
def test_a_step_of_any_integer_kind_is_restored(run: store.Run, step: Any) -> None:
    made = EasyDeLState.create(model=Plain(rngs=nnx.Rngs(0)), step=step)
    save_state(run, made).result()

    back = restore_state(run, model=Plain)

    assert 5 == back.step
    assert type(step) is type(back.step)


@pytest.mark.parametrize("step", [2.7, True, None, np.zeros(2), jnp.asarray(2.7)])
def test_a_step_that_is_not_an_integer_is_rejected(run: store.Run, step: Any) -> None:
    made = EasyDeLState.create(model=Plain(rngs=nnx.Rngs(0))).replace(step=step)

    with pytest.raises(store.InvalidRequestError, match="expected an integer in the"):
        save_state(run, made)


def test_a_state_inside_jit_is_rejected_with_the_way_out(run: store.Run) -> None:
    made = EasyDeLState.create(model=Plain(rngs=nnx.Rngs(0)))

    with pytest.raises(
        store.InvalidRequestError,
        match=r"step of the state, got a tracer.* outside jit",
    ):
        jax.jit(lambda state: (save_state(run, state), state)[1])(made)


def test_a_mesh_that_is_none_is_rejected_with_one_that_works(run: store.Run) -> None:
    save_state(run, EasyDeLState.create(model=configured())).result()

    for wrong in ((1, 1), "fsdp", jax.devices()[0]):
        with pytest.raises(
            store.InvalidRequestError, match=r"a jax.sharding.Mesh, such as jax.make_me"
        ):
            restore_state(run, model=Configured, mesh=wrong)  # type: ignore[arg-type]


def test_loading_as_easydel_does_is_rejected_with_the_argument(run: store.Run) -> None:
    save_state(run, EasyDeLState.create(model=configured())).result()

    with pytest.raises(store.InvalidRequestError, match=r"expected model= .*class of"):
        EasyDeLState.load_state(run)
    assert EasyDeLState.load_state(run, model=Configured).step == 0


class Hooked(nnx.Module):
    def __init__(self) -> None:
        self.doubled = nnx.Param(jnp.ones(2), on_get_value=lambda _, x: x * 2)


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_a_hook_of_a_variable_changes_nothing_that_is_kept(run: store.Run) -> None:
    save_model(run, 0, Hooked()).result()

    back = restore_state(run, 0, model=Hooked, missing="init")

    assert [2.0, 2.0] == back.model.doubled.get_value().tolist()
    assert [1.0, 1.0] == back.model.doubled.get_raw_value().tolist()


@pytest.mark.slow
def test_scalars_of_an_optimizer_keep_their_dtype_in_a_cast(run: store.Run) -> None:
    tx = optax.inject_hyperparams(optax.adam)(1e-3, b2=0.999)
    made = EasyDeLState.create(model=make_model(), tx=tx, init_opt_state=True)
    save_state(run, made).result()

    back: Any = restore_state(run, model=make_model, tx=tx, cast=jnp.bfloat16)

    assert jnp.float32 == back.opt_state.hyperparams["b2"].dtype
    assert np.float32(0.999) == float(back.opt_state.hyperparams["b2"])
    moment = back.opt_state.inner_state[0].mu["fc1"]["kernel"].get_value()
    assert jnp.bfloat16 == moment.dtype


@pytest.mark.slow
def test_an_optimizer_is_initialised_if_none_was_saved(run: store.Run) -> None:
    made = EasyDeLState.create(step=1, model=make_model())
    save_state(run, made).result()

    with pytest.raises(store.InvalidRequestError, match="holds no state of an opt"):
        restore_state(run, model=make_model, tx=TX)
    begun = restore_state(run, model=make_model, tx=TX, missing="init")
    skipped = restore_state(
        run, model=make_model, tx=TX, missing="init", opt_state="skip"
    )

    assert leaf_bits(made.init_tx(TX)) == leaf_bits(begun)
    assert skipped.opt_state is None


def test_a_corrupt_document_does_not_block_a_restore_with_code(
    run: store.Run, state: EasyDeLState, caplog: pytest.LogCaptureFixture
) -> None:
    run.save(2, state, document=b"garbage").result()

    back = restore_state(run, model=make_model, tx=TX, on_mismatch="log")

    assert leaf_bits(state) == leaf_bits(back)
    assert "its model is not compared" in caplog.text


class Boastful(nnx.Module):
    """A module whose config cannot be read."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(2, 3, rngs=rngs)

    @property
    def config(self) -> Any:
        raise RuntimeError("not now")


def test_a_config_that_cannot_be_read_does_not_block_a_save(
    run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(run, 0, Boastful(rngs=nnx.Rngs(0))).result()

    restore_state(run, 0, model=Boastful, missing="init")
    assert "a setting of the model is not saved with the checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda run: restore_state(run, model=Plain, tx=optax.adam),
            "tx: expected an op",
        ),
        (
            lambda run: restore_state("prod/x", model=Plain),  # type: ignore[arg-type]  # the mistake
            "expected a Run",
        ),
        (lambda run: save_state(run, {"a": 1}), "expected a state with step, graphdef"),
        (lambda run: save_state(run, Plain(rngs=nnx.Rngs(0))), "save a module with"),
        (
            lambda run: restore_state(run, model=Plain, state_class=dict),
            "state_class: ",
        ),
        (
            lambda run: restore_model(run, model=Plain, allow=[Plain]),
            "expected model= or allow=, got both",
        ),
    ],
    ids=["tx", "run", "dict", "module", "class", "allow"],
)
def test_an_error_names_the_wrong_argument(
    run: store.Run, call: Any, match: str
) -> None:
    save_state(run, EasyDeLState.create(model=Plain(rngs=nnx.Rngs(0)))).result()

    with pytest.raises(store.InvalidRequestError, match=match):
        call(run)
