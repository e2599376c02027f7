"""Translates the errors of the service into gRPC statuses; no other module does.

`ErrorInterceptor` wraps every rpc of the contract, so that handlers only raise:

1. An error of the service becomes its status (`make_status`), with one ``ErrorInfo``.
2. A call that is still running shortly before its deadline fails with the cause of the
   delay. gRPC's own DEADLINE_EXCEEDED would not name one.
3. Any other exception is a bug: it is logged with its traceback and an id, and the
   client gets only the id.
"""

import asyncio
import inspect
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from storesvc import errors
from storesvc.auth.call import current
from storesvc.errors import (
    InvalidFieldError,
    StalledError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.format.names import InvalidNameError
from storesvc.quota import call_namespace
from storesvc.rpc.requests import MESSAGE_TYPE
from storesvc.storage.hedging import LogThrottle
from storesvc.telemetry.events import BugFound, publish, scope

DOMAIN: Final = "storesvc"
"""``google.rpc.ErrorInfo.domain``."""

MAX_TEXT_BYTES: Final = 1000
"""Maximum bytes of a status message. It is sent twice in headers, and gRPC drops
headers above 8 KiB completely."""

MAX_METADATA_BYTES: Final = 200
"""Maximum bytes of a value of ``ErrorInfo.metadata``."""

REQUEST_ID: Final = "x-request-id"
"""Trailing metadata with the id of a call, as in the log and the audit log."""

_NO_RETRY: Final = ("grpc-retry-pushback-ms", "-1")
"""Disables gRPC's transparent retries of a failed call. Its last attempt could exceed
the deadline and hide the cause; the client library retries itself."""


def make_status(error: errors.StoreError) -> status_pb2.Status:
    metadata = {k: _cut(v, MAX_METADATA_BYTES) for k, v in error.metadata.items()}
    if call := current.get():
        metadata["request_id"] = call.request_id
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata=metadata
    )
    details: list[Message] = [info]
    if error.retry_seconds is not None:
        delay = Duration(seconds=error.retry_seconds)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=code_pb2.Code.Value(error.code), message=_cut(str(error), MAX_TEXT_BYTES)
    )
    for detail in details:
        status.details.add().Pack(detail)
    return status


def _cut(text: str, size: int) -> str:
    """Cuts a text to a maximum of bytes: keeps its start and its end."""
    data = text.encode(errors="replace")
    if len(data) <= size:
        return text
    half = (size - 5) // 2
    ends = (data[:half], data[-half:])
    return " ... ".join(end.decode(errors="ignore") for end in ends)


async def abort(
    context: "grpc.aio.ServicerContext[object, object]", error: errors.StoreError
) -> NoReturn:
    """Ends a call with the status of an error."""
    status = rpc_status.to_status(make_status(error))
    note_status(status.code, error.reason)
    try:
        await context.abort(
            status.code,
            status.details,
            (*status.trailing_metadata, _NO_RETRY, *request_id_trailer()),
        )
    except grpc.aio.AbortError as e:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_clear, e))
        raise
    raise AssertionError("abort returned")


def note_status(code: grpc.StatusCode, reason: str) -> None:
    """Notes how the call in progress ends, for its measurement."""
    measured = scope.get()
    if measured is not None:
        measured.status, measured.reason = code.name, reason


def request_id_trailer() -> tuple[tuple[str, str], ...]:
    """Returns the trailing metadata that identifies the call in progress."""
    call = current.get()
    return ((REQUEST_ID, call.request_id),) if call is not None else ()


def _clear(error: BaseException, _: "asyncio.Task[object]") -> None:
    """Clears the frames of an error after its call has ended."""
    # gRPC stores the error of an aborted call, and the frames of the error refer to the
    # call: the cycle would keep a rejected request in memory until the next full
    # garbage collection of Python.
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__


MAX_MESSAGE_BYTES: Final = 4 << 20
"""Maximum bytes of a message in either direction: gRPC's default."""

CALL_SECONDS: Final = 60.0
"""Maximum time for the work of a call after its table has arrived."""

_RESPONSE_SECONDS: Final = 1.0
"""Time reserved before the deadline for sending the error."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]

KINDS: Final[dict[tuple[bool, bool], Callable[..., Handler]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""Constructors of handlers, by whether the requests and the responses are streams."""

_log = logging.getLogger(__name__)
_lines = LogThrottle()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Translates the errors of all rpcs of the contract into statuses."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not is_contract_method(handler_call_details.method):
            return handler
        return replace_method(
            handler, wrap_method(_translate_errors, handler_method(handler))
        )


def is_contract_method(method: str) -> bool:
    """Returns whether an rpc ("/package.Service/Method") belongs to this contract."""
    return method.startswith("/storesvc.v1.")


def handler_method(handler: Any) -> Callable[[Any, Context], Any]:
    method: Callable[[Any, Context], Any] = (
        handler.unary_unary
        or handler.unary_stream
        or handler.stream_unary
        or handler.stream_stream
    )
    return method


def replace_method(handler: Any, method: Callable[[Any, Context], Any]) -> Handler:
    """Returns a handler of the same kind that calls another method."""
    make = KINDS[handler.request_streaming, handler.response_streaming]
    return make(
        method,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def wrap_method(
    manager: Callable[[Context], AbstractAsyncContextManager[None]],
    method: Callable[[Any, Context], Any],
) -> Callable[[Any, Context], Any]:
    """Returns a method that runs another one inside a context manager of its call."""

    async def call(request: Any, context: Context) -> Any:
        async with manager(context):
            return await method(request, context)

    async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
        async with manager(context), aclosing(method(request, context)) as responses:
            async for response in responses:
                yield response

    return generate if inspect.isasyncgenfunction(method) else call


@asynccontextmanager
async def _translate_errors(context: Context) -> AsyncIterator[None]:
    """Ends a call with the status of its error, or shortly before its deadline."""
    # None without a deadline, in spite of its type
    left = cast("float | None", context.time_remaining())
    if left is not None:
        left -= min(left / 4, _RESPONSE_SECONDS)
    try:
        async with asyncio.timeout(left) as limit:
            yield
    except InvalidNameError as e:
        await abort(context, InvalidFieldError(str(e)))
    except StoreError as e:
        _log_throttled(e)
        await abort(context, e)
    except TimeoutError:
        if limit.expired():
            late = (
                "the call waited for the storage, or for its stream, until shortly "
                "before its deadline; retry, or allow more time"
            )
            await abort(context, StorageUnavailableError(late))
        late = f"the call took longer than {CALL_SECONDS:.0f} s; retry it"
        await abort(context, StalledError(late))
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 - a boundary: details go to the log only
        bug = uuid.uuid4().hex[:8]
        _log.exception("bug %s", bug)
        note_status(grpc.StatusCode.INTERNAL, "")
        publish(BugFound())
        await context.abort(
            grpc.StatusCode.INTERNAL,
            f"a bug of the server, {bug} in its log; please report it",
        )


def _log_throttled(error: StoreError) -> None:
    """Logs the errors of a storage, and requests that cannot be parsed."""
    if "read_only" in error.metadata:  # logged at the start; each restore causes one
        return
    if "storage" in error.metadata:
        kind = (type(error), error.metadata["storage"])
    elif MESSAGE_TYPE in error.metadata:
        kind = (type(error), MESSAGE_TYPE)
    else:
        return
    if _lines.admits(kind, now=time.monotonic()):
        _log.warning("%s", error)


def share_key(context: Context) -> str:
    """Returns whose calls share memory and turns: of a namespace if callers are
    restricted, else of the client's host."""
    call = current.get()
    if call is not None and call.policy is not None and (name := call_namespace(call)):
        return f"namespaces/{name}"
    return parse_host(context.peer())


def parse_host(peer: str) -> str:
    """Returns the host of a peer in gRPC's notation, without its port."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer
