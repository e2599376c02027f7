"""Measures lists of many checkpoints and runs, by a server of a store on files.

    python -m benchmarks.catalogue [--checkpoints 10000] [--runs 1000]

Only the records are written, directly to the files of the store. The checkpoints have
no manifests and no data files.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import storesvc_client as store
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.format.seal import seal
from storesvc_proto.v1 import bucket_pb2 as pb
from tests.support.server_process import ServerProcess

LARGE = RunName("bench", "large")
UPLOAD = "0123456789abcdef" * 2


def records(checkpoints: int, runs: int) -> Iterator[tuple[str, bytes]]:
    """Yields the places and bytes of the records: a run of many checkpoints, and many
    runs of one checkpoint."""
    small = [RunName("many", f"run-{number:05d}") for number in range(runs)]
    for run in [LARGE, *small]:
        place = layout.run_record(run)
        yield place, seal(pb.RunRecord(uid=UPLOAD), place=place)
        for step in range(checkpoints if run == LARGE else 1):
            record = pb.CheckpointRecord(
                state=pb.CheckpointRecord.STATE_COMMITTED,
                step=step,
                upload=UPLOAD,
                epoch=1,
            )
            place = RunPaths(run).checkpoint(step)
            yield place, seal(record, place=place)


def seconds(task: Callable[[], object]) -> float:
    """Returns the seconds that a task takes, best of three."""
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        task()
        taken.append(time.perf_counter() - began)
    return min(taken)


def measure(address: str) -> None:
    """Prints the seconds of each call."""
    with store.connect(address) as client:
        run = client.run(str(LARGE))
        tasks: dict[str, Callable[[], object]] = {
            "latest": run.latest,
            "a checkpoint by its step": lambda: run.checkpoint(1),
            "one page of checkpoints": lambda: list(islice(run.checkpoints(), 100)),
            "all checkpoints": lambda: list(run.checkpoints()),
            "one page of runs": lambda: list(islice(client.runs("many"), 100)),
            "all runs": lambda: list(client.runs("many")),
        }
        print(f"{'':26}{'seconds':>8}")
        for name, task in tasks.items():
            print(f"{name:26}{seconds(task):8.3f}", flush=True)


def main() -> None:
    """Writes the records, and measures lists of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=1_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory:
        root = Path(directory) / "store"
        store.connect(root.as_uri()).close()  # creates the store
        for place, data in records(arguments.checkpoints, arguments.runs):
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_bytes(data)
        server = ServerProcess(root, Path(directory))
        server.start()
        try:
            measure(server.address)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
