"""Publishes the beginning and the end of each call, and counts its bytes.

Methods and statuses have the names of gRPC's own metrics (gRFC A66), and the same is
counted: messages without their five bytes of framing. Calls of methods that the server
does not have are counted as "other".
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final, cast

import grpc
import grpc.aio

from storesvc.access.call import current
from storesvc.rpc.boundary import KINDS, Context, Continuation, Handler, method_of
from storesvc.telemetry.events import CallEnded, CallStarted, Span, publish
from storesvc.telemetry.scope import CallScope, scope

OTHER: Final = "other"
"""Method of all calls of methods that the server does not have."""

TRACEPARENT: Final = "traceparent"
"""Metadata with the span of the caller (W3C Trace Context)."""


class MeasuringInterceptor(grpc.aio.ServerInterceptor):
    """Measures all calls; it must precede all other interceptors."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler of a call, wrapped in its measurement."""
        found = CallScope(
            method=handler_call_details.method.removeprefix("/"),
            request_id=uuid.uuid4().hex,
            parent=_parent_of(handler_call_details),
        )
        scope.set(found)
        handler = await continuation(handler_call_details)
        if handler is not None:
            return _measured(handler, found)
        publish(CallStarted(method=OTHER))
        publish(_ended(found, Span(), method=OTHER, status="UNIMPLEMENTED"))
        return None


def _measured(handler: Any, found: CallScope) -> Handler:
    """Returns a handler that counts its messages and publishes its end."""
    method: Callable[[Any, Context], Any] = method_of(handler)
    parse, serialize = handler.request_deserializer, handler.response_serializer

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        with _published(found, context):
            async with aclosing(method(request, context)) as responses:
                async for response in responses:
                    yield response

    def received(data: bytes) -> Any:
        found.received_bytes += len(data)
        return data if parse is None else parse(data)

    def sent(message: Any) -> bytes:
        data: bytes = message if serialize is None else serialize(message)
        found.sent_bytes += len(data)
        return data

    async def call(request: Any, context: Context) -> Any:
        with _published(found, context):
            response = await method(request, context)
            # Here, because gRPC serializes a single response after the end of the call.
            return response if handler.response_streaming else sent(response)

    return KINDS[handler.request_streaming, handler.response_streaming](
        generate if inspect.isasyncgenfunction(method) else call,
        request_deserializer=received,
        response_serializer=sent if handler.response_streaming else None,
    )


@contextmanager
def _published(found: CallScope, context: Context) -> Iterator[None]:
    span = Span()
    publish(CallStarted(method=found.method))
    status = ""
    try:
        yield
        # 0 unless a handler of gRPC's own services has set it, in spite of its type
        code = cast("object", context.code())
        status = code.name if isinstance(code, grpc.StatusCode) else "OK"
    except (asyncio.CancelledError, GeneratorExit):
        status = "CANCELLED"
        raise
    except BaseException:
        status = "UNKNOWN"  # gRPC's status for an exception of a handler
        raise
    finally:
        publish(_ended(found, span, method=found.method, status=found.status or status))


def _ended(found: CallScope, span: Span, *, method: str, status: str) -> CallEnded:
    call = current.get()
    return CallEnded(
        method=method,
        status=status,
        reason=found.reason,
        start=span.start,
        seconds=span.seconds,
        received_bytes=found.received_bytes,
        sent_bytes=found.sent_bytes,
        request_id=found.request_id,
        principal=call.principal.name if call is not None else "",
        subject=dict(call.subject) if call is not None else {},
        parent=found.parent,
    )


def _parent_of(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return ""
