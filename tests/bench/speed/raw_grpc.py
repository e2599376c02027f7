"""The floor for sockets: a server that receives and sends raw messages of 2 MiB,
without serialisation.

    python -m tests.bench.speed.raw_grpc FILE

writes its address to FILE.
"""

import asyncio
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


async def _serve(file: Path) -> None:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {
        "Take": grpc.stream_unary_rpc_method_handler(_take),
        "Send": grpc.unary_stream_rpc_method_handler(_send),
    }
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, handlers)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    partial = file.with_suffix(".partial")
    partial.write_text(f"127.0.0.1:{port}")
    partial.rename(file)
    await server.wait_for_termination()


if __name__ == "__main__":
    keep_freed_memory()
    asyncio.run(_serve(Path(sys.argv[1])))
