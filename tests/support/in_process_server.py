"""A server in this process, for tests that neither kill it nor read its log."""

from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path

import grpc

from storesvc.server import app, embedded
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.contract import Writer


class InProcessServer:
    """Serves the store at a root on a free port; starts in milliseconds.

    It shares the event loop of embedded stores, as gRPC polls one loop per process.
    """

    def __init__(self, root: Path) -> None:
        """Starts it."""
        self.root = root
        self._stack = AsyncExitStack()
        self.address = f"127.0.0.1:{embedded._run(self._start())}"

    def close(self) -> None:
        """Stops it."""
        embedded._run(self._stack.aclose())

    async def _start(self) -> int:
        store = await app.open_store(self.root.as_uri())
        running = app.running(store, "127.0.0.1:0")
        return (await self._stack.enter_async_context(running)).port


@contextmanager
def continued(writer: Writer, root: Path) -> Iterator[InProcessServer]:
    """Continues an upload at a server that has written none of its staging tables,
    and therefore reads them."""
    with (
        closing(InProcessServer(root)) as other,
        grpc.insecure_channel(other.address) as channel,
    ):
        writer.stub = UploadServiceStub(channel)
        yield other
