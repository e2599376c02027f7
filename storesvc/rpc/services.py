"""The services of the contract, put together from their calls."""

from storesvc.rpc.catalog import CatalogueCalls
from storesvc.rpc.checkpoints import RecordCalls
from storesvc.rpc.chunks import ChunkService
from storesvc.rpc.collection import CollectCalls
from storesvc.rpc.diff import DiffCalls
from storesvc.rpc.runs import RunCalls
from storesvc.rpc.server_info import InfoCalls
from storesvc.rpc.tags import TagCalls
from storesvc.rpc.uploads import UploadService
from storesvc.rpc.verify import VerifyCalls
from storesvc.rpc.watch import WatchCalls

__all__ = ["CheckpointService", "ChunkService", "MaintenanceService", "UploadService"]


class CheckpointService(
    CatalogueCalls, DiffCalls, RecordCalls, RunCalls, TagCalls, WatchCalls
):
    """The catalogue."""


class MaintenanceService(CollectCalls, InfoCalls, VerifyCalls):
    """Looks after a server and its store."""
