"""Models saved by other flax releases are restored, and only as the same model.

Each store in ``tests/golden/models`` was written once, by the flax release in its name;
``python -m tests.test_golden_models`` writes the store of the installed release if
there is none. All values come from one formula, so all stores have one digest.
"""

import hashlib
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import storesvc_client as store
from storesvc_client._pytree.leaves import named_leaves
from storesvc_client.easydel import restore_model, restore_state, save_model, save_state
from storesvc_client.trees.easydel import EasyDeLState
from tests.support.examples import sampled

HERE = Path(__file__).parent / "golden" / "models"
RELEASES = ("0.12.3", "0.12.8")
STEP = 3

DIGESTS = {
    "state": "2b73c27565eba138a12c927315bdcd22670a68e9e704f5d85e93f6a3d9406230",
    "model": "202dd5b6643a613b0058bdbb3c3a8cb5dd59f90c0dd714477263b7bb807f2929",
}
"""Digest of all leaves of the checkpoint of a state and of its module."""


class Block(nnx.Module):
    """A layer that is in the module twice, under two names."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(2, 2, rngs=rngs)
        self.again = self.inner
        self.kernel = self.inner.kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.again(self.inner(x)) @ self.kernel[...]


class Model(nnx.Module):
    """Twelve layers, statistics, dropout, and shared modules."""

    def __init__(
        self, epsilon: float, activation: Callable[..., Any], *, rngs: nnx.Rngs
    ) -> None:
        self.layers = nnx.List(
            [nnx.Linear(2, 2, use_bias=False, rngs=rngs) for _ in range(12)]
        )
        self.norm = nnx.BatchNorm(2, epsilon=epsilon, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.tied = Block(rngs=rngs)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + layer(x)
        return self.tied(self.dropout(self.activation(self.norm(x))))


def make_model(
    epsilon: float = 1e-5, activation: Callable[..., Any] = nnx.relu
) -> Model:
    """Returns the model that was saved, or one with another setting."""
    return Model(epsilon, activation, rngs=nnx.Rngs(params=0, dropout=1))


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def made_state() -> EasyDeLState:
    """Returns the state that was saved; no value depends on an initialiser or
    update."""
    state = EasyDeLState.create(
        step=jnp.int32(STEP), model=make_model(), tx=TX, init_opt_state=True
    )
    leaves, treedef = jax.tree.flatten(state)
    values = [numbered(index, leaf) for index, leaf in enumerate(leaves)]
    made: EasyDeLState = jax.tree.unflatten(treedef, values)
    return made


def numbered(index: int, leaf: Any) -> Any:
    """Returns a value for a leaf that is unique to that leaf."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(index)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf + STEP if leaf.dtype == jnp.uint32 else jnp.full_like(leaf, STEP)
    values = np.arange(1, leaf.size + 1) / 1024 + index / 64
    return jnp.asarray(values.reshape(leaf.shape), leaf.dtype)


def digest(tree: Any) -> str:
    """Returns a digest of all leaves with their names and types."""
    found = hashlib.sha256()
    for leaf in sorted(named_leaves(tree)[0], key=lambda leaf: leaf.key):
        value = leaf.value
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(value) if is_key else value)
        found.update(f"{leaf.key} {value.dtype} {value.shape} ".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def parts(model: Any) -> dict[str, Any]:
    """Returns the parts of a module by their names in a checkpoint."""
    _, *states = nnx.split(model, nnx.Param, ...)
    return dict(zip(("graphstate", "graphother"), states, strict=True))


def advance(state: EasyDeLState) -> EasyDeLState:
    """Returns the state after one update."""

    def loss(graphstate: Any) -> tuple[jax.Array, Any]:
        model = state.merge(graphstate)
        value = jnp.mean(model(jnp.ones((4, 2))) ** 2)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    grads, graphother = jax.jit(jax.grad(loss, has_aux=True))(state.graphstate)
    advanced: EasyDeLState = state.apply_gradients(grads=grads)
    return advanced.replace(graphother=graphother)


@pytest.fixture(params=RELEASES)
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A client for a copy of each store."""
    root = tmp_path / "store"
    shutil.copytree(HERE / f"flax-{request.param}", root)
    with store.connect(root.as_uri()) as connected:
        yield connected


def test_a_state_of_each_release_is_restored_by_its_factory(
    client: store.Client,
) -> None:
    back = restore_state(client.run("golden/state"), model=make_model, tx=TX)

    assert STEP == back.step
    assert DIGESTS["state"] == digest(back)
    assert DIGESTS["state"] == digest(made_state())


@pytest.mark.slow
def test_a_state_of_each_release_goes_on_as_one_of_this_release(
    client: store.Client,
) -> None:
    back = restore_state(client.run("golden/state"), model=make_model, tx=TX)

    after, expected = advance(back), advance(made_state())

    assert STEP + 1 == after.step
    assert digest(expected) == digest(after)
    assert digest(back.graphstate) != digest(after.graphstate)
    finite = jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), after.graphstate)
    assert jax.tree.all(finite)


@pytest.mark.parametrize("name", ["golden/state", "golden/model"])
def test_a_model_of_each_release_is_restored_by_its_factory(
    client: store.Client, name: str
) -> None:
    back = restore_model(client.run(name), model=make_model)

    assert DIGESTS["model"] == digest(parts(back))
    assert back.tied.inner is back.tied.again
    assert back.tied.inner.kernel is back.tied.kernel


@pytest.mark.parametrize("name", sampled(["golden/model", "golden/state"], every=2))
def test_a_model_of_each_release_is_restored_by_its_structure(
    client: store.Client, name: str
) -> None:
    back = restore_model(client.run(name), allow=[Model, Block])

    assert DIGESTS["model"] == digest(parts(back))
    assert back.tied.inner is back.tied.again
    assert back.tied.inner.kernel is back.tied.kernel
    assert (nnx.relu, 1e-5) == (back.activation, back.norm.epsilon)
    x = jnp.linspace(-1.0, 1.0, 8).reshape(4, 2)
    assert made_state().model(x).tolist() == back(x).tolist()


# Releases of flax describe a module differently, so descriptions are compared setting
# by setting: settings that all releases have are equal.
@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"epsilon": 1e-3}, "norm/epsilon: expected 1e-05 as saved, got 0.001"),
        ({"activation": nnx.gelu}, "activation: expected .*relu.* as saved, got .*gel"),
    ],
    ids=["epsilon", "activation"],
)
def test_another_setting_is_rejected_across_releases(
    client: store.Client, other: dict[str, Any], match: str
) -> None:
    def make_other() -> Model:
        return make_model(**other)

    with pytest.raises(store.MismatchError, match=match):
        restore_state(client.run("golden/state"), model=make_other, tx=TX)
    with pytest.raises(store.MismatchError, match=match):
        restore_model(client.run("golden/model"), model=make_other)


def test_another_optimizer_is_rejected_across_releases(client: store.Client) -> None:
    with pytest.raises(store.MismatchError, match="got ScaleByLionState"):
        restore_state(
            client.run("golden/state"),
            model=make_model,
            tx=optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-2)),
        )


def write(root: Path) -> None:
    """Writes the store of the installed release."""
    state = made_state()
    with store.connect(root.as_uri()) as writing:
        save_state(writing.run("golden/state"), state).result()
        save_model(writing.run("golden/model"), STEP, state.model).result()


if __name__ == "__main__":
    target = HERE / f"flax-{flax.__version__}"
    assert not target.exists(), "a golden store is written once"
    # Imported by name, because the stored structure names the module of its class.
    import_module("tests.test_golden_models").write(target)
