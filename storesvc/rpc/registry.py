"""Registers the services of the contract, and the health service, with a server.

The handlers are like gRPC's generated ones, with two differences. Messages that carry
chunks are not serialised or parsed by gRPC, because the service avoids copying them.
And requests are parsed here, so that malformed bytes are an error of the contract.

grpcio's own health service (``grpc.health.v1``) is not used: if one watch ends there,
the other watches miss changes, and their clients would continue to call a server that
stops. Here a server is SERVING until it drains.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from storesvc.quota import Quotas
from storesvc.rpc.access_service import AccessService
from storesvc.rpc.calls import Security
from storesvc.rpc.checkpoint_service import CheckpointService
from storesvc.rpc.maintenance_service import ChunkService, MaintenanceService
from storesvc.rpc.methods import authorize
from storesvc.rpc.requests import check_counts, check_size, parse_message
from storesvc.rpc.status import KINDS, Context, note_status, parse_host
from storesvc.rpc.streams import release_messages
from storesvc.rpc.upload_service import UploadService
from storesvc.store import Store
from storesvc_proto.v1 import (
    access_service_pb2,
    checkpoint_service_pb2,
    chunk_service_pb2,
    maintenance_service_pb2,
    upload_service_pb2,
)

MAX_WATCHES: Final = 4096
"""Maximum watches of a process, of 25 kB each. A host may have as many as it leaves to
others."""


class HealthCalls(HealthServicer):
    """Reports the health of the server (name "") and of each service."""

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset({"", *services})
        self._drains = asyncio.Event()
        self._ends = asyncio.Event()
        self._watches = Counter[str]()

    def drain(self) -> None:
        """Reports NOT_SERVING from now on, so that clients use another server."""
        self._drains.set()

    def end(self) -> None:
        """Ends the watches, which have no end of their own."""
        self._ends.set()

    async def Check(
        self, request: HealthCheckRequest, context: Context
    ) -> HealthCheckResponse:
        if request.service not in self._names:
            note_status(grpc.StatusCode.NOT_FOUND, "")
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._health(request)

    async def Watch(
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        host = parse_host(context.peer())
        if self._watches[host] >= MAX_WATCHES - self._watches.total():
            # As the protocol has it, its client goes on as if the server were healthy.
            note_status(grpc.StatusCode.UNIMPLEMENTED, "")
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "too many watches")
        self._watches[host] += 1
        try:
            if not self._drains.is_set():
                yield self._health(request)
                await self._drains.wait()
            yield self._health(request)
            await self._ends.wait()
        finally:
            self._watches[host] -= 1
            self._watches += Counter()  # forgets hosts without a watch

    def _health(self, request: HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        if self._drains.is_set():
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)


_SERVICES: Final = {
    name: service
    for file in (
        checkpoint_service_pb2,
        upload_service_pb2,
        chunk_service_pb2,
        maintenance_service_pb2,
        access_service_pb2,
    )
    for name, service in file.DESCRIPTOR.services_by_name.items()
}

SERVICES: Final = tuple(service.full_name for service in _SERVICES.values())
"""Full names of the services, for the health service."""

_Method = Callable[[Any, Context], Any]
"""A method of a servicer: a coroutine function or an asynchronous generator
function."""

M = TypeVar("M", bound=Message)


def handlers(
    store: Store, security: Security, quotas: Quotas
) -> tuple[grpc.GenericRpcHandler, ...]:
    servicers = (
        CheckpointService(store),
        UploadService(store, quotas),
        ChunkService(store),
        MaintenanceService(store),
        AccessService(store, security, quotas),
    )
    return tuple(
        make_handler(
            _SERVICES[type(servicer).__name__],
            servicer,
            raw_requests={"WriteChunks"},
            raw_responses={"ReadChunks"},
        )
        for servicer in servicers
    )


def make_handler(
    service: ServiceDescriptor,
    servicer: object,
    *,
    raw_requests: Collection[str] = (),
    raw_responses: Collection[str] = (),
) -> grpc.GenericRpcHandler:
    """Returns the handler of a service.

    Args:
        service: Descriptor of the service.
        servicer: Object with a method for each rpc.
        raw_requests: Rpcs whose methods take serialised requests, and parse them.
        raw_responses: Rpcs whose methods return serialised responses.
    """
    methods = {}
    for rpc in service.methods:
        name = rpc.name
        method = getattr(servicer, name)
        if name not in raw_requests:
            request = _class(rpc.input_type)
            parsing = _parsing_each if rpc.client_streaming else _parsing
            method = parsing(name, method, request)
        serializer = _class(rpc.output_type).SerializeToString
        methods[name] = KINDS[rpc.client_streaming, rpc.server_streaming](
            method,
            request_deserializer=None,
            response_serializer=None if name in raw_responses else serializer,
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _parsing(rpc: str, method: _Method, kind: type[Message]) -> _Method:
    """Returns a method that parses and checks one serialised request. A stream of
    responses is written to the context."""

    async def call(data: bytes, context: Context) -> Any:
        check_size(kind.DESCRIPTOR.full_name, len(data))
        request = parse_message(kind, data)
        check_counts(request)
        await authorize(rpc, request)
        return await method(request, context)

    return call


def _parsing_each(rpc: str, method: _Method, kind: type[Message]) -> _Method:
    """Returns a method that parses each request of a stream, and checks the first."""

    async def call(stream: AsyncIterator[bytes], context: Context) -> Any:
        return await method(_parsed_each(rpc, kind, stream), context)

    async def generate(
        stream: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Any]:
        requests = _parsed_each(rpc, kind, stream)
        async with aclosing(method(requests, context)) as responses:
            async for response in responses:
                yield response

    return generate if inspect.isasyncgenfunction(method) else call


async def _parsed_each(
    rpc: str, kind: type[M], stream: AsyncIterator[bytes]
) -> AsyncIterator[M]:
    is_first = True
    async with release_messages(stream):
        async for data in stream:
            request = parse_message(kind, data)
            if is_first:
                await authorize(rpc, request)
                is_first = False
            yield request


def _class(described: Descriptor) -> type[Message]:
    found: type[Message] = GetMessageClass(described)
    return found
