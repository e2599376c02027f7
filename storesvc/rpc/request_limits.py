"""An interceptor that holds the limits of requests, before any handler sees them."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from storesvc.rpc.handling import Context, refusals
from storesvc.rpc.request_counts import check_request

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class RequestLimits(grpc.aio.ServerInterceptor):
    """Checks the requests of all calls that take a single one.

    Those of streams are checked as they come, by ``handling.following``.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith("/storesvc."):
            return handler
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _checked(handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _checked(handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler


def _checked(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A method that rejects requests beyond the limits before it does anything."""

    async def call(request: Any, context: Context) -> Any:
        if isinstance(request, Message):
            async with refusals(context):
                check_request(request)
        return await method(request, context)

    return call
