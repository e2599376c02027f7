"""Rpcs that watch checkpoints."""

from contextlib import aclosing

from storesvc.errors import InvalidFieldError
from storesvc.format.names import RunName
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context
from storesvc.rpc.streams import write
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api


class WatchCalls:
    """Streams the events of checkpoints."""

    _store: Store

    async def WatchCheckpoints(
        self, request: checkpoint_api.WatchCheckpointsRequest, context: Context
    ) -> None:
        scope = watched(request.parent)
        watch = self._store.watcher.watch(scope, request.resume_token)
        async with aclosing(watch):
            async for event in watch:
                await write(context, messages.watch_message(event))


def watched(parent: str) -> RunName | str:
    """Returns the run or the namespace to watch.

    Raises:
        InvalidFieldError: The parent is neither, or is all namespaces.
        InvalidNameError: The name is invalid.
    """
    if "/runs/" in parent:
        return RunName.from_resource(parent)
    namespace = requests.namespace_of(parent)
    if namespace is None:
        raise InvalidFieldError(
            f"parent {parent!r}: expected one namespace, or a run of it; watch each "
            "namespace separately"
        )
    return namespace
