"""Loops in the manner of MaxText and tunix run with one import changed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grain.python as grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import checkpoint_managers as managers
from orbax.checkpoint.experimental.v1 import training

import storesvc_client as store
from storesvc_client import orbax

Place = Callable[[], Any]


@pytest.fixture(params=["orbax", "storesvc"])
def library(
    request: pytest.FixtureRequest, tmp_path: Path, runs: Callable[[], store.Run]
) -> tuple[ModuleType | Any, Any]:
    """Returns the module that a loop imports, and the directory of its config."""
    if request.param == "orbax":
        return ocp, tmp_path / "ckpts"
    return orbax, runs()


class PretrainingJob:
    """A loop that saves its state and its data iterator, and resumes from both."""

    def __init__(self, module: Any, directory: Any, *, every: int) -> None:
        self.manager = module.CheckpointManager(
            directory,
            item_names=("items", "iter"),
            options=ocp.CheckpointManagerOptions(
                create=True,
                enable_async_checkpointing=True,
                save_decision_policy=managers.FixedIntervalPolicy(every),
                preservation_policy=managers.LatestN(2),
            ),
        )
        self.data = iter(grain.MapDataset.range(100).to_iter_dataset())
        mesh = jax.make_mesh((8,), ("data",))
        self.sharding = NamedSharding(mesh, PartitionSpec("data"))
        self.tx = optax.adam(0.1)

    def init(self) -> dict[str, Any]:
        params = {"w": jax.device_put(jnp.arange(8.0), self.sharding)}
        whole = NamedSharding(self.sharding.mesh, PartitionSpec())
        opt_state = jax.tree.map(
            lambda x: x if x.ndim else jax.device_put(x, whole), self.tx.init(params)
        )
        return {"params": params, "opt_state": opt_state, "step": 0}

    def resumed(self) -> dict[str, Any]:
        """Returns the newest state, or the first one."""
        state = self.init()
        latest = self.manager.latest_step()
        if latest is None:
            return state
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        arguments = ocp.checkpoint_utils.construct_restore_args(abstract)
        wanted = {
            "items": ocp.args.PyTreeRestore(
                item=abstract, restore_args=arguments, partial_restore=True
            )
        }
        if (self.manager.directory / str(latest) / "iter").exists():
            wanted["iter"] = grain.PyGrainCheckpointRestore(self.data)
        found = self.manager.restore(latest, args=ocp.args.Composite(**wanted))
        restored: dict[str, Any] = found["items"]
        return restored

    def train(self, until: int) -> dict[str, Any]:
        state = self.resumed()
        while state["step"] < until:
            batch = next(self.data)
            grads = jax.tree.map(lambda x, by=batch: x * 0 + by, state["params"])
            updates, opt_state = self.tx.update(grads, state["opt_state"])
            state = {
                "params": optax.apply_updates(state["params"], updates),
                "opt_state": opt_state,
                "step": state["step"] + 1,
            }
            self.manager.save(
                state["step"],
                args=ocp.args.Composite(
                    items=ocp.args.PyTreeSave(
                        item=state, ocdbt_target_data_file_size=1 << 20
                    ),
                    iter=grain.PyGrainCheckpointSave(self.data),
                ),
                custom_metadata={"scan_layers": True},
            )
            if self.manager.reached_preemption(state["step"]):
                break
        self.manager.wait_until_finished()
        self.manager.close()
        return state


@pytest.mark.slow
def test_a_job_like_maxtext_resumes_to_the_same_state(library: tuple[Any, Any]) -> None:
    module, directory = library
    PretrainingJob(module, directory, every=2).train(until=5)
    job = PretrainingJob(module, directory, every=2)
    assert list(job.manager.all_steps()) == [2, 4]
    assert job.manager.metadata(4).custom_metadata == {"scan_layers": True}
    resumed = job.train(until=8)
    with store.connect("memory://") as client:
        other = PretrainingJob(orbax, client.run("loops/whole"), every=100)
        whole = other.train(until=8)
    assert resumed["params"]["w"].tolist() == whole["params"]["w"].tolist()
    assert resumed["params"]["w"].sharding.is_equivalent_to(job.sharding, 1)


class TuningCheckpoints:
    """Saves a model and its optimizer as checkpointables, and restores in place."""

    def __init__(self, cls: Any, directory: Any) -> None:
        self.checkpointer = cls(
            directory,
            save_decision_policy=managers.FixedIntervalPolicy(10),
            preservation_policy=managers.LatestN(3),
        )

    def save(self, step: int, model: Any, optimizer: Any, *, force: bool) -> bool:
        items = {
            "model_params": nnx.state(model, nnx.Param),
            "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
        }
        response = self.checkpointer.save_checkpointables_async(
            step, items, force=force, custom_metadata={"step": step}
        )
        return response is not None

    def maybe_restore(self, model: Any, optimizer: Any) -> tuple[int, Any]:
        if self.checkpointer.latest is None:
            return 0, {}
        step = self.checkpointer.latest.step
        abstract = {
            "model_params": nnx.state(model, nnx.Param),
            "optimizer_state": nnx.state(optimizer, nnx.optimizer.OptState),
        }
        found = self.checkpointer.load_checkpointables(step, abstract)
        nnx.update(model, found["model_params"])
        nnx.update(optimizer, found["optimizer_state"])
        metadata = self.checkpointer.checkpointables_metadata(step)
        return step, metadata.custom_metadata


@pytest.fixture(params=["orbax", "storesvc"])
def tuning(
    request: pytest.FixtureRequest, tmp_path: Path, runs: Callable[[], store.Run]
) -> Iterator[TuningCheckpoints]:
    if request.param == "orbax":
        found = TuningCheckpoints(training.Checkpointer, tmp_path / "ckpts")
    else:
        found = TuningCheckpoints(orbax.Checkpointer, runs())
    yield found
    found.checkpointer.close()


def model_and_optimizer(seed: int) -> tuple[Any, Any]:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@pytest.mark.slow
def test_a_manager_like_tunix_restores_in_place(tuning: TuningCheckpoints) -> None:
    model, optimizer = model_and_optimizer(0)
    assert tuning.maybe_restore(model, optimizer) == (0, {})
    gradients = nnx.grad(lambda m: m(jnp.ones(2)).sum())(model)
    optimizer.update(model, gradients)
    saved = [
        tuning.save(step, model, optimizer, force=force)
        for step, force in ((10, False), (15, False), (16, True))
    ]
    tuning.checkpointer.wait()
    other, its_optimizer = model_and_optimizer(1)
    assert saved == [True, False, True]
    assert tuning.maybe_restore(other, its_optimizer) == (16, {"step": 16})
    assert other.kernel[...].tolist() == model.kernel[...].tolist()
    states = [
        jax.tree.leaves(nnx.state(each, nnx.optimizer.OptState))
        for each in (optimizer, its_optimizer)
    ]
    assert all(a.tolist() == b.tolist() for a, b in zip(*states, strict=True))
