"""Measures the server's memory while a tree is saved and restored.

    python -m benchmarks.memory [--gib 1] [--clients 4] [--bucket]

Prints resident memory at rest and at its peak, and the bound that the code states:

- the read buffer;
- with an (emulated) bucket, the batches on their way into it, each three times: its
  frames, the joined frames, and TensorStore's copy;
- for each stream of a save, the messages that are being written and those that have
  arrived, and for each stream the next one, twice: the server's buffer and gRPC's;
- for each stream of a restore, the message that is being sent and the next one, each
  twice.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from storesvc.format import wire
from storesvc.restore.sender import READ_BUFFER_BYTES
from storesvc.save import batches
from storesvc.save.receiver import MAX_BATCHES, PARTS_AHEAD
from storesvc_client._restore import sources
from storesvc_client._save import chunk_streams
from tests.fake_gcs import FakeGcs
from tests.support.gcs_calls import BUCKET
from tests.support.server_process import ServerProcess

MIB = 1 << 20

CLIENT = """
import sys, time, jax, numpy as np, storesvc_client as store
address, what, gib, number = *sys.argv[1:3], float(sys.argv[3]), sys.argv[4]
leaves = int(gib * 32)
with store.connect(address) as client:
    run = client.run(f"bench/memory-{number}")
    began = time.monotonic()
    if what == "save":
        tree = {f"leaf-{i}": np.full(2**23, i, np.float32) for i in range(leaves)}
        began = time.monotonic()
        run.save(0, tree).result()
    else:
        for i, leaf in run.restore(0).items():
            assert leaf[0] == int(i.removeprefix("leaf-"))
    print(time.monotonic() - began)
"""


def resident(pid: int, field: str) -> int:
    """Returns a field of /proc/PID/status, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) // 1024
    raise LookupError(field)


def work(address: str, what: str, gib: float, number: int) -> float:
    """Saves or restores in a new process; returns the seconds that it took."""
    client = subprocess.run(
        [sys.executable, "-c", CLIENT, address, what, str(gib), str(number)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(client.stdout)


@contextmanager
def started(directory: Path, *, in_bucket: bool) -> Iterator[ServerProcess]:
    """Yields a server of a store on files, or in a bucket."""
    with FakeGcs(buckets=[BUCKET]) as gcs:
        uri = f"gs://{BUCKET}/store" if in_bucket else ""
        server = ServerProcess(directory / "store", directory, uri=uri)
        server.environment = {
            "TENSORSTORE_GCS_HTTP_URL": gcs.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
        }
        server.start()
        time.sleep(0.5)
        yield server
        server.stop()


def main() -> None:
    """Prints the memory and the seconds of saves and restores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--bucket", action="store_true")
    arguments = parser.parse_args()
    gib, clients = arguments.gib, arguments.clients
    with (
        tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory,
        started(Path(directory), in_bucket=arguments.bucket) as server,
    ):
        print(f"{'':10} {'seconds':>8} {'GiB/s':>7} {'RSS MiB':>8} {'peak MiB':>9}")
        rest = resident(server.pid, "VmRSS")
        print(
            f"{'at rest':10} {'':8} {'':7} {rest:8} {resident(server.pid, 'VmHWM'):9}"
        )
        for what in ("save", "restore"):
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # resets the peak
            with ThreadPoolExecutor(clients) as pool:
                one = partial(work, server.address, what, gib)
                seconds = max(pool.map(one, range(clients)))
            now, peak = (resident(server.pid, f) for f in ("VmRSS", "VmHWM"))
            rate = clients * gib / seconds
            print(f"{what:10} {seconds:8.2f} {rate:7.2f} {now:8} {peak:9}")
    messages = 2 * PARTS_AHEAD + 2
    save = messages * chunk_streams.STREAMS * batches.FRAME_BYTES // MIB
    restore = 4 * sources.STREAMS * wire.FRAME_BYTES // MIB
    kept = 3 * MAX_BATCHES * batches.BATCH_BYTES if arguments.bucket else 0
    bound = READ_BUFFER_BYTES + kept
    print(
        f"bound over the server at rest: {bound // MIB} MiB, and a client "
        f"{save} MiB in a save, {restore} MiB in a restore"
    )


if __name__ == "__main__":
    main()
