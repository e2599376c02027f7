"""Idle connections of strangers take no descriptors that the calls of others need."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import pytest

import storesvc_client as store
from tests.support.server_process import ServerProcess

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The first bytes of a client of HTTP/2, with empty settings."""

TREE: Final = {f"leaf-{n}": np.arange(1000 + n) for n in range(20)}


@contextmanager
def serving(tmp_path: Path, *, soft: int, hard: int) -> Iterator[ServerProcess]:
    """Serves a store in a process that starts with limits of descriptors."""
    server = ServerProcess(tmp_path / "store", tmp_path)
    server.launch()
    # Python itself takes longer to start than this call
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
    server.await_ready()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def connections(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Opens connections without a call, half of which begin to speak HTTP/2."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, soft + 2 * count), hard))
    host, _, port = address.rpartition(":")
    with ExitStack() as held:
        opened = [
            held.enter_context(socket.create_connection((host, int(port))))
            for _ in range(count)
        ]
        for each in opened[::2]:
            each.sendall(PREFACE)
        yield opened
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_idle_connections_of_a_stranger_fail_no_save(tmp_path: Path) -> None:
    with (
        serving(tmp_path, soft=1024, hard=8192) as server,
        store.connect(server.address) as client,
        connections(server.address, 1100),
        store.connect(server.address, timeout=10) as other,
    ):
        client.run("a/b").save(1, TREE).result()
        other.run("a/c").save(1, TREE).result()

        assert np.array_equal(TREE["leaf-7"], client.run("a/c").restore(1)["leaf-7"])


@pytest.mark.slow
def test_connections_leave_descriptors_for_the_files_of_a_store(tmp_path: Path) -> None:
    with (
        serving(tmp_path, soft=400, hard=400) as server,
        store.connect(server.address) as client,
        connections(server.address, 600) as opened,
    ):
        client.run("a/b").save(1, TREE).result()

        assert np.array_equal(TREE["leaf-7"], client.run("a/b").restore(1)["leaf-7"])
        opened[-1].settimeout(5)
        assert opened[-1].recv(1) == b"", "a connection above the limit is closed"
