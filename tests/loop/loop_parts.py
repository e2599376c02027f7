"""Training loops for the processes of a job: every process of it calls the same one."""

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import storesvc_client as store
from storesvc_client._rpc import retry

RUN = "tests/loop"
FIRST_STEPS = 5
"""Steps after which a process that is to be killed writes its file."""


def init() -> Any:
    """Returns a state of 1 MiB for each process, sharded over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    shape = (jax.device_count(), 1 << 18)
    made = jax.jit(lambda: {"w": jax.numpy.zeros(shape)}, out_shardings=sharding)
    return made()


@jax.jit
def trained(state: Any) -> Any:
    """Returns the state after a step; every device waits for all others."""
    return {"w": state["w"] + 1 + 0 * state["w"].sum()}


def of(state: Any) -> Any:
    """Returns the shards of a state that this process has; none if there is none."""
    return [] if state is None else state["w"].addressable_shards


def trains(
    target: str,
    total: int,
    every: int = 1_000_000,
    minutes: float = 60.0,
    seconds_per_step: float = 0.02,
    marker: str = "",
    fails_at: int = -1,
    breaks_at: int = -1,
    tolerated: int = 0,
    fails_in: int = 0,
    is_local: bool = False,
) -> dict[str, Any]:
    """Trains in a loop, from the newest checkpoint; returns what it did.

    Args:
        target: The store.
        total: Number of steps.
        every: Multiples of this step are saved ...
        minutes: ... and steps after this time.
        seconds_per_step: Duration of a step; process 1 takes twice as long.
        marker: File that says that some steps are done; its text is the first step.
        fails_at: Step at which a process fails ...
        breaks_at: Step from which on the directory of the store takes no data.
        tolerated: Failures in a row that are tolerated.
        fails_in: ... which is this one.
        is_local: Whether a step waits for no other process.
    """
    retry.PATIENCE_SECONDS = 0.3  # type: ignore[misc]
    index, saved, idle = jax.process_index(), [], []
    pause = seconds_per_step * (2 if index == 1 else 1)
    error = ""
    trigger = store.Steps(every) | store.Minutes(minutes)
    start, state = 0, None
    with store.connect(target) as client:
        run = client.run(RUN)
        on_failure = store.Tolerate(tolerated) if tolerated else store.Raise()
        loop = run.loop(
            every=trigger, create=True, keep=store.KeepLatest(50), on_failure=on_failure
        )
        try:
            with loop:
                state, start = loop.restore_or(init, on_damage="older")
                for step in loop.steps(start, total):
                    state = state if is_local else trained(state)
                    time.sleep(pause)
                    if index == fails_in and step == fails_at:
                        raise ZeroDivisionError
                    if index == 0 and step == breaks_at:
                        run.wait()
                        pool = Path(target.removeprefix("file://"), "data", RUN, "pool")
                        pool.rename(pool.with_name("kept"))
                        pool.write_bytes(b"")
                    began = time.perf_counter()
                    if loop.after(step, state) is not None:
                        saved.append(step)
                    else:
                        idle.append(time.perf_counter() - began)
                    if marker and index == 0 and step == start + FIRST_STEPS:
                        Path(marker).write_text(str(start))
        except (store.StoreError, ZeroDivisionError) as e:
            error = f"{type(e).__name__}: {e}"
        report = loop.restored.report if loop.restored else None
        return {
            "start": start,
            "saved": saved,
            "outcome": loop.outcome,
            "steps": sorted(c.step for c in run.checkpoints(on_damage=id)),
            "value": float(shards[0].data[0, 0]) if (shards := of(state)) else None,
            "idle_us": sorted(round(1e6 * each, 1) for each in idle),
            "error": error,
            "failures": loop.failures,
            "last": loop._step,
            "damaged": {} if report is None else dict(report.damaged),
        }


def main() -> None:
    """Trains alone, for tests that kill a process; prints what it did."""
    import json
    import logging
    import sys

    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    print(json.dumps(trains(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
