"""A server of an earlier release, as a client sees it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.thread_server import ThreadServer


@dataclass
class OldServer(grpc.GenericRpcHandler):
    """Forwards all calls, without what servers of release 0.2 do not know."""

    channel: grpc.Channel
    address: str = ""
    """Address."""
    calls: list[str] = field(default_factory=list)
    """Methods that were called and known."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "CreateCheckpoint":
            return None
        self.calls.append(method)
        forward: Any = self.channel.stream_stream(details.method)

        def call(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            if method == "CommitUpload":
                commit = api.CommitUploadRequest.FromString(next(requests))
                commit.ClearField("end")
                requests = iter([commit.SerializeToString()])
            try:
                yield from forward(requests)
            except grpc.RpcError as e:
                assert isinstance(e, grpc.Call)
                context.set_trailing_metadata(e.trailing_metadata())
                context.abort(e.code(), e.details())

        return grpc.stream_stream_rpc_method_handler(call)


@contextmanager
def old_server(root: str) -> Iterator[OldServer]:
    """Serves a store as release 0.2 did."""
    with (
        ThreadPoolExecutor(32) as pool,
        ThreadServer(root) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        handler = OldServer(channel)
        old = grpc.server(pool, handlers=[handler])
        handler.address = f"127.0.0.1:{old.add_insecure_port('127.0.0.1:0')}"
        old.start()
        yield handler
        old.stop(None)
