"""``python -m benchmarks loop``: the time that a training loop adds to a step that it
does not save.

In a loop that does nothing else ("hot"), and after a pause in which the processor's
caches went cold ("cold", with the time of an empty measurement in brackets); in a
process alone, and in one that belongs to a ``jax.distributed`` job.
"""

import subprocess
import sys
import time
from socket import socket
from typing import Final

import jax
import numpy as np

import storesvc_client as store

STEPS: Final = 100_000
PAUSES: Final = 300
PAUSE_SECONDS: Final = 0.005


def main() -> None:
    """Measures both kinds of processes, each in one of its own."""
    match sys.argv[1:]:
        case ["alone" | "job" as kind]:
            measure(kind)
        case _:
            for kind in ("alone", "job"):
                command = [sys.executable, "-m", "benchmarks", "loop", kind]
                subprocess.run(command, check=True)


def measure(kind: str) -> None:
    """Measures one kind, and prints its line."""
    if kind == "job":
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            address = "127.0.0.1:{1}".format(*free.getsockname())
        jax.distributed.initialize(address, 1, 0)
    state = {"w": np.zeros(4)}
    with store.connect("memory://") as client:
        run = client.run("bench/loop")
        every = store.Steps(10**9) | store.Minutes(600)
        with run.loop(every=every) as loop:
            loop.after(1, state)
            steps = iter(loop.steps(2, 10**9))
            hot = []
            for _ in range(5):
                began = time.perf_counter()
                for _ in range(STEPS):
                    loop.after(next(steps), state, metrics={"loss": 1.0})
                hot.append((time.perf_counter() - began) / STEPS)
            cold, empty = [], []
            for _ in range(PAUSES):
                time.sleep(PAUSE_SECONDS)
                began = time.perf_counter()
                empty.append(time.perf_counter() - began)
                time.sleep(PAUSE_SECONDS)
                began = time.perf_counter()
                loop.after(next(steps), state, metrics={"loss": 1.0})
                cold.append(time.perf_counter() - began)
    print(
        f"{kind:6} hot {1e6 * min(hot):5.2f} us, cold {1e6 * np.median(cold):5.1f} us "
        f"({1e6 * np.median(empty):.1f} us)"
    )
