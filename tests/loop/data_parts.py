"""Training on every example once, for the processes of a job; see ``jax_job``.

Each step trains on a global batch of each of three iterators of Grain, which the
processes divide among them. The state counts how often it was trained on each example.
"""

import json
import time
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from grain import experimental
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store

RUN = "tests/data"
BATCH = 12
"""Examples of a global batch; 4, 2 and 3 processes can divide it."""
STEPS = 60
"""Steps of an epoch."""
EXAMPLES = BATCH * STEPS
KINDS = ("data", "replicated", "shards")
"""Items with iterators that any number of processes can take up."""

_FEW_THREADS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)


def examples() -> Any:
    """Returns the examples of the epoch, in the order of the training."""
    return grain.MapDataset.range(EXAMPLES).shuffle(seed=5)


def elastic(index: int, count: int) -> Any:
    """Returns Grain's iterator over the part of a process of each global batch."""
    return experimental.ElasticIterator(
        examples(),
        BATCH,
        grain.sharding.ShardOptions(index, count),
        read_options=_FEW_THREADS,
    )


def batches(part: slice) -> Any:
    """Returns an iterator over batches of a part of the examples."""
    sliced = examples()[part]
    size = len(sliced) // STEPS
    return iter(sliced.to_iter_dataset(_FEW_THREADS).batch(size, drop_remainder=True))


class ShardedBatches:
    """An iterator over a fixed number of shards, of which each process has some, with
    the methods of the elastic iterator in coming releases of Grain."""

    def __init__(self, index: int, count: int) -> None:
        self.shard_options = grain.sharding.ShardOptions(index, count)
        self.shards = {
            shard: batches(slice(shard, None, BATCH))
            for shard in range(index, BATCH, count)
        }

    def __next__(self) -> Any:
        return np.concatenate([next(self.shards[shard]) for shard in self.shards])

    def get_shard_states(self) -> dict[int, Any]:
        return {shard: each.get_state() for shard, each in self.shards.items()}

    def set_shard_states(self, states: dict[int, Any]) -> None:
        assert states.keys() == self.shards.keys()
        for shard, state in states.items():
            self.shards[shard].set_state(state)


@jax.jit
def trained(state: Any, batch: Any) -> Any:
    """Counts the examples of the global batches."""
    return jax.tree.map(lambda counts, ids: counts.at[ids].add(1), state, batch)


def trains(target: str, log: str, phase: int, pause: float = 0.0) -> dict[str, Any]:
    """Trains from the newest checkpoint to the end of the epoch.

    Args:
        target: The store.
        log: Folder for one line for each step, of each process.
        phase: Number of the job.
        pause: Seconds of each step.
    """
    index, count = jax.process_index(), jax.process_count()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    divided = NamedSharding(mesh, PartitionSpec("x"))
    init = jax.jit(
        lambda: {kind: jax.numpy.zeros(EXAMPLES, np.int32) for kind in KINDS},
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    data = elastic(index, count)
    whole = batches(slice(None))
    shards = ShardedBatches(index, count)
    own = batches(slice(index, None, count))
    items = {
        "data": data,
        "replicated": store.Replicated(whole),
        "shards": shards,
        "own": own,
    }
    refused = ""
    with (
        store.connect(target) as client,
        Path(log, f"{phase}-{index}").open("w") as out,
    ):
        run = client.run(RUN)
        loop = run.loop(every=store.Steps(5), create=True)
        with loop:
            state, start = loop.restore_or(init, data=data)
            if loop.restored is not None:
                loop.restored.items.restore_into("replicated", whole)
                loop.restored.items.restore_into("shards", shards)
                try:
                    loop.restored.items.restore_into("own", own)
                except store.MismatchError as e:
                    refused = str(e)
            for step in loop.steps(start, STEPS):
                ids = {
                    "data": next(data),
                    "replicated": next(whole)[index::count],
                    "shards": next(shards),
                }
                seen = {kind: each.tolist() for kind, each in ids.items()}
                seen["own"] = next(own).tolist()
                out.write(json.dumps({"step": step} | seen) + "\n")
                out.flush()
                batch = {
                    kind: jax.make_array_from_process_local_data(divided, each)
                    for kind, each in ids.items()
                }
                state = trained(state, batch)
                time.sleep(pause)
                loop.after(step, state, items=items)
        rest = [next(each, None) is not None for each in (data, whole)]
    counts = {kind: np.asarray(state[kind]).tolist() for kind in KINDS}
    return {"start": start, "refused": refused, "counts": counts, "rest": rest}
