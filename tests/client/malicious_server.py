"""A server that sends malformed or malicious responses."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from storesvc.format.checksums import digest
from storesvc.format.chunks import ChunkLocations, Sums
from storesvc.format.manifests import Manifest, pack_manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import chunk_service_pb2 as chunk_api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1 import tree_pb2

RUN = "namespaces/ns/runs/r"
NAME = f"{RUN}/checkpoints/1"
FILE = f"{'a' * 32}/{'b' * 32}"
PART_BYTES = 1 << 20


def manifest_of(elements: int, *, chunk: int = 1000) -> bytes:
    """Returns the manifest of one leaf of a size in bytes."""
    leaf = Leaf(
        key="x",
        path_kinds="k",
        kind=tree_pb2.LEAF_KIND_HOST_ARRAY,
        dtype="uint8",
        shape=(elements,),
        chunk_shape=(chunk,),
    )
    tree = Tree((leaf,))
    count = tree.chunk_count
    sums = Sums(
        ordinal=np.arange(count),
        crc32c=np.zeros(count, np.uint32),
        digests=np.zeros((count, 16), np.uint8),
    )
    lengths = np.full(count, chunk + 4)
    places = ChunkLocations(
        files=(FILE,),
        file=np.zeros(count, np.int64),
        offset=np.zeros(count, np.int64),
        length=lengths,
    )
    return b"".join(pack_manifest(Manifest(tree, sums, places)))


def in_parts(manifest: bytes) -> Iterator[bytes]:
    """Yields a manifest as a server sends it."""
    for start in range(0, len(manifest), PART_BYTES):
        yield manifest[start : start + PART_BYTES]


@dataclass
class Answers:
    """Responses of the server."""

    manifest: bytes = field(default_factory=lambda: manifest_of(1000))
    changes: dict[str, Any] = field(default_factory=dict)
    """Wrong fields of the checkpoint."""
    parts: Callable[[bytes], Iterator[bytes]] = in_parts
    chunks: Callable[[], Iterator[bytes]] = lambda: iter(())
    page_token: str = ""
    audit_entries: list[access_api.AuditEntry] = field(default_factory=list)

    @property
    def checkpoint(self) -> api.Checkpoint:
        """Checkpoint of all calls."""
        found = api.Checkpoint(
            name=NAME,
            uid="0" * 32,
            step=1,
            leaf_count=1,
            chunk_count=1,
            manifest_bytes=len(self.manifest),
            manifest_digest=digest(self.manifest),
        )
        for name, value in self.changes.items():
            setattr(found, name, value)
        return found


class _Catalogue:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def ListCheckpoints(self, _: Any) -> Any:  # noqa: N802
        return api.ListCheckpointsResponse(
            checkpoints=[self._answers.checkpoint],
            next_page_token=self._answers.page_token,
        )

    def ReadManifest(self, _: Any) -> Any:  # noqa: N802
        yield api.ReadManifestResponse(checkpoint=self._answers.checkpoint)
        for part in self._answers.parts(self._answers.manifest):
            yield api.ReadManifestResponse(part=part)

    def CreateHold(self, request: api.CreateHoldRequest) -> Any:  # noqa: N802
        hold = api.Hold(name=f"{RUN}/holds/{'0' * 32}", checkpoint=NAME, uid="0" * 32)
        hold.ttl.CopyFrom(request.ttl)
        hold.expire_time.FromSeconds(1 << 33)
        return api.CreateHoldResponse(hold=hold)

    def DeleteHold(self, _: Any) -> Any:  # noqa: N802
        return api.DeleteHoldResponse()


class _Chunks:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def ReadChunks(self, _: Any) -> Any:  # noqa: N802
        for data in self._answers.chunks():
            response = chunk_api.ReadChunksResponse()
            response.frame.chunk.append(0)
            response.frame.offset.append(0)
            response.frame.length.append(len(data))
            response.frame.data = data
            yield response


class _Maintenance:
    def GetServerInfo(self, _: Any) -> Any:  # noqa: N802
        return maintenance_api.GetServerInfoResponse(version="0", store_uid="0")


class _Access:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def ListAuditEntries(self, _: Any) -> Any:  # noqa: N802
        return access_api.ListAuditEntriesResponse(
            entries=self._answers.audit_entries,
            next_page_token=self._answers.page_token,
        )


def _handlers(service: ServiceDescriptor, answering: object) -> grpc.GenericRpcHandler:
    """Returns handlers of those methods of the service that the object has."""
    kinds = {
        False: grpc.unary_unary_rpc_method_handler,
        True: grpc.unary_stream_rpc_method_handler,
    }
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        if answer := getattr(answering, method.name, None):
            methods[method.name] = kinds[method.server_streaming](
                lambda request, _, answer=answer: answer(request),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
    return grpc.method_handlers_generic_handler(service.full_name, methods)


@contextmanager
def malicious(answers: Answers) -> Iterator[str]:
    """Serves the answers while the context lasts; yields the address."""
    server = grpc.server(ThreadPoolExecutor(4))
    services = {
        api: ("CheckpointService", _Catalogue(answers)),
        chunk_api: ("ChunkService", _Chunks(answers)),
        maintenance_api: ("MaintenanceService", _Maintenance()),
        access_api: ("AccessService", _Access(answers)),
    }
    for module, (name, answering) in services.items():
        service = module.DESCRIPTOR.services_by_name[name]
        server.add_generic_rpc_handlers((_handlers(service, answering),))
    serving = health.HealthServicer()
    serving.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(serving, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
