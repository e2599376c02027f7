"""A connection has several channels for bulk data, and closes all of them."""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from storesvc_client._rpc.connection import Connection, open_connection
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import maintenance_service_pb2 as api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub
from tests.support.sockets import sockets


def connection(target: str) -> Connection:
    return open_connection(
        target, ca=None, cert=None, key=None, insecure=False, timeout=10
    )


def ask(channel: grpc.Channel) -> str:
    with translate_rpc_errors("here"):
        request = api.GetServerInfoRequest()
        return MaintenanceServiceStub(channel).GetServerInfo(request).store_uid


@contextmanager
def relay(address: str, *, resets: int) -> Iterator[str]:
    """Serves a port that resets the first connections, and forwards later ones."""
    opened: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            for number in range(100):
                client = listener.accept()[0]
                opened.append(client)
                if number < resets:
                    at_once = struct.pack("ii", 1, 0)
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                    client.close()
                    continue
                server = socket.create_connection((host, int(port)))
                opened.append(server)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    host, _, port = address.rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        serving.join()
    for each in opened:
        each.close()


@pytest.mark.parametrize("resets", [0, 1, 2])
def test_a_call_survives_connections_that_are_reset_at_once(
    server_address: str, resets: int
) -> None:
    with (
        relay(server_address, resets=resets) as address,
        store.connect(address) as client,
    ):
        assert client.info().store_uid


def test_each_channel_has_its_own_socket_until_the_connection_closes(
    server_address: str,
) -> None:
    port = server_address.rpartition(":")[2]
    before = sockets(port)
    opened = connection(server_address)

    channels = opened.channels(3)
    assert channels == opened.channels(3)
    assert channels[:2] == opened.channels(2)
    assert opened.channel is channels[0]
    assert 1 == len({ask(channel) for channel in channels})
    assert 3 == len(sockets(port) - before)

    opened.close()
    for channel in channels:
        with pytest.raises(store.InvalidRequestError, match="closed"):
            ask(channel)
    assert channels == opened.channels(4)


def test_an_embedded_store_has_channels_too() -> None:
    opened = connection("memory://")

    assert 1 == len({ask(channel) for channel in opened.channels(2)})
    opened.close()


IMPORTS = """
import sys
import numpy as np
import storesvc_client as store
if "jax" in sys.argv:
    import jax
state = {"x": np.arange(1 << 20)}
with store.connect(sys.argv[1]) as client:
    before = {*sys.modules}
    run = client.run("tests/imports")
    run.save(1, {"x": np.arange(8)}).result()
    run.save(2, state).result()
    run.restore(2, like=state)
    print(*sorted({*sys.modules} - before))
"""


@pytest.mark.parametrize("libraries", [["jax"], []])
def test_the_first_save_and_restore_of_a_job_of_jax_import_nothing(
    tmp_path: Path, libraries: list[str]
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(tmp_path / "store"), *libraries],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    found = [name for name in run.stdout.split() if name.startswith("storesvc")]
    assert bool(found) == (not libraries), found
