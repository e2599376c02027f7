"""A connection has as many channels as bulk needs, and ends them all."""

from pathlib import Path

import grpc
import pytest

import storesvc_client as store
from storesvc_client._channel import (
    DEFAULT_STAGING_BYTES,
    Connection,
    open_connection,
)
from storesvc_client.errors import translated
from storesvc_proto.v1 import maintenance_service_pb2 as api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub


def connection(target: str) -> Connection:
    return open_connection(
        target,
        ca=None,
        insecure=False,
        timeout=10,
        staging_bytes=DEFAULT_STAGING_BYTES,
    )


def ask(channel: grpc.Channel) -> str:
    with translated("here"):
        request = api.GetServerInfoRequest()
        return MaintenanceServiceStub(channel).GetServerInfo(request).store_uid


def sockets(port: str) -> set[str]:
    """The inodes of sockets that are connected to a port of this machine."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()]
    end = f":{int(port):04X}"
    return {row[9] for row in rows if row[2].endswith(end) and row[3] == "01"}


def test_each_channel_has_a_socket_of_its_own_and_all_end_with_it(
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


def test_an_embedded_store_has_them_too() -> None:
    opened = connection("memory://")

    assert 1 == len({ask(channel) for channel in opened.channels(2)})
    opened.close()
