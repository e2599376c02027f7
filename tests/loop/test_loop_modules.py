"""A loop takes NNX modules, and saves them as nnx.save does, for every reader."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store
from storesvc_client.easydel import restore_model, restore_state
from storesvc_client.nnx import restore_into, save
from tests.support.examples import sampled

TX = optax.adamw(optax.linear_schedule(0.1, 0.01, 100))


class Net(nnx.Module):
    """A module with parameters, statistics and random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.dropout(self.norm(self.hidden(x))))


def make(seed: int = 1) -> tuple[Net, "nnx.Optimizer[Any]"]:
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@nnx.jit  # traced once: each operation by itself takes seconds in sum
def train(model: Net, optimizer: "nnx.Optimizer[Any]") -> None:
    grads = nnx.grad(lambda model: (model(np.ones((3, 4), np.float32)) ** 2).mean())
    optimizer.update(model, grads(model))


def values(*parts: Any) -> list[bytes]:
    leaves = jax.tree.leaves([nnx.state(part) for part in parts])
    keys = [jax.dtypes.prng_key]
    return [
        np.asarray(
            jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, keys[0]) else x
        ).tobytes()
        for x in leaves
    ]


def in_loop(run: store.Run, model: Any, optimizer: Any) -> None:
    with run.loop(every=store.Steps(1), create=True) as loop:
        trained, start = loop.restore_or((model, optimizer))
        assert (0, model, optimizer) == (start, *trained)
        for step in loop.steps(start, 2):
            train(*trained)
            loop.after(step, trained)


def as_states(run: store.Run, model: Any, optimizer: Any) -> None:
    """Saves as loops were written before."""
    train(model, optimizer)
    run.save(1, nnx.state((model, optimizer))).result()


def as_modules(run: store.Run, model: Any, optimizer: Any) -> None:
    train(model, optimizer)
    run.save(1, (model, optimizer)).result()


each_layout = pytest.mark.parametrize("write", [in_loop, as_states, as_modules])
Write = Callable[[store.Run, Any, Any], None]


@pytest.mark.parametrize("saved", [nnx.state, lambda model: model])
def test_a_model_that_was_saved_without_its_optimizer_is_read(
    run: store.Run, saved: Any
) -> None:
    model, _ = make(0)
    run.save(1, saved(model)).result()

    into, optimizer = make()
    restore_into(run, into)
    with run.loop(every=store.Steps(1)) as loop:
        resumed, start = loop.restore_or(make()[0])
    back = restore_model(run, model=lambda: make()[0])

    assert 2 == start
    assert values(model) == values(into) == values(resumed) == values(back)
    with pytest.raises(store.InvalidRequestError, match="no optimizer is known"):
        restore_into(run, into, optimizer)
    with pytest.raises(store.MismatchError, match=r"nnx\.restore_into\(run, model\)"):
        restore_state(run, model=lambda: make()[0])


@pytest.mark.parametrize(
    ("write", "is_function"),
    sampled(product([in_loop, as_states, as_modules], [False, True]), every=5),
)
def test_a_loop_resumes_modules_of_each_layout(
    run: store.Run, write: Write, is_function: bool
) -> None:
    model, optimizer = make(0)
    write(run, model, optimizer)
    other = make()

    with run.loop(every=store.Steps(1)) as loop:
        init: Any = (lambda: other) if is_function else other
        trained, start = loop.restore_or(init)

        assert 2 == start
        assert values(model, optimizer) == values(*trained)
        assert is_function or trained is other
        for step in loop.steps(start, 3):
            train(*trained)
            loop.after(step, trained)

    back = make()
    restore_into(run, *back)
    train(model, optimizer)
    assert values(model, optimizer) == values(*trained) == values(*back)


def test_the_layout_is_that_of_a_save(run: store.Run) -> None:
    trained = make()
    in_loop(run, *trained)
    save(run, 5, *trained).result()

    assert list(run.open(1).leaves) == list(run.open(5).leaves)
    assert run.open(1).document == run.open(5).document


def test_a_model_that_orbax_wrote_is_read(run: store.Run, tmp_path: Path) -> None:
    model = nnx.Sequential(*(nnx.Linear(4, 4, rngs=nnx.Rngs(n)) for n in range(2)))
    step = {"default": ocp.args.StandardSave(nnx.state(model))}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(**step))
    run.import_from(f"orbax:{tmp_path}")

    into = nnx.eval_shape(lambda: model)
    restore_into(run, into)
    foreign = store.open_foreign(f"orbax:{tmp_path}")
    back = restore_model(foreign, model=lambda: nnx.eval_shape(lambda: model))

    assert values(model) == values(into) == values(back)


def test_a_save_and_a_restore_take_the_pair_that_a_loop_takes(run: store.Run) -> None:
    trained = make(0)
    save(run, 1, trained).result()
    back = make()
    restore_into(run, back)

    assert "graphstate/out/kernel/value" in run.open(1).leaves
    assert values(*trained) == values(*back)


def test_a_module_alone_is_a_state(run: store.Run) -> None:
    model = make()[0]
    with run.loop(every=store.Steps(1), create=True) as loop:
        same, start = loop.restore_or(model)
        for step in loop.steps(start, 1):
            loop.after(step, same)
    with run.loop(every=store.Steps(1)) as loop:
        back, start = loop.restore_or(lambda: make(3)[0])

    assert (1, values(model)) == (start, values(back))
    assert values(model) == values(restore_model(run, allow=[Net]))


@each_layout
def test_a_model_is_read_for_inference_in_bfloat16_on_another_mesh(
    run: store.Run, write: Write
) -> None:
    model, optimizer = make(0)
    write(run, model, optimizer)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    how: dict[str, Any] = {
        "mesh": mesh,
        "rules": [("hidden/kernel", P("a", "b")), ("", P())],
        "cast": "bf16",
    }

    into: Any = nnx.eval_shape(lambda: make()[0])
    restore_into(run, into, **how)
    back = restore_model(run, model=lambda: make()[0], **how)

    for one in (into, back):
        kernel = one.hidden.kernel[...]
        expected = np.asarray(model.hidden.kernel[...].astype("bfloat16"))
        assert expected.tobytes() == np.asarray(kernel).tobytes()
        assert (mesh, P("a", "b")) == (kernel.sharding.mesh, kernel.sharding.spec)
        assert "float32" == one.norm.mean[...].dtype


def test_a_cast_of_an_older_layout_casts_the_moments_too(run: store.Run) -> None:
    as_states(run, *make(0))
    in_new = make()
    restore_into(run, *in_new, cast="bf16")

    moment = jax.tree.leaves(nnx.state(in_new[1])["opt_state"][0]["mu"])[0]
    assert ["bfloat16", "uint32"] == [str(moment.dtype), str(in_new[1].step[...].dtype)]
    train(*in_new)


def test_what_an_older_layout_cannot_do_names_a_call_that_works(run: store.Run) -> None:
    model, optimizer = make(0)
    as_states(run, model, optimizer)

    with pytest.raises(store.MismatchError) as caught:
        restore_state(run, model=lambda: make()[0], tx=TX)
    names = {"run": run, "model": make()[0], "restore_into": restore_into}
    names["optimizer"] = nnx.Optimizer(names["model"], TX, wrt=nnx.Param)
    advice = re.search(r"storesvc_client\.nnx\.(restore_into\(.*\))", str(caught.value))
    assert advice is not None
    eval(advice[1], names)

    assert values(model, optimizer) == values(names["model"], names["optimizer"])
    with pytest.raises(store.InvalidRequestError, match="expected no missing="):
        restore_model(run, model=lambda: make()[0], missing="init")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_factory_that_names_axes_is_placed_on_the_mesh_of_set_mesh(
    run: store.Run, kind: AxisType
) -> None:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("a", None))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))

    def make() -> nnx.Linear:
        return nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(mesh):
        save(run, 1, make()).result()
        back = restore_model(run, model=make)

    assert NamedSharding(mesh, P("a", None)) == back.kernel[...].sharding
