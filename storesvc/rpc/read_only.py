"""Serves a store read-only: rejects each call that is not known to change nothing."""

from typing import Any, Final

import grpc
import grpc.aio

from storesvc.errors import StorageDeniedError
from storesvc.rpc.boundary import Context, Continuation, is_of_contract, replaced

READING: Final = frozenset(
    {
        *("ListRuns", "GetRun", "ListCheckpoints", "GetCheckpoint", "ReadManifest"),
        *("DiffCheckpoints", "WatchCheckpoints", "ListTags", "ListHolds"),
        *("ReadChunks", "GetUpload", "ListUploads"),
        *("GetServerInfo", "VerifyCheckpoint", "GetUsage"),
        *("GetLoginOptions", "GetIdentity", "TestPermissions", "GetQuota"),
        "ListAuditEntries",
    }
)
"""The rpcs of the contract that change nothing in the bucket."""


class ReadOnly(grpc.aio.ServerInterceptor):
    """Rejects the calls that change a store; `ErrorInterceptor` must precede it."""

    def __init__(self, root: str) -> None:
        """Creates the interceptor for the store at a root."""
        self._root = root

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the handler of a call, or one that rejects it."""
        rpc = handler_call_details.method.rpartition("/")[2]
        handler = await continuation(handler_call_details)
        is_other = handler is None or not is_of_contract(handler_call_details.method)
        if is_other or rpc in READING:
            return handler

        async def reject(_request: object, _context: Context) -> None:
            raise StorageDeniedError(
                f"{self._root} is served read-only, got {rpc}; use a server that may "
                "write to it, or restart this one without --read-only",
                storage=self._root,
                read_only="true",
            )

        return replaced(handler, reject)
