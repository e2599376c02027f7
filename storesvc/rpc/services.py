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

__all__ = ["CheckpointService", "ChunkService", "MaintenanceService", "UploadService"]


class CheckpointService(
    CatalogueCalls, DiffCalls, RecordCalls, RunCalls, TagCalls, WatchCalls
):
    """The catalogue."""


class MaintenanceService(CollectCalls, InfoCalls, VerifyCalls):
    """Looks after a server and its store."""
