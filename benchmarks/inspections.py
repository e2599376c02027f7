"""Measures a diff of checkpoints of many leaves, and a verification.

    python -m benchmarks.inspections [--leaves 100000] [--mib 200]

Prints the seconds of each. For the verification it also prints the server's resident
memory at rest and at its peak, and the bound that the code states: the reads in flight,
each twice (the server's buffer and TensorStore's copy), and the free memory that glibc
keeps. Tables of a checkpoint with very many leaves are not part of the bound.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import storesvc_client as store
from benchmarks.memory import MIB, resident
from storesvc.format.chunks import READ_BYTES, ChunkLocations, Sums
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc.inspect.rules import differences
from storesvc.inspect.verify import MAX_READS
from storesvc_proto.v1 import tree_pb2
from tests.support.server_process import ServerProcess

KEPT_MIB = 64
"""The trim threshold that ``storesvc.server.app`` sets."""


def manifest_of(leaves: int, *, seed: int) -> Manifest:
    """Returns a manifest of leaves with one chunk each; the seed changes half of
    them."""
    tree = Tree(
        tuple(
            Leaf(
                key=f"params/layers/{n:08}/kernel",
                path_kinds="kkik",
                kind=tree_pb2.LEAF_KIND_ARRAY,
                dtype="float32",
                shape=(128, 128),
                chunk_shape=(128, 128),
            )
            for n in range(leaves)
        )
    )
    digests = np.zeros((leaves, 16), np.uint8)
    changed = np.random.default_rng(seed).integers(0, 256, (leaves // 2, 16), np.uint8)
    digests[: leaves // 2] = changed
    zeros = np.zeros(leaves, np.int64)
    sums = Sums(
        ordinal=np.arange(leaves), crc32c=zeros.astype(np.uint32), digests=digests
    )
    places = ChunkLocations(files=(), file=zeros, offset=zeros, length=zeros)
    return Manifest(tree, sums, places)


def time_diff(leaves: int) -> None:
    """Prints the seconds of a first comparison, and of a second one of the same
    manifests."""
    before, after = (manifest_of(leaves, seed=seed) for seed in (1, 2))
    for what in ("first", "again"):
        began = time.perf_counter()
        found = differences(before, after)
        seconds = time.perf_counter() - began
        print(f"diff of {leaves} leaves, {what}: {seconds:.2f} s, {len(found)} differ")


def measure_verification(mib: int) -> None:
    """Prints the seconds and the memory of a verification of ``mib`` MiB."""
    with tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory:
        server = ServerProcess(Path(directory) / "store", Path(directory))
        server.start()
        with store.connect(server.address) as client:
            run = client.run("bench/verify")
            leaf = np.random.default_rng(0).integers(0, 256, mib * MIB // 8, np.uint8)
            run.save(0, {str(n): leaf + np.uint8(n) for n in range(8)}).result()
            client.run("bench/small").save(0, {"x": leaf[:8]}).result()
        server.stop()
        server.start()  # so that the memory of the save does not count
        with store.connect(server.address) as client:
            client.run("bench/small").verify()
            rest = resident(server.pid, "VmRSS")
            began = time.perf_counter()
            found = client.run("bench/verify").verify()
            seconds = time.perf_counter() - began
        assert found.ok
        peak = resident(server.pid, "VmHWM")
        server.stop()
    rate = found.stored_bytes / MIB / seconds
    print(f"verification of {mib} MiB: {seconds:.2f} s, {rate:.0f} MiB/s")
    print(f"server: {rest} MiB at rest, {peak} MiB at the peak ({peak - rest} more)")
    bound = 2 * MAX_READS * READ_BYTES // MIB + KEPT_MIB
    print(f"bound over the server at rest: {bound} MiB, whatever the checkpoint weighs")


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=100_000)
    parser.add_argument("--mib", type=int, default=200)
    arguments = parser.parse_args()
    time_diff(arguments.leaves)
    measure_verification(arguments.mib)


if __name__ == "__main__":
    main()
