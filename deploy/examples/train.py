"""A training run over several hosts, which saves to a store and goes on from it.

Each pod of an indexed Job is one process of one JAX program (job.yaml, jobset.yaml).
All of them save, each what lies on its devices, and all restore; a pod that was lost
takes the others with it, and the next try goes on at the last checkpoint. Alone, and
without a cluster:

    python train.py --store file:///tmp/ckpts --run examples/train --steps 20
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import storesvc_client as store

WIDTH = 256
BATCH_SIZE = 64
OPTIMIZER = optax.adam(1e-2)

State = dict[str, Any]
"""The step, the parameters and the optimizer's state."""


def main() -> None:
    """Trains as the command line says."""
    options = _arguments()
    _join_processes()
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    with store.connect(options.store) as client:
        run = client.run(options.run)
        state = _first_state(mesh)
        try:
            # All processes restore the checkpoint that the first one finds.
            state = run.restore("latest", like=state)
            _tell(f"goes on at step {int(state['step'])}")
        except store.NotFoundError:
            _tell("begins")
        for after, loss in _steps(state, mesh, until=options.steps):
            step = int(after["step"])
            if step % options.save_every == 0 or step == options.steps:
                # Every process saves; each returns once its own part is copied.
                run.save(step, after, metrics={"loss": loss})
                _tell(f"step {step}: loss {loss:.4f}")
    # The client has waited for its saves: what was told is durable.
    _tell("done")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model.")
    parser.add_argument("--store", required=True, metavar="TARGET")
    parser.add_argument("--run", required=True, metavar="NAMESPACE/RUN")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


def _join_processes() -> None:
    """Makes one program of the pods of a Job; alone, this process is all of it."""
    if "JOB_COMPLETION_INDEX" in os.environ:
        jax.distributed.initialize(
            coordinator_address=os.environ["COORDINATOR"],
            num_processes=int(os.environ["PROCESSES"]),
            process_id=int(os.environ["JOB_COMPLETION_INDEX"]),
        )


def _first_state(mesh: Mesh) -> State:
    """Returns the state before the first step, spread over all devices."""

    def made() -> State:
        keys = jax.random.split(jax.random.key(0), 2)
        params = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
        return {"step": 0, "params": params, "optimizer": OPTIMIZER.init(params)}

    shardings = jax.tree.map(
        lambda leaf: NamedSharding(mesh, P("fsdp") if leaf.ndim else P()),
        jax.eval_shape(made),
    )
    state: State = jax.jit(made, out_shardings=shardings)()
    return state


def _steps(state: State, mesh: Mesh, *, until: int) -> Iterator[tuple[State, float]]:
    """Yields the state and the loss of each step that is left."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = NamedSharding(mesh, P())
    advance = jax.jit(_advance, donate_argnums=0, out_shardings=(shardings, whole))
    for _ in range(int(state["step"]), until):
        state, loss = advance(state)
        yield state, float(loss)


def _advance(state: State) -> tuple[State, jax.Array]:
    """One step; its batch is drawn from its number, so that a run that goes on sees
    what an uninterrupted one sees."""
    key = jax.random.fold_in(jax.random.key(1), state["step"])
    batch = jax.random.normal(key, (BATCH_SIZE, WIDTH))
    loss, grads = jax.value_and_grad(_loss)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {"step": state["step"] + 1, "params": params, "optimizer": optimizer}, loss


def _loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
    encoded = jnp.tanh(batch @ params[0])
    return jnp.mean((encoded @ params[1] - batch) ** 2)


_tell = partial(print, flush=True)


if __name__ == "__main__":
    main()
