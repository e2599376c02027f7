"""The floor for sockets: a server that receives and sends raw messages of 2 MiB,
without serialisation.

    python -m benchmarks.speed.raw_grpc FILE [CERTIFICATE KEY]

writes its address to FILE; with a certificate, it serves TLS. ``Take`` and ``Send``
move bytes only; ``Put`` and ``Get`` write them to a synced file next to FILE, and read
them.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from storesvc.server.app import keep_freed_memory

MESSAGE_BYTES: Final = 2 << 20
SERVICE: Final = "bench.Raw"


async def _take(stream: AsyncIterator[bytes], context: Any) -> bytes:
    del context
    taken = 0
    async for message in stream:
        taken += len(message)
    return taken.to_bytes(8, "little")


async def _send(request: bytes, context: Any) -> AsyncIterator[bytes]:
    del context
    left, message = int.from_bytes(request, "little"), bytes(MESSAGE_BYTES)
    while left > 0:
        yield message[:left] if left < MESSAGE_BYTES else message
        left -= MESSAGE_BYTES


class _Files:
    """Files of a directory, written and read in the event loop: least CPU time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(self, stream: AsyncIterator[bytes], context: Any) -> bytes:
        """Writes messages to the file that the first one names; returns its size."""
        del context
        path = self._directory / (await anext(stream)).decode()
        with path.open("wb", buffering=0) as file:
            async for message in stream:
                data = memoryview(message)
                while data:
                    data = data[file.write(data) :]
            os.fsync(file.fileno())
            return file.tell().to_bytes(8, "little")

    async def get(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Reads the named file."""
        del context
        with (self._directory / request.decode()).open("rb", buffering=0) as file:
            while message := file.read(MESSAGE_BYTES):
                yield message


async def _serve(file: Path, credentials: grpc.ServerCredentials | None) -> None:
    server = grpc.aio.server()
    files = _Files(file.parent)
    handlers: dict[str, Any] = {
        "Take": grpc.stream_unary_rpc_method_handler(_take),
        "Send": grpc.unary_stream_rpc_method_handler(_send),
        "Put": grpc.stream_unary_rpc_method_handler(files.put),
        "Get": grpc.unary_stream_rpc_method_handler(files.get),
    }
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, handlers)]
    )
    if credentials:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    partial = file.with_suffix(".partial")
    partial.write_text(f"127.0.0.1:{port}")
    partial.rename(file)
    await server.wait_for_termination()


def main() -> None:
    """Serves until it is killed."""
    file, *pair = map(Path, sys.argv[1:])
    credentials = None
    if pair:
        certificate, key = (path.read_bytes() for path in pair)
        credentials = grpc.ssl_server_credentials([(key, certificate)])
    keep_freed_memory()
    asyncio.run(_serve(file, credentials))


if __name__ == "__main__":
    main()
