"""Measures planning and rebuilding of trees of many leaves, against jax's flattening.

    python -m benchmarks.trees [--leaves 100000] [--server | --rehearse [--rounds 5]]

Measures, for a module of many small parameters, the work of a save before its first
byte is sent, and of a restore before its first byte and after its last one. The floor
is ``tree_flatten_with_path`` of the same state. Nothing is sent. With --server: whole
saves and restores of such a tree of host arrays, and the processor time and the memory
of the server. With --rehearse: the seconds until ``save_state`` returns, with and
without the rehearsal of the restore, and the seconds of the rehearsal in the
background.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import storesvc_client as store
from benchmarks.memory import resident
from storesvc.format.trees import pack_leaves, unpack_leaves
from storesvc_client._pytree.leaves import named_leaves
from storesvc_client._pytree.restore_target import Target
from storesvc_client._pytree.save_plan import Planner
from storesvc_client._values.options import RestoreRequest
from storesvc_client.easydel import save_state
from storesvc_client.trees.easydel import EasyDeLState
from storesvc_client.trees.nnx.blueprints import draw_blueprint
from storesvc_client.trees.nnx.graphs import merge_by_path, refine_graphs
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.nnx.variable_sources import Sources
from storesvc_proto.v1 import tree_pb2
from tests.support.server_process import ServerProcess

RULES = [("kernel", PartitionSpec()), ("", PartitionSpec())]


class Many(nnx.Module):
    """Layers of one kernel and one bias each."""

    def __init__(self, layers: int, *, rngs: nnx.Rngs) -> None:
        del rngs
        self.layers = nnx.List([Layer() for _ in range(layers)])


class Layer(nnx.Module):
    """Two parameters, whose arrays all layers share: only the names matter."""

    KERNEL, BIAS = jnp.ones((2, 2)), jnp.ones(2)

    def __init__(self) -> None:
        self.kernel, self.bias = nnx.Param(self.KERNEL), nnx.Param(self.BIAS)
        self.use_bias, self.dtype, self.name = True, jnp.float32, "layer"


def measure(leaves: int) -> dict[str, float]:
    """Returns the seconds of each part, best of two."""
    state = EasyDeLState.create(step=0, model=Many(leaves // 2, rngs=nnx.Rngs(0)))
    parts = (state.graphdef, state.graphstate, state.graphother)
    mesh = jax.make_mesh((1,), ("x",))
    document = Recipe.from_graph(*parts).pack()
    planner = Planner()
    tree = planner.plan(state, document)[0].tree
    blueprint = draw_blueprint(state, None, None)
    keys = dict.fromkeys(tree.by_key)
    packed = b"".join(pack_leaves(tree))
    print(
        f"{leaves} leaves: recipe {len(document) / 1e3:.0f} kB, "
        f"leaf table {len(packed) / 1e6:.1f} MB"
    )

    def choose() -> Any:
        return Target.choose(
            tree,
            "bench",
            RestoreRequest(like=state, mesh=mesh, rules=RULES),
            rows=range(len(tree.leaves)),
        )

    def compare() -> Any:
        return Recipe.unpack(document).model_differences(Recipe.from_graph(*parts))

    tasks: dict[str, Callable[[], Any]] = {
        "floor: tree_flatten_with_path": (
            lambda: jax.tree_util.tree_flatten_with_path(state)
        ),
        "name leaves": lambda: named_leaves(state),
        "save: plan": lambda: Planner().plan(state, document),
        "save: plan, of an unchanged tree": lambda: planner.plan(state, document),
        "save: recipe, of a known GraphDef": lambda: Recipe.from_graph(*parts).pack(),
        "restore: leaf table": lambda: unpack_leaves(
            tree_pb2.LeafTable.FromString(packed)
        ),
        "restore: compare recipes": compare,
        "restore: find sources": lambda: Sources.find(
            blueprint, keys, initialising=False
        ).like(),
        "restore: match and place": choose,
        "rebuild: refine_graphs": lambda: refine_graphs(state.graphstate),
        "rebuild: merge": lambda: merge_by_path(*parts),
    }
    return {name: min(timed(task), timed(task)) for name, task in tasks.items()}


def measure_rehearsal(leaves: int, rounds: int) -> None:
    """Prints what the rehearsal adds to the first save and to later saves: wall-clock
    seconds, and CPU seconds of the thread that saves."""
    rows: dict[str, list[tuple[float, ...]]] = {"off": [], "warn": []}
    for _ in range(rounds):
        for rehearse, found in rows.items():
            model = Many(leaves // 2, rngs=nnx.Rngs(0))
            state = EasyDeLState.create(step=0, model=model)
            found.append(saved(state, rehearse))
    columns = ("first", "CPU", "whole", "later", "CPU", "rehearsal", "CPU")
    print(f"{'medians, seconds':20}" + "".join(f"{name:>10}" for name in columns))
    medians = {
        name: [median(column) for column in zip(*found, strict=True)]
        for name, found in rows.items()
    }
    for name, values in medians.items():
        print(f"rehearse={name:11}" + "".join(f"{value:10.2f}" for value in values))
    pairs = zip(medians["warn"][:5], medians["off"][:5], strict=True)
    print(f"{'warn / off':20}" + "".join(f"{warn / off:10.2f}" for warn, off in pairs))


def saved(state: Any, rehearse: Any) -> tuple[float, ...]:
    """Returns the seconds of the first call of ``save_state``, of all of that save, of
    later calls (the median of seven), and of the rehearsal after its save."""
    with store.connect("memory://") as client:
        run = client.run("bench/rehearsal")
        began, cpu_began = time.perf_counter(), time.thread_time()
        save = save_state(run, state, rehearse=rehearse)
        first, first_cpu = time.perf_counter() - began, time.thread_time() - cpu_began
        save.result()
        whole = time.perf_counter() - began
        cpu_began = time.process_time()
        rehearsal = timed(lambda: save.rehearsal and save.rehearsal.result())
        rehearsal_cpu = time.process_time() - cpu_began
        calls, cpus = [], []
        for step in range(1, 8):
            later = state.replace(step=step)
            began, cpu_began = time.perf_counter(), time.thread_time()
            save = save_state(run, later, rehearse=rehearse)
            calls.append(time.perf_counter() - began)
            cpus.append(time.thread_time() - cpu_began)
            save.result()
        later_calls = (median(calls), median(cpus))
        return first, first_cpu, whole, *later_calls, rehearsal, rehearsal_cpu


def timed(task: Callable[[], Any]) -> float:
    """Returns the seconds that a task takes."""
    began = time.perf_counter()
    task()
    return time.perf_counter() - began


def measure_server(leaves: int) -> None:
    """Prints the seconds of each whole save and restore."""
    layers = [layer(number) for number in range(leaves // 2)]
    with tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory:
        server = ServerProcess(Path(directory) / "store", Path(directory))
        server.start()
        print(f"{'':34}{'seconds':>8}{'client':>8}{'server':>8}{'peak MiB':>9}")
        try:
            with store.connect(server.address) as client:
                for name, task in tasks_of(client.run("bench/trees"), layers):
                    print(f"{name:34}{costs(server.pid, task)}", flush=True)
        finally:
            server.stop()


def layer(number: int) -> dict[str, Any]:
    """Returns two small leaves."""
    kernel = np.full((2, 2), number, np.float32)
    return {"kernel": kernel, "bias": kernel[0].copy()}


def tasks_of(
    run: store.Run, layers: list[dict[str, Any]]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the measured tasks by name; changes the layers between saves."""
    yield "save", lambda: run.save(0, layers).result()
    yield "list leaves", lambda: run.open(0).leaves
    yield "restore like", lambda: run.restore(0, like=layers)
    layers[7]["bias"] = layers[7]["bias"] + 1
    yield "save, one leaf changed", lambda: run.save(1, layers).result()
    for changed in layers:
        changed["kernel"] = changed["kernel"] + 1
    yield "save, every other leaf changed", lambda: run.save(2, layers).result()
    yield "restore", lambda: run.restore(2)


def costs(pid: int, task: Callable[[], Any]) -> str:
    """Returns wall-clock seconds, CPU seconds of client and server, and the server's
    peak memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
    own, others = time.process_time(), processor_seconds(pid)
    seconds = timed(task)
    own, others = time.process_time() - own, processor_seconds(pid) - others
    return f"{seconds:8.2f}{own:8.2f}{others:8.2f}{resident(pid, 'VmHWM'):9}"


def processor_seconds(pid: int) -> float:
    """Returns the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.rehearse:
        measure_rehearsal(arguments.leaves, arguments.rounds)
        return
    if arguments.server:
        measure_server(arguments.leaves)
        return
    seconds = measure(arguments.leaves)
    floor = next(iter(seconds.values()))
    print(f"{'':34}{'seconds':>8}{'floors':>8}")
    for name, value in seconds.items():
        print(f"{name:34}{value:8.2f}{value / floor:8.1f}")
    total = sum(v for k, v in seconds.items() if not k.startswith(("floor", "name")))
    print(f"{'save and restore, all of it':34}{total:8.2f}{total / floor:8.1f}")


if __name__ == "__main__":
    main()
