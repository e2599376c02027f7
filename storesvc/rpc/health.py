"""Calls that ask for health, by ``grpc.health.v1``: a server serves until it drains.

Not grpcio's own service: there a watch that ends takes the news of the others with it,
and their clients would go on calling a server that stops.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from storesvc.rpc.boundary import Context


class HealthCalls(HealthServicer):
    """Tells how a server is, by the name "", and each of its services."""

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset({"", *services})
        self._drains = asyncio.Event()
        self._ends = asyncio.Event()

    def drain(self) -> None:
        """Tells all who watch to call elsewhere."""
        self._drains.set()

    def end(self) -> None:
        """Ends the watches: they would go on for as long as they may."""
        self._ends.set()

    async def Check(
        self, request: HealthCheckRequest, context: Context
    ) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._health(request)

    async def Watch(
        self, request: HealthCheckRequest, context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        if not self._drains.is_set():
            yield self._health(request)
            await self._drains.wait()
        yield self._health(request)
        await self._ends.wait()

    def _health(self, request: HealthCheckRequest) -> HealthCheckResponse:
        if request.service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        if self._drains.is_set():
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)
