"""A server of an earlier release, as a client sees it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from storesvc_proto.v1 import checkpoint_service_pb2, upload_service_pb2
from tests.support.thread_server import ThreadServer


@dataclass
class OldServer(grpc.GenericRpcHandler):
    """Forwards all calls, without what servers of release 0.2 do not know."""

    channel: grpc.Channel
    address: str = ""
    """Address."""
    calls: list[str] = field(default_factory=list)
    """Methods that were called and known."""
    ignores_migrations: bool = False
    """Whether it drops migrations, as a proxy with the contract of 0.2 would, instead
    of rejecting them."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        if method == "CreateCheckpoint":
            return None
        self.calls.append(method)
        forward: Any = self.channel.stream_stream(details.method)

        def call(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            if method == "CommitUpload":
                commit = upload_service_pb2.CommitUploadRequest()
                commit.ParseFromString(next(requests))
                commit.ClearField("end")
                requests = iter([commit.SerializeToString()])
            if method == "UpdateRun":
                update = checkpoint_service_pb2.UpdateRunRequest()
                update.ParseFromString(next(requests))
                update.run.ClearField("migrations")
                paths = update.update_mask.paths
                if "migrations" in paths and not self.ignores_migrations:
                    paths[:] = ["unknown" if p == "migrations" else p for p in paths]
                requests = iter([update.SerializeToString()])
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
