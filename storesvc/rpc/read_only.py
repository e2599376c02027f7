"""Serves a store read-only: rejects each call that is not known to change nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from storesvc.errors import StorageDeniedError
from storesvc.rpc.boundary import Context
from storesvc.rpc.status import refuse

_SERVICE: Final = "storesvc.v1."

READING: Final = frozenset(
    {
        *("ListRuns", "GetRun", "ListCheckpoints", "GetCheckpoint", "ReadManifest"),
        *("DiffCheckpoints", "WatchCheckpoints", "ListTags", "ListHolds"),
        *("ReadChunks", "GetUpload", "ListUploads"),
        *("GetServerInfo", "VerifyCheckpoint", "GetUsage"),
    }
)
"""The rpcs of the contract that change nothing in the bucket."""


class ReadOnly(grpc.aio.ServerInterceptor):
    """Rejects the calls of the contract that change a store."""

    def __init__(self, root: str) -> None:
        """Serves a root read-only."""
        self._root = root

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[Any]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler of a call."""
        service, _, rpc = handler_call_details.method[1:].partition("/")
        handler = await continuation(handler_call_details)
        if handler is None or not service.startswith(_SERVICE) or rpc in READING:
            return handler
        error = StorageDeniedError(
            f"{self._root} is served read-only, got {rpc}; ask a server that may write "
            "to it, or restart this one without --read-only",
            storage=self._root,
            read_only="true",
        )
        return _rejecting(handler, error)


def _rejecting(
    handler: Any, error: StorageDeniedError
) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler of the same kind that rejects its calls."""

    async def reject(_: object, context: Context) -> None:
        await refuse(context, error)

    async def reject_stream(_: object, context: Context) -> AsyncIterator[None]:
        await refuse(context, error)
        yield

    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, reject),
        (False, True): (grpc.unary_stream_rpc_method_handler, reject_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, reject),
        (True, True): (grpc.stream_stream_rpc_method_handler, reject_stream),
    }
    make, rejects = kinds[handler.request_streaming, handler.response_streaming]
    return make(rejects)
