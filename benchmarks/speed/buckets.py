"""Contenders on a bucket with a long latency.

Every request waits 30 ms, and every connection transfers 50 MB/s, as to a real bucket.
The bucket is the emulator of the tests, in a separate process on the same machine.

Orbax runs as on the real storage: its checkpointer gets a ``gs://`` path, reads and
writes arrays through TensorStore's ``gcs`` driver, and directories and small files
through fsspec, for which ``BucketFiles`` replaces gcsfs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import fsspec
import tensorstore as ts

import storesvc_client as store
from benchmarks.catalogue import LARGE, records
from benchmarks.speed.bucket_files import BucketFiles
from benchmarks.speed.contenders import Maker
from benchmarks.speed.links import LATENCY_SECONDS, STREAM_MBPS
from benchmarks.speed.ours import Ours
from benchmarks.speed.peers import Orbax, OrbaxUncompressed
from benchmarks.speed.states import States
from storesvc.storage.location import CONCURRENCY
from tests.support.server_process import ServerProcess

CHECKPOINTS: Final = 1000
LISTS: Final = 5

BUCKET: Final = "bench"
ROOT: Final = f"gs://{BUCKET}/store"


class Emulator:
    """The storage, for this process and its children."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.fake_gcs", "--bucket", BUCKET),
                *("--latency", str(LATENCY_SECONDS)),
                *("--stream-mbps", str(STREAM_MBPS)),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = self.url
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = ""

    def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()


class Bucket(Ours):
    """This store: a server on the bucket, and a client in direct mode."""

    def __init__(self, directory: Path) -> None:
        self._emulator = Emulator()
        self._server = ServerProcess(directory, directory, uri=ROOT)
        self._server.start()
        self.pids = [self._server.pid]
        client = store.connect(self._server.address, direct=ROOT)
        super().__init__(client, snapshot="none")

    def listed(self) -> int:
        """Lists the run of ``records``; returns how many checkpoints it has."""
        return len(list(self._client.run(str(LARGE)).checkpoints()))

    def close(self) -> None:
        super().close()
        self._server.stop()
        self._emulator.stop()


class OrbaxBucket(Orbax):
    """Orbax with its defaults."""

    def __init__(self, directory: Path) -> None:
        from etils import epath

        self._emulator = Emulator()
        fsspec.register_implementation("gcs", _files_at(self._emulator.url))
        super().__init__(directory)
        self._directory = epath.Path(f"gs://{BUCKET}/orbax")

    def close(self) -> None:
        super().close()
        self._emulator.stop()


class OrbaxUncompressedBucket(OrbaxBucket):
    """Orbax with zarr3 and without compression."""

    options = OrbaxUncompressed.options


def lists(contender: Bucket, states: States, directory: Path) -> dict[str, Any]:
    """Returns the seconds that the list of a run of many checkpoints takes."""
    del states, directory
    written = list(records(CHECKPOINTS, 0))
    context = ts.Context({"gcs_request_concurrency": {"limit": CONCURRENCY}})
    root = ts.KvStore.open(f"{ROOT}/", context=context).result()
    for writing in [root.write(place, data) for place, data in written]:
        writing.result()
    took = []
    for _ in range(LISTS):
        began = time.perf_counter()
        count = contender.listed()
        took.append(time.perf_counter() - began)
        assert count == CHECKPOINTS
    return {
        "bytes": sum(len(data) for _, data in written),
        "first seconds": took[0],
        "seconds": median(took),
    }


def _files_at(url: str) -> type[BucketFiles]:
    """The file system that fsspec makes without arguments."""

    class Files(BucketFiles):
        def __init__(self, **options: Any) -> None:
            super().__init__(url, **options)

    return Files


FAR: Final[Mapping[str, Maker]] = {
    "bucket": Bucket,
    "orbax-bucket": OrbaxBucket,
    "orbax-raw-bucket": OrbaxUncompressedBucket,
}
"""Contenders by name."""
