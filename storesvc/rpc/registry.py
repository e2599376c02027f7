"""Handlers: what a server calls the methods of a service by.

Like the generated ones, with two differences. Some methods take, or answer with,
messages that are left serialised: those that carry chunks. And requests are parsed
here and not by gRPC, so that bytes that are no message are an error of the contract.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from storesvc.rpc.boundary import Context, refusals, released
from storesvc.rpc.parsing import parsed
from storesvc.rpc.request_limits import check_request

_Method = Callable[[Any, Context], Any]
"""A method of a servicer: a coroutine function, or one of an asynchronous generator."""

M = TypeVar("M", bound=Message)

_KINDS: Final[dict[tuple[bool, bool], Callable[..., Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests, and responses, are streams."""


def handler_of(
    service: ServiceDescriptor,
    servicer: object,
    *,
    raw_requests: Collection[str] = (),
    raw_responses: Collection[str] = (),
) -> grpc.GenericRpcHandler:
    """Returns the handler of a service.

    Args:
        service: As the contract describes it.
        servicer: Has a method for each of the service's.
        raw_requests: Methods that take serialised requests, and parse them.
        raw_responses: Methods that answer with serialised responses.
    """
    methods = {}
    for method in service.methods:
        name = method.name
        behaviour = getattr(servicer, name)
        if name not in raw_requests:
            request = _class(method.input_type)
            if method.client_streaming:
                behaviour = _with_parsed_stream(behaviour, request)
            else:
                behaviour = _with_parsed_request(behaviour, request)
        methods[name] = _KINDS[method.client_streaming, method.server_streaming](
            behaviour,
            request_deserializer=None,
            response_serializer=(
                None
                if name in raw_responses
                else _class(method.output_type).SerializeToString
            ),
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _with_parsed_request(method: _Method, kind: type[Message]) -> _Method:
    """Returns a method that takes one serialised request, within the limits."""

    async def call(data: bytes, context: Context) -> Any:
        async with refusals(context):
            request = parsed(kind, data)
            check_request(request)
        return await method(request, context)

    # those that stream their responses write them to the context
    assert not inspect.isasyncgenfunction(method)
    return call


def _with_parsed_stream(method: _Method, kind: type[Message]) -> _Method:
    """Returns a method that takes a stream of serialised requests.

    Each is parsed where the method awaits it, so the method's own refusals answer.
    """

    async def call(stream: AsyncIterator[bytes], context: Context) -> Any:
        return await method(_parsed_each(kind, stream), context)

    async def generate(
        stream: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[Any]:
        async with aclosing(method(_parsed_each(kind, stream), context)) as responses:
            async for response in responses:
                yield response

    return generate if inspect.isasyncgenfunction(method) else call


async def _parsed_each(kind: type[M], stream: AsyncIterator[bytes]) -> AsyncIterator[M]:
    async with released(stream):
        async for data in stream:
            yield parsed(kind, data)


def _class(described: Descriptor) -> type[Message]:
    found: type[Message] = GetMessageClass(described)
    return found
