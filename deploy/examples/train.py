"""Trains over several hosts, saves to a store, and resumes from it.

Each pod of an indexed Job is one process of one JAX program (job.yaml, jobset.yaml).
All of them save, each what is on its devices, and all restore. When a pod is lost, the
others fail too, and the next attempt resumes at the newest checkpoint. Alone, without
a cluster:

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
            _print(f"resumes at step {int(state['step'])}")
        except store.NotFoundError:
            _print("begins")
        for after, loss in _steps(state, mesh, until=options.steps):
            step = int(after["step"])
            if step % options.save_every == 0 or step == options.steps:
                # Every process saves; each returns once its own part is copied.
                run.save(step, after, metrics={"loss": loss})
                _print(f"step {step}: loss {loss:.4f}")
    # The client has waited for its saves: every step printed above is durable.
    _print("done")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model.")
    parser.add_argument("--store", required=True, metavar="TARGET")
    parser.add_argument("--run", required=True, metavar="NAMESPACE/RUN")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    return parser.parse_args()


def _join_processes() -> None:
    """Joins the pods of a Job into one program; alone, this process is the program."""
    if "JOB_COMPLETION_INDEX" in os.environ:
        jax.distributed.initialize(
            coordinator_address=os.environ["COORDINATOR"],
            num_processes=int(os.environ["PROCESSES"]),
            process_id=int(os.environ["JOB_COMPLETION_INDEX"]),
        )


def _first_state(mesh: Mesh) -> State:
    """Returns the state before the first step, sharded over all devices."""

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
    """Yields the state and the loss of each remaining step."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = NamedSharding(mesh, P())
    advance = jax.jit(_advance, donate_argnums=0, out_shardings=(shardings, whole))
    for _ in range(int(state["step"]), until):
        state, loss = advance(state)
        yield state, float(loss)


def _advance(state: State) -> tuple[State, jax.Array]:
    """Runs one step. The number of the step seeds its batch, so that a resumed run sees
    the batches of an uninterrupted one."""
    key = jax.random.fold_in(jax.random.key(1), state["step"])
    batch = jax.random.normal(key, (BATCH_SIZE, WIDTH))
    loss, grads = jax.value_and_grad(_loss)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {"step": state["step"] + 1, "params": params, "optimizer": optimizer}, loss


def _loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
    encoded = jnp.tanh(batch @ params[0])
    return jnp.mean((encoded @ params[1] - batch) ** 2)


_print = partial(print, flush=True)


if __name__ == "__main__":
    main()
