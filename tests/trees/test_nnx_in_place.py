"""NNX modules and their optimizers are saved in one line and restored in place."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state
from storesvc_client.nnx import restore_into, save
from tests.support.leaf_bits import leaf_bytes

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
RULES = [("kernel", P("b", "c")), ("", P())]
TX = optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 100)))


class Net(nnx.Module):
    """A module with parameters, statistics and random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(self.norm(self.hidden(x))))


class Adapted(nnx.Module):
    """A module of which only the adapter is trained."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer = nnx.LoRALinear(4, 1, lora_rank=2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


def trained(
    seed: int = 0, model_class: Callable[[nnx.Rngs], Any] = Net, wrt: Any = nnx.Param
) -> tuple[Any, "nnx.Optimizer[Any]"]:
    """Returns a new model and its optimizer."""
    model = model_class(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, TX, wrt=wrt)


@nnx.jit
def train_step(model: Any, optimizer: Any) -> Any:
    grads = nnx.grad(
        lambda model: jnp.mean((model(X) - 1) ** 2),
        argnums=nnx.DiffState(0, optimizer.wrt),
    )
    value = jnp.mean((model(X) - 1) ** 2)
    optimizer.update(model, grads(model))
    return value


def losses(model: Any, optimizer: Any, count: int = 3) -> list[float]:
    """Trains for some steps, and returns the losses."""
    return [float(train_step(model, optimizer)) for _ in range(count)]


def values(*of: Any) -> list[bytes]:
    """Returns the bytes of all leaves."""
    return [leaf_bytes(leaf) for leaf in jax.tree.leaves([*map(nnx.state, of)])]


@pytest.mark.slow
def test_training_goes_on_in_place_as_if_it_had_not_ended(run: store.Run) -> None:
    model, optimizer = trained()
    losses(model, optimizer)
    save(run, 3, model, optimizer, metrics={"loss": 0.5}).result()
    expected = values(model, optimizer)
    following = losses(model, optimizer)

    other, its_optimizer = trained(seed=5)
    variables = [other.hidden.kernel, its_optimizer.step]
    found = restore_into(run, other, its_optimizer)

    assert (3, {"loss": 0.5}) == (found.step, found.metrics)
    assert expected == values(other, its_optimizer)
    assert variables[0] is other.hidden.kernel  # the same objects
    assert variables[1] is its_optimizer.step
    assert 3 == int(its_optimizer.step[...])
    assert following == losses(other, its_optimizer)


@pytest.mark.slow
def test_an_abstract_module_is_restored_without_arrays_before(run: store.Run) -> None:
    model, optimizer = trained()
    losses(model, optimizer)
    save(run, 3, model, optimizer).result()
    following = losses(model, optimizer)

    other, its_optimizer = nnx.eval_shape(trained)
    assert isinstance(jax.tree.leaves(nnx.state(other))[0], jax.ShapeDtypeStruct)
    restore_into(run, other, its_optimizer)

    assert following == losses(other, its_optimizer)


@pytest.mark.slow
def test_each_leaf_is_placed_as_the_one_it_replaces(run: store.Run) -> None:
    model, optimizer = trained()
    losses(model, optimizer)
    save(run, 3, model, optimizer).result()
    mesh = jax.make_mesh((8,), ("x",))
    sharding = NamedSharding(mesh, P(None, "x"))
    other, its_optimizer = trained(seed=5)
    moment = its_optimizer.opt_state[1][0].mu["hidden"]["kernel"]
    for variable in (other.hidden.kernel, moment):
        variable.set_value(jax.device_put(variable[...], sharding))

    restore_into(run, other, its_optimizer)

    assert sharding == other.hidden.kernel[...].sharding
    assert sharding == moment[...].sharding
    assert values(model, optimizer) == values(other, its_optimizer)


@pytest.mark.slow
def test_a_module_alone_is_restored_from_either(run: store.Run) -> None:
    model, optimizer = trained()
    losses(model, optimizer)
    save(run, 3, model, optimizer).result()
    save(run, 4, model).result()
    expected = values(model)

    for which in (3, 4):
        other, _ = trained(seed=5)
        assert which == restore_into(run, other, which=which).step
        assert expected == values(other)


def test_the_checkpoint_is_that_of_a_state(run: store.Run) -> None:
    model, optimizer = trained()
    losses(model, optimizer)
    save(run, 3, model, optimizer).result()

    state = restore_state(run, model=lambda: trained()[0], tx=TX)
    alone = restore_model(run, model=lambda: trained()[0])

    assert 3 == int(state.step)
    assert values(model) == values(state.model) == values(alone)


@pytest.mark.slow
def test_only_what_the_optimizer_updates_counts_as_its_parameters(
    run: store.Run,
) -> None:
    model, optimizer = trained(model_class=Adapted, wrt=nnx.LoRAParam)
    losses(model, optimizer)
    save(run, 3, model, optimizer).result()
    following = losses(model, optimizer)

    other, its_optimizer = trained(5, model_class=Adapted, wrt=nnx.LoRAParam)
    restore_into(run, other, its_optimizer)

    assert following == losses(other, its_optimizer)
    keys = run.open().leaves
    assert "graphother/layer/kernel/value" in keys
    assert "opt_state/1/0/mu/layer/kernel/value" not in keys


def test_another_model_or_optimizer_is_rejected_and_nothing_changes(
    run: store.Run,
) -> None:
    model, optimizer = trained()
    save(run, 3, model, optimizer).result()
    save(run, 4, model).result()

    adapted, its_optimizer = trained(model_class=Adapted)
    before = values(adapted, its_optimizer)
    with pytest.raises(store.MismatchError, match="the module itself"):
        restore_into(run, adapted, its_optimizer, which=3)
    assert before == values(adapted, its_optimizer)

    model, _ = trained(seed=5)
    sgd = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    before = values(model, sgd)
    with pytest.raises(store.MismatchError, match=r"optimizer|opt_state"):
        restore_into(run, model, sgd, which=3)
    with pytest.raises(store.InvalidRequestError, match="holds no state of an optim"):
        restore_into(run, model, sgd, which=4)
    with pytest.raises(store.NotFoundError):
        restore_into(run, model, sgd, which=5)
    assert before == values(model, sgd)


def test_a_difference_that_changes_numbers_is_named(run: store.Run) -> None:
    model, optimizer = trained()
    save(run, 3, model, optimizer).result()
    other, its_optimizer = trained()
    other.dropout.rate = 0.9

    with pytest.raises(store.MismatchError, match=r"dropout/rate.*0\.2.*0\.9"):
        restore_into(run, other, its_optimizer)
    restore_into(run, other, its_optimizer, on_mismatch="log")
    assert values(model, optimizer) == values(other, its_optimizer)


def test_arguments_of_another_kind_are_rejected(run: store.Run) -> None:
    model, optimizer = trained()
    adapted, other_optimizer = trained(model_class=Adapted)
    wrong: list[tuple[Any, ...]] = [
        ("expected a Run", "a/b", model, optimizer),
        ("expected an nnx.Module", run, {"x": 1}, optimizer),
        ("expected an nnx.Module, or an object", run, {"x": 1}, None),
        ("expected an nnx.Optimizer, got Grad", run, model, TX),
        ("the optimizer of this module", run, model, other_optimizer),
    ]
    for message, place, module, given in wrong:
        with pytest.raises(store.InvalidRequestError, match=message):
            save(place, 1, module, given)
        with pytest.raises(store.InvalidRequestError, match=message):
            restore_into(place, module, given)
    assert adapted is not None
    assert [] == run.steps()


def test_a_tree_of_two_states_is_not_said_to_lack_the_optimizer(run: store.Run) -> None:
    model, optimizer = trained()
    run.save(1, {"model": nnx.state(model), "opt": nnx.state(optimizer)}).result()

    with pytest.raises(
        store.InvalidRequestError, match=r"saved as one tree, .* run\.restore\(like="
    ):
        restore_into(run, model, optimizer)


def test_the_public_module_names_two_functions() -> None:
    from storesvc_client import nnx as public

    assert ["restore_into", "save"] == public.__all__


def test_importing_the_client_imports_no_flax() -> None:
    program = "import sys, storesvc_client; print('flax' in sys.modules)"

    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert "False\n" == ran.stdout


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (AxisType.Auto, ("a", "b")),
        pytest.param(AxisType.Auto, None, marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, ("a", "b"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_abstract_module_is_restored_onto_the_mesh_of_set_mesh(
    run: store.Run, kind: AxisType, axes: Any
) -> None:
    def make(axes: Any) -> Any:
        init = nnx.initializers.lecun_normal()
        init = init if axes is None else nnx.with_partitioning(init, axes)
        return nnx.Linear(8, 4, kernel_init=init, rngs=nnx.Rngs(0))

    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        model = make(axes)
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        save(run, 1, model, optimizer).result()
        module = nnx.eval_shape(lambda: make(axes))
        asked = module.kernel.get_value().sharding  # None in some releases of flax
        restore_into(run, module)
        spec = P() if asked is None else asked.spec
        assert NamedSharding(mesh, spec) == module.kernel[...].sharding
        module(jnp.ones((2, 8)))

    # on another mesh, with other names: metadata of placement are not the model
    others = jax.make_mesh((2, 4), ("b", "c"), axis_types=(kind, kind))
    names = axes and (None, "c")
    with jax.set_mesh(others):
        module = nnx.eval_shape(lambda: make(names))
        restore_into(run, module)
        other = make(names)
        restore_into(run, other, nnx.Optimizer(other, TX, wrt=nnx.Param))
        back = restore_model(run, model=lambda: make(names), mesh=others, rules=RULES)
        state = restore_state(run, model=lambda: make(names), tx=TX)
    for one in (module, other, back, state.model):
        np.testing.assert_array_equal(model.kernel[...], one.kernel[...])
        assert others == one.kernel[...].sharding.mesh
