"""The health service (``grpc.health.v1``): a server is SERVING until it drains.

grpcio's own implementation is not used: if one watch ends there, the other watches miss
changes, and their clients would continue to call a server that stops.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Final

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from storesvc.rpc.boundary import Context, host_of
from storesvc.rpc.status import note_status

MAX_WATCHES: Final = 4096
"""Maximum watches of a process, of 25 kB each. A host may have as many as it leaves to
others."""


class HealthCalls(HealthServicer):
    """Reports the health of the server (name "") and of each service."""

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset({"", *services})
        self._drains = asyncio.Event()
        self._ends = asyncio.Event()
        self._watches = Counter[str]()

    def drain(self) -> None:
        """Reports NOT_SERVING from now on, so that clients use another server."""
        self._drains.set()

    def end(self) -> None:
        """Ends the watches, which have no end of their own."""
        self._ends.set()

    async def Check(
        self, request: HealthCheckRequest, context: Context
    ) -> HealthCheckResponse:
        if request.service not in self._names:
            note_status(grpc.StatusCode.NOT_FOUND, "")
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._health(request)

    async def Watch(
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        host = host_of(context.peer())
        if self._watches[host] >= MAX_WATCHES - self._watches.total():
            # As the protocol has it, its client goes on as if the server were healthy.
            note_status(grpc.StatusCode.UNIMPLEMENTED, "")
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "too many watches")
        self._watches[host] += 1
        try:
            if not self._drains.is_set():
                yield self._health(request)
                await self._drains.wait()
            yield self._health(request)
            await self._ends.wait()
        finally:
            self._watches[host] -= 1
            self._watches += Counter()  # forgets hosts without a watch

    def _health(self, request: HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        if self._drains.is_set():
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)
