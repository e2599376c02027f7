"""Registers the services of the contract with a server.

The handlers are like gRPC's generated ones, with two differences. Messages that carry
chunks are not serialised or parsed by gRPC, because the service avoids copying them.
And requests are parsed here, so that malformed bytes are an error of the contract.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from storesvc.quota.quotas import Quotas
from storesvc.rpc.access import AccessService
from storesvc.rpc.boundary import KINDS, Context
from storesvc.rpc.checkpoints import CheckpointCalls
from storesvc.rpc.chunks import ChunkService
from storesvc.rpc.diff import DiffCalls
from storesvc.rpc.holds import HoldCalls
from storesvc.rpc.maintenance import MaintenanceService
from storesvc.rpc.message_budget import MessageBudget
from storesvc.rpc.permissions import authorize
from storesvc.rpc.request_limits import check_counts, check_size
from storesvc.rpc.requests import parsed
from storesvc.rpc.runs import RunCalls
from storesvc.rpc.security import Security
from storesvc.rpc.streams import released
from storesvc.rpc.tags import TagCalls
from storesvc.rpc.uploads import UploadService
from storesvc.store import Store
from storesvc_proto.v1 import (
    access_service_pb2,
    checkpoint_service_pb2,
    chunk_service_pb2,
    maintenance_service_pb2,
    upload_service_pb2,
)

SENT_BYTES: Final = 128 << 20
"""Memory for response messages that clients have not yet read, except chunks."""

PEER_BYTES: Final = 96 << 20
"""The part of it that one peer may use."""

_CHECKPOINTS: Final = checkpoint_service_pb2.DESCRIPTOR.services_by_name[
    "CheckpointService"
]
_UPLOADS: Final = upload_service_pb2.DESCRIPTOR.services_by_name["UploadService"]
_CHUNKS: Final = chunk_service_pb2.DESCRIPTOR.services_by_name["ChunkService"]
_MAINTENANCE: Final = maintenance_service_pb2.DESCRIPTOR.services_by_name[
    "MaintenanceService"
]

_ACCESS: Final = access_service_pb2.DESCRIPTOR.services_by_name["AccessService"]

SERVICES: Final = tuple(
    service.full_name
    for service in (_CHECKPOINTS, _UPLOADS, _CHUNKS, _MAINTENANCE, _ACCESS)
)
"""Full names of the services, for the health service."""

_Method = Callable[[Any, Context], Any]
"""A method of a servicer: a coroutine function or an asynchronous generator
function."""

M = TypeVar("M", bound=Message)


class CheckpointService(CheckpointCalls, DiffCalls, HoldCalls, RunCalls, TagCalls):
    """The catalog."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent = MessageBudget(SENT_BYTES, PEER_BYTES, purpose="responses")


def handlers(
    store: Store, security: Security, quotas: Quotas
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Returns the handlers of all services of a store."""
    return (
        handler_of(_CHECKPOINTS, CheckpointService(store)),
        handler_of(
            _UPLOADS, UploadService(store, quotas), raw_requests={"WriteChunks"}
        ),
        handler_of(_CHUNKS, ChunkService(store), raw_responses={"ReadChunks"}),
        handler_of(_MAINTENANCE, MaintenanceService(store)),
        handler_of(_ACCESS, AccessService(store, security, quotas)),
    )


def handler_of(
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
    """Returns a method that parses one serialised request, and checks its size and its
    permissions."""

    async def call(data: bytes, context: Context) -> Any:
        check_size(kind.DESCRIPTOR.full_name, len(data))
        request = parsed(kind, data)
        check_counts(request)
        await authorize(rpc, request)
        return await method(request, context)

    # Methods with one request and a stream of responses write these to the context.
    assert not inspect.isasyncgenfunction(method)
    return call


def _parsing_each(rpc: str, method: _Method, kind: type[Message]) -> _Method:
    """Returns a method that parses each request of a stream when it is awaited, and
    checks the permissions that the first one requires."""

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
    async with released(stream):
        async for data in stream:
            request = parsed(kind, data)
            if is_first:
                await authorize(rpc, request)
                is_first = False
            yield request


def _class(described: Descriptor) -> type[Message]:
    found: type[Message] = GetMessageClass(described)
    return found
