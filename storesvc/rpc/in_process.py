"""Answers calls of the process that the server runs in, without a connection.

A call passes the same interceptors and the same handler as one that comes through a
socket, as serialised messages, and fails with the same statuses. Only calls with one
response are answered here: a stream of responses needs the flow control of gRPC.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

from storesvc.rpc.status import Continuation

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class InProcessCalls:
    """The calls of one server by its own process."""

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        handlers: Sequence[grpc.GenericRpcHandler],
    ) -> None:
        self._handlers = handlers
        self._find: Continuation = self._find_handler
        for interceptor in reversed(interceptors):
            self._find = partial(interceptor.intercept_service, self._find)
        self._running: set[asyncio.Task[Any]] = set()

    async def call(
        self,
        method: str,
        requests: Sequence[bytes],
        seconds: float | None,
        metadata: Metadata,
    ) -> bytes:
        """Makes a call of a method, "/package.Service/Method", with one serialised
        request or a stream of them, that ends after some seconds, if given; returns
        the serialised response.

        Raises:
            AioRpcError: The call failed.
        """
        details = cast("grpc.HandlerCallDetails", _Details(method, metadata))
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._running.add(task)
        context = _Context(metadata, seconds)
        try:
            handler = await self._find(details)
            async with asyncio.timeout(seconds):
                parsed = _parsed(handler.request_deserializer, requests)
                response: bytes = await (
                    handler.stream_unary(parsed, context)
                    if handler.request_streaming
                    else handler.unary_unary(await anext(parsed), context)
                )
                return response
        except grpc.aio.AbortError:
            assert context.error is not None
            raise context.error from None
        except TimeoutError:
            late = grpc.StatusCode.DEADLINE_EXCEEDED
            raise _make_error(late, "Deadline Exceeded") from None
        finally:
            self._running.discard(task)

    async def drain(self, seconds: float) -> None:
        """Waits for the calls that run."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)

    async def _find_handler(self, details: grpc.HandlerCallDetails) -> Any:
        found = (handler.service(details) for handler in self._handlers)
        return next(filter(None, found))


async def _parsed(
    parse: Callable[[bytes], Any], requests: Sequence[bytes]
) -> AsyncIterator[Any]:
    for request in requests:
        yield parse(request)


class _Details(NamedTuple):
    """The beginning of a call, as of ``grpc.HandlerCallDetails``."""

    method: str
    invocation_metadata: Metadata


class _Context:
    """The part of ``grpc.aio.ServicerContext`` that handlers use."""

    def __init__(self, metadata: Metadata, seconds: float | None) -> None:
        self._metadata = metadata
        self._seconds = seconds
        self.error: grpc.aio.AioRpcError | None = None
        """The error of ``abort``."""

    def peer(self) -> str:
        return "unix:"  # this machine, in gRPC's notation

    def auth_context(self) -> dict[str, Sequence[bytes]]:
        return {}

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def time_remaining(self) -> float | None:
        return self._seconds  # asked for at the beginning only

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Does nothing: a call that fails has the metadata of ``abort``."""

    def code(self) -> grpc.StatusCode | None:
        return None if self.error is None else self.error.code()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        self.error = _make_error(code, details, trailing_metadata)
        raise grpc.aio.AbortError


def _make_error(
    code: grpc.StatusCode, details: str, trailing: Metadata = ()
) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailing)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
