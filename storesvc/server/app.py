"""Serves one store at one address: all services, the health service, TLS.

The limits follow gRPC's hardening guides. The maximum message size is gRPC's default
(4 MiB), which is also the fastest size to transfer bytes in.
"""

import asyncio
import ctypes
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final, NamedTuple

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from storesvc.errors import InvalidFieldError, StorageUnavailableError
from storesvc.format import layout
from storesvc.quota import Quotas
from storesvc.rpc import registry
from storesvc.rpc.calls import OPEN, CallInterceptor, MeasuringInterceptor, Security
from storesvc.rpc.in_process import InProcessCalls
from storesvc.rpc.methods import ReadOnly
from storesvc.rpc.registry import HealthCalls
from storesvc.rpc.status import MAX_MESSAGE_BYTES, ErrorInterceptor
from storesvc.server.security import Tls
from storesvc.storage.bucket import invalid_place
from storesvc.storage.object_bucket import TensorStoreBucket
from storesvc.store import Store

DRAIN_SECONDS: Final = 10.0
"""Maximum time for calls in flight after SIGTERM. Streams that are cut off continue on
another server, or on this one after its restart."""

NOTICE_SECONDS: Final = 0.5
"""Time during which a stopping server still accepts calls, until clients that watch its
health have received the change."""

MAX_CONNECTIONS: Final = 1 << 15
"""Maximum connections of a server."""

RESERVED_DESCRIPTORS: Final = 4096
"""File descriptors that connections leave to the files of the store and of the server;
half of them, where there are fewer than twice as many."""

_MAX_METADATA_BYTES: Final = 16 << 10
"""A token of the maximum size (8 KiB) and all else that a client sends with a call."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 100),
    # Between the two limits, gRPC would reject some calls at random.
    ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 20_000),
    ("grpc.http2.max_ping_strikes", 2),
    # The client library always watches the health of a server. Other clients connect
    # again for the next call.
    ("grpc.max_connection_idle_ms", 60_000),
    # Connections are rebalanced over the servers; clients continue on a new one.
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 10 * 60_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A compressed message that expands beyond the limit would be an attack.
    ("grpc.per_message_decompression", 0),
)

# from glibc's malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


async def open_store(root: str, *, is_read_only: bool = False) -> Store:
    """Opens the store at a root; creates one if there is none.

    Args:
        is_read_only: True to write nothing there; the store must exist.

    Raises:
        InvalidFieldError: The root is not a URI of a supported storage, or holds no
            store and is opened read-only.
        FormatUnsupportedError: The store's format is not known to this code.
        StorageUnavailableError: The storage did not answer.
    """
    try:
        bucket = await TensorStoreBucket.open(root)
        if is_read_only and await bucket.read(layout.STORE) is None:
            raise InvalidFieldError(
                f"root {root}: expected a store, because it is served read-only, got "
                "none; correct the root, or serve it for writing, which creates one"
            )
        store = await Store.open(bucket, is_read_only=is_read_only)
        # Buckets do not run full.
        if root.startswith("file:") and not is_read_only:
            await store.reserve.keep()
    except StorageUnavailableError as e:
        if root.startswith("file:") and (wrong := invalid_place(root, e)):
            raise wrong from e
        raise
    return store


class Serving(NamedTuple):
    """A server that runs."""

    port: int
    calls: InProcessCalls


@asynccontextmanager
async def running(
    store: Store,
    address: str,
    *,
    tls: Tls | None = None,
    notice_seconds: float = 0,
    read_only: str = "",
    security: Security = OPEN,
    max_connections: int = MAX_CONNECTIONS,
    inner_address: str = "",
) -> AsyncIterator[Serving]:
    """Serves a store at an address while the context lasts.

    Args:
        tls: Certificates of the server; None serves plaintext.
        notice_seconds: Seconds between the health change and the end of accepting
            calls, so that clients and load balancers can switch to another server.
        read_only: The root if calls that change the store are rejected, else "".
        max_connections: Connections at a time; others are closed at once.
        inner_address: Address of a Unix socket that only this process can enter, which
            is served, too, without TLS; "" for none.

    Yields:
        The port, and the calls that this process can make without it.

    Raises:
        InvalidFieldError: The address cannot be bound, or the certificates are
            unusable.
    """
    quotas = Quotas(security.quota_rules, store.usage.stored)
    # The quotas first: what they reject is no intent of the audit log.
    observers, check = (quotas, *security.observers), store.format.check
    security = replace(security, observers=observers, check_format=check)
    interceptors: list[grpc.aio.ServerInterceptor] = [
        MeasuringInterceptor(),
        ErrorInterceptor(),
        CallInterceptor(security),
    ]
    if read_only:
        interceptors.append(ReadOnly(read_only))
    server = grpc.aio.server(
        interceptors=interceptors,
        # Off: a second server at the same address must fail, not take half the calls.
        options=(
            *OPTIONS,
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", max_connections),
        ),
    )
    handlers = registry.handlers(store, security, quotas)
    server.add_generic_rpc_handlers(handlers)
    calls = InProcessCalls(interceptors, handlers)
    health = HealthCalls(registry.SERVICES)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        if tls:
            port = server.add_secure_port(address, tls.credentials())
        else:
            port = server.add_insecure_port(address)
        if inner_address:
            server.add_insecure_port(inner_address)
    except RuntimeError as e:
        raise unusable(address) from e
    await server.start()
    try:
        yield Serving(port, calls)
    finally:
        # 1. Report NOT_SERVING, and keep accepting calls until clients have seen it:
        #    until then they would send a rejected call here again, and fail.
        health.drain()
        await asyncio.sleep(notice_seconds)
        # 2. End the streams that have no end of their own, or step 3 would wait for its
        #    full time. Before step 1, their clients would open them here again.
        store.watcher.close()
        health.end()
        # 3. Reject new calls; wait for those in flight. A stream that is cut off must
        #    send again what was not acknowledged.
        await asyncio.gather(server.stop(DRAIN_SECONDS), calls.drain(DRAIN_SECONDS))
        # 4. Calls share the writes of leases, which outlive the calls of step 3.
        await store.uploads.leases.end()


def take_descriptors() -> int:
    """Raises the soft limit of file descriptors, and returns how many connections it
    has room for, next to files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_CONNECTIONS + RESERVED_DESCRIPTORS
    limit = max(soft, most if hard == resource.RLIM_INFINITY else min(hard, most))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return min(MAX_CONNECTIONS, limit - min(RESERVED_DESCRIPTORS, limit // 2))


def keep_freed_memory() -> None:
    """Configures glibc to keep freed memory instead of returning it to the kernel.

    Otherwise the kernel maps, zeroes and unmaps the memory of every 2 MiB message,
    which costs more than all other work on it. The memory kept is bounded by the peak
    in use. Does nothing without glibc.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the maximum of glibc
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
        libc.mallopt(_M_ARENA_MAX, 2)  # each arena keeps its own memory


def unusable(address: str) -> InvalidFieldError:
    """Returns the error for an address that cannot be bound."""
    return InvalidFieldError(
        f"address {address}: it is in use or not of this machine; use another one"
    )
