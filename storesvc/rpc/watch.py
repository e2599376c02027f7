"""Calls that watch."""

from contextlib import aclosing

from storesvc.errors import InvalidFieldError
from storesvc.format.names import RunName
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context, refusals, write
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api


class WatchCalls:
    """Streams what happens to checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def WatchCheckpoints(  # as ReadChunks
        self, request: catalogue_api.WatchCheckpointsRequest, context: Context
    ) -> None:
        async with refusals(context):
            of = watched(request.parent)
            watch = self._store.watcher.watch(of, request.resume_token)
            async with aclosing(watch):
                async for told in watch:
                    await write(context, messages.told_message(told))


def watched(parent: str) -> RunName | str:
    """Returns the run or the namespace that a watch is of.

    Raises:
        InvalidFieldError: It is neither, or all namespaces.
        InvalidNameError: The name breaks the rules.
    """
    if "/runs/" in parent:
        return RunName.from_resource(parent)
    namespace = requests.namespace_of(parent)
    if namespace is None:
        raise InvalidFieldError(
            f"parent {parent!r}: expected one namespace, or a run of it; watch each "
            "namespace by itself"
        )
    return namespace
