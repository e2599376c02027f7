"""Measures the first byte of files that a store serves as a repository.

    python -m benchmarks hub [--leaves 3000] [--requests 16]

A model of leaves of 256 KiB on tmpfs, in one file, served by ``storectl hub`` and by
``storectl serve --hub-port``. Times are from the request to the first byte of its
body: of the first request of a server, which reads the manifest and computes the header
of the file, of whole files, and of ranges of 64 MiB at random places, as streamers
read.
"""

import argparse
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import numpy as np

import storesvc_client as store
from benchmarks.speed.rounds import PLACES
from tests.support.command_line import COMMAND
from tests.support.server_process import ServerProcess

RUN: Final = "bench/hub"
FILE: Final = f"/{RUN}/resolve/1/model.safetensors"
RANGE_BYTES: Final = 64 << 20


def main() -> None:
    """Prints a line for each server and kind of request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", type=int, default=3000)
    parser.add_argument("--requests", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="storesvc-bench-", dir=PLACES["tmpfs"]
    ) as d:
        root = Path(d) / "store"
        leaf = np.random.default_rng(0).random((256, 256), np.float32)
        tree = {f"layers.{n}.weight": leaf + n for n in range(arguments.leaves)}
        with store.connect(root.as_uri()) as client:
            client.run(RUN).save(1, tree).result()
        print(f"{'first byte, ms':36}{'median':>8}{'most':>8}")
        for name, serve in (
            ("storectl hub", _serve_alone),
            ("storectl serve --hub-port", _serve_with_calls),
        ):
            with serve(root, Path(d)) as (address, token):
                _measure(name, address, token, arguments.requests)


@contextmanager
def _serve_alone(root: Path, folder: Path) -> Iterator[tuple[str, str]]:
    process = subprocess.Popen(
        [*COMMAND, "--store", root.as_uri(), "hub", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        settings = dict(each.split("=", 1) for each in line.split()[1:])
        yield settings["HF_ENDPOINT"], settings["HF_TOKEN"]
    finally:
        process.kill()
        process.wait()


@contextmanager
def _serve_with_calls(root: Path, folder: Path) -> Iterator[tuple[str, str]]:
    server = ServerProcess(root, folder, "--hub-port", "0")
    server.start()
    try:
        found = re.search(r"hub at (http://\S+?)[,;\s]", server.log)
        assert found, server.log
        yield found[1], ""
    finally:
        server.kill()


def _measure(name: str, address: str, token: str, count: int) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
        first = _time_first_byte(client)
        whole = [_time_first_byte(client) for _ in range(count // 4)]
        size = int(client.head(FILE).headers["content-length"])
        drawn = random.Random(0)
        ranges = []
        for _ in range(count):
            start = drawn.randrange(max(1, size - RANGE_BYTES))
            asked = f"bytes={start}-{start + RANGE_BYTES - 1}"
            ranges.append(_time_first_byte(client, asked))
    for what, seconds in (
        ("the first request", [first]),
        ("the whole file", whole),
        ("ranges of 64 MiB", ranges),
    ):
        print(
            f"{name}: {what}".ljust(36)
            + f"{1e3 * median(seconds):8.0f}{1e3 * max(seconds):8.0f}",
            flush=True,
        )


def _time_first_byte(client: httpx.Client, asked: str = "") -> float:
    began = time.perf_counter()
    with client.stream("GET", FILE, headers={"Range": asked} if asked else {}) as got:
        got.raise_for_status()
        body = got.iter_raw()
        next(body)
        taken = time.perf_counter() - began
        for _ in body:  # a server that still reads for this one would delay the next
            pass
    return taken
