"""``python -m soak.job_process TARGET RUN STEPS``: a job that saves steps.

It resumes after the latest step of its run, and prints a line when a step begins,
succeeds or fails.
"""

import sys
from typing import Any

import numpy as np

import storesvc_client as store
from tests.support.restrictions import connect

MIB = 1 << 20


def tree(run: str, step: int) -> dict[str, Any]:
    """Returns the state of a step; most of it changes with the step."""
    rng = np.random.default_rng([step, *run.encode()])
    return {
        "moving": rng.integers(0, 256, 24 * MIB, np.uint8),
        "still": np.arange(2 * MIB, dtype=np.int32),
        "step": step,
    }


def is_whole(found: Any, run: str, step: int) -> bool:
    """Returns whether a state equals the state of a step in every byte."""
    expected = tree(run, step)
    return set(found) == set(expected) and all(
        np.asarray(found[key]).tobytes() == np.asarray(leaf).tobytes()
        for key, leaf in expected.items()
    )


def main() -> None:
    """Saves the remaining steps."""
    target, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with connect(target) as client:
        run = client.run(name)
        for step in range(_next(run), steps):
            print("begun", step, flush=True)
            try:
                run.save(step, tree(name, step)).result()
            except store.StoreError as e:
                print("failed", step, e, flush=True)
            else:
                print("saved", step, flush=True)


def _next(run: store.Run) -> int:
    try:
        return run.latest().step + 1
    except store.NotFoundError:
        return 0


if __name__ == "__main__":
    main()
