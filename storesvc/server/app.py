"""The server: the services of one store behind one address.

Limits are those that gRPC hardening guides ask for; what a message may weigh is
gRPC's default, which is also the fastest size to ship bytes in.
"""

import asyncio
import ctypes
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from storesvc.errors import InvalidFieldError
from storesvc.format import layout
from storesvc.rpc import services
from storesvc.rpc.boundary import MAX_MESSAGE_BYTES
from storesvc.rpc.health import HealthCalls
from storesvc.rpc.read_only import ReadOnly
from storesvc.rpc.registry import handler_of
from storesvc.server.tls import Tls
from storesvc.storage.tensorstore_bucket import KvBucket
from storesvc.store import Store
from storesvc_proto.v1 import (
    checkpoint_service_pb2,
    chunk_service_pb2,
    maintenance_service_pb2,
    upload_service_pb2,
)

DRAIN_SECONDS: Final = 10.0
"""How long calls under way may go on after SIGTERM. Streams that this cuts go on at
another server, or at this one when it is back, where they stopped."""

NOTICE_SECONDS: Final = 0.5
"""How long a server that stops takes calls still: until clients that watch its health
have heard."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 100),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_connection_idle_ms", 15 * 60_000),
    # so that connections spread anew over servers; clients go on in a new one
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 10 * 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # a message that unpacks to more than it weighs is an attack here
    ("grpc.per_message_decompression", 0),
)

SERVICES: Final = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (checkpoint_service_pb2, "CheckpointService"),
        (upload_service_pb2, "UploadService"),
        (chunk_service_pb2, "ChunkService"),
        (maintenance_service_pb2, "MaintenanceService"),
    )
)
"""Full names, for the health service."""

# from glibc's malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


async def open_store(root: str, *, is_read_only: bool = False) -> Store:
    """Returns the store at a root; makes one where there is none.

    Args:
        root: Of the store.
        is_read_only: Whether nothing is written there: then a store must be there.

    Raises:
        InvalidFieldError: The root is not a URI of a storage we know.
        FormatUnsupportedError: It is in a format that this code does not know.
        StorageUnavailableError: The storage does not answer.
    """
    bucket = await KvBucket.open(root)
    if is_read_only and await bucket.read(layout.STORE) is None:
        raise InvalidFieldError(
            f"root {root}: expected a store, as it is served read-only, got none; "
            "correct the root, or serve it for writing, which makes one"
        )
    store = await Store.open(bucket, is_read_only=is_read_only)
    if root.startswith("file:") and not is_read_only:  # others are never full
        await store.reserve.keep()
    return store


@asynccontextmanager
async def running(
    store: Store,
    address: str,
    *,
    tls: Tls | None = None,
    shares_port: bool = False,
    notice_seconds: float = 0,
    read_only: str = "",
) -> AsyncIterator[int]:
    """Serves a store at an address while the context lasts; yields the port.

    Args:
        store: The store.
        address: Where to take calls.
        tls: The server's certificate; None serves plaintext.
        shares_port: Whether others may serve at the port: calls are then spread over
            them at random.
        notice_seconds: How long it takes calls still, at the end, while its health
            tells clients and balancers to go elsewhere.
        read_only: The root, where calls that change the store are rejected; "": none
            are.

    Raises:
        InvalidFieldError: The address cannot be bound, or the certificates cannot be
            used.
    """
    server = grpc.aio.server(
        interceptors=[ReadOnly(read_only)] if read_only else [],
        options=(*OPTIONS, ("grpc.so_reuseport", int(shares_port))),
    )
    server.add_generic_rpc_handlers(
        (
            handler_of(
                checkpoint_service_pb2.DESCRIPTOR.services_by_name["CheckpointService"],
                services.CheckpointService(store),
            ),
            handler_of(
                upload_service_pb2.DESCRIPTOR.services_by_name["UploadService"],
                services.UploadService(store),
                raw_requests={"WriteChunks"},
            ),
            handler_of(
                chunk_service_pb2.DESCRIPTOR.services_by_name["ChunkService"],
                services.ChunkService(store),
                raw_responses={"ReadChunks"},
            ),
            handler_of(
                maintenance_service_pb2.DESCRIPTOR.services_by_name[
                    "MaintenanceService"
                ],
                services.MaintenanceService(store),
            ),
        )
    )
    health = HealthCalls(SERVICES)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        if tls:
            port = server.add_secure_port(address, tls.credentials())
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as e:
        raise unusable(address) from e
    await server.start()
    try:
        yield port
    finally:
        health.drain()
        await asyncio.sleep(notice_seconds)
        # these would go on for as long as they may
        store.watcher.close()
        health.end()
        await server.stop(DRAIN_SECONDS)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def keep_freed_memory() -> None:
    """Lets glibc keep the memory of messages instead of giving each back.

    Every 2 MiB message would otherwise be mapped, zeroed and unmapped by the kernel,
    which costs more than all the rest that is done with it. What is kept is bounded
    by what was in use at once. Elsewhere than on glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.mallopt(_M_ARENA_MAX, 2)  # each arena keeps memory of its own


def unusable(address: str) -> InvalidFieldError:
    """Returns what refuses an address that cannot be bound."""
    return InvalidFieldError(
        f"address {address}: it is in use or not of this machine; take another"
    )
