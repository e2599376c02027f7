"""The services of the contract, put together from their calls."""

from storesvc.rpc.catalogue_calls import CatalogueCalls
from storesvc.rpc.chunk_calls import ChunkService
from storesvc.rpc.collect_calls import CollectCalls
from storesvc.rpc.diff_calls import DiffCalls
from storesvc.rpc.info_calls import InfoCalls
from storesvc.rpc.record_calls import RecordCalls
from storesvc.rpc.run_calls import RunCalls
from storesvc.rpc.tag_calls import TagCalls
from storesvc.rpc.upload_calls import UploadService
from storesvc.rpc.verify_calls import VerifyCalls
from storesvc.rpc.watch_calls import WatchCalls
from storesvc_proto.v1 import checkpoint_service_pb2_grpc, maintenance_service_pb2_grpc

__all__ = ["CheckpointService", "ChunkService", "MaintenanceService", "UploadService"]


class CheckpointService(  # type: ignore[misc]  # streams by the context, not by yield
    CatalogueCalls,
    DiffCalls,
    RecordCalls,
    RunCalls,
    TagCalls,
    WatchCalls,
    checkpoint_service_pb2_grpc.CheckpointServiceServicer,
):
    """The catalogue."""


class MaintenanceService(  # type: ignore[misc]  # as above
    CollectCalls,
    InfoCalls,
    VerifyCalls,
    maintenance_service_pb2_grpc.MaintenanceServiceServicer,
):
    """Looks after a server and its store."""
