"""Handlers: what a server calls the methods of a service by.

Like the generated ones, but that some methods take, or answer with, messages that are
left serialised: those that carry chunks.
"""

from collections.abc import Callable, Collection
from typing import Any, Final

import grpc
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

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
        raw_requests: Methods that take serialised requests.
        raw_responses: Methods that answer with serialised responses.
    """
    methods = {}
    for method in service.methods:
        name = method.name
        methods[name] = _KINDS[method.client_streaming, method.server_streaming](
            getattr(servicer, name),
            request_deserializer=(
                None if name in raw_requests else _class(method.input_type).FromString
            ),
            response_serializer=(
                None
                if name in raw_responses
                else _class(method.output_type).SerializeToString
            ),
        )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _class(described: Descriptor) -> type[Message]:
    found: type[Message] = GetMessageClass(described)
    return found
