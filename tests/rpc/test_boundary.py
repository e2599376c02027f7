"""Every rpc of the contract translates the errors of its handler into statuses."""

import ast
import asyncio
import inspect
import textwrap
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor

from storesvc.errors import RunNotFoundError
from storesvc.format.names import InvalidNameError
from storesvc.rpc import registry
from storesvc.rpc.access_service import AccessService
from storesvc.rpc.checkpoint_service import CheckpointService
from storesvc.rpc.maintenance_service import ChunkService, MaintenanceService
from storesvc.rpc.status import ErrorInterceptor
from storesvc.rpc.upload_service import UploadService
from tests.support.rpcs import METHODS, SERVICES, reason_of

SERVICERS: Final = {
    servicer.__name__: servicer
    for servicer in (
        *(CheckpointService, ChunkService, MaintenanceService, UploadService),
        AccessService,
    )
}


class Raising:
    """A servicer that raises an error in each rpc, as the kind of function it is."""

    def __init__(self, servicer: type, error: Exception) -> None:
        self._servicer, self._error = servicer, error

    def __getattr__(self, name: str) -> Callable[[Any, Any], Any]:
        async def method(_: object, __: object) -> None:
            raise self._error

        async def generator(_: object, __: object) -> AsyncIterator[None]:
            raise self._error
            yield

        is_generator = inspect.isasyncgenfunction(getattr(self._servicer, name))
        return generator if is_generator else method


async def _error(
    channel: grpc.aio.Channel, method: MethodDescriptor
) -> grpc.aio.AioRpcError:
    path = f"/{method.containing_service.full_name}/{method.name}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _call(channel, path, method)
    return caught.value


async def _call(channel: Any, path: str, method: MethodDescriptor) -> None:
    match method.client_streaming, method.server_streaming:
        case False, False:
            await channel.unary_unary(path)(b"", timeout=10)
        case True, False:
            await channel.stream_unary(path)(iter([b""]), timeout=10)
        case False, True:
            await channel.unary_stream(path)(b"", timeout=10).read()
        case _:
            await channel.stream_stream(path)(iter([b""]), timeout=10).read()


async def _errors(error: Exception) -> dict[str, grpc.aio.AioRpcError]:
    """Returns the status of each rpc of a server whose handlers raise an error."""
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers(
        [
            registry.make_handler(service, Raising(SERVICERS[service.name], error))
            for service in SERVICES
        ]
    )
    address = f"localhost:{server.add_insecure_port('localhost:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        found = {method.name: await _error(channel, method) for method in METHODS}
    await server.stop(None)
    return found


def test_an_error_of_the_service_ends_each_rpc_with_its_reason() -> None:
    errors = asyncio.run(_errors(RunNotFoundError("run a/b does not exist")))

    assert dict.fromkeys(errors, "RUN_NOT_FOUND") == {
        rpc: reason_of(error) for rpc, error in errors.items()
    }
    assert {"run a/b does not exist"} == {e.details() for e in errors.values()}


def test_an_invalid_name_ends_each_rpc_as_an_invalid_field() -> None:
    errors = asyncio.run(_errors(InvalidNameError("run 'A': expected lower case")))

    assert {"INVALID_FIELD"} == {reason_of(error) for error in errors.values()}


def test_a_bug_ends_each_rpc_with_an_id_and_without_its_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    errors = asyncio.run(_errors(KeyError("secret")))

    assert {grpc.StatusCode.INTERNAL} == {e.code() for e in errors.values()}
    assert not [e for e in errors.values() if "secret" in (e.details() or "")]
    assert len(errors) == caplog.text.count("Traceback")


def test_every_handler_is_ten_statements_at_most() -> None:
    """It translates, calls and translates back; checks and rules are elsewhere."""
    counts = {
        method.name: _statement_count(
            getattr(SERVICERS[method.containing_service.name], method.name)
        )
        for method in METHODS
    }

    assert {} == {rpc: count for rpc, count in counts.items() if count > 10}


def _statement_count(function: Callable[..., object]) -> int:
    source = textwrap.dedent(inspect.getsource(function))
    nodes = ast.walk(ast.parse(source))
    return sum(isinstance(node, ast.stmt) for node in nodes) - 1
