"""Every call of the contract, each in a new namespace."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from storesvc.format.chunks import pack_sums
from storesvc.format.names import RunName
from storesvc.format.trees import pack_leaves
from storesvc_proto.v1 import access_service_pb2 as access
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import chunk_service_pb2 as chunks
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance
from storesvc_proto.v1 import retention_pb2, tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as uploads
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.chunk_service_pb2_grpc import ChunkServiceStub
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support import restrictions
from tests.support.cancels import Start, many_answers, one_answer
from tests.support.contract import CHUNK, Writer, frame, stored, sums, tree_of

_runs = itertools.count()


class Saved:
    """A new namespace with one run, which has one checkpoint, at step 1."""

    def __init__(self, address: str, channel: grpc.Channel | None = None) -> None:
        channel = channel or restrictions.channel(address)
        self.run = RunName(f"every-{next(_runs)}", "run")
        self.address = address
        self.checkpoints = CheckpointServiceStub(channel)
        self.chunks = ChunkServiceStub(channel)
        self.maintenance = MaintenanceServiceStub(channel)
        self.access = AccessServiceStub(channel)
        self.uploads = UploadServiceStub(channel)
        self.writer(1).save()

    def writer(self, step: int, *, writers: int = 1) -> Writer:
        """Returns one of this run."""
        return Writer(self.address, str(self.run), step, writers=writers)

    def step(self, number: int) -> checkpoint_api.Checkpoint:
        """Returns a checkpoint."""
        name = f"{self.run.resource}/checkpoints/{number}"
        request = checkpoint_api.GetCheckpointRequest(name=name)
        found: checkpoint_api.Checkpoint = self.checkpoints.GetCheckpoint(
            request
        ).checkpoint
        return found

    def check(self, number: int) -> None:
        """Reads all bytes of a checkpoint."""
        found = self.step(number)
        request = chunks.ReadChunksRequest(
            name=found.name, uid=found.uid, chunk=[0, 1, 2]
        )
        frames = [message.frame for message in self.chunks.ReadChunks(request)]
        data = b"".join(frame.data for frame in frames)
        assert b"".join(map(stored, range(3))) == data


Make = Callable[[Saved], Start]


def _id() -> str:
    return str(uuid.uuid4())


def check_save(address: str) -> None:
    """Saves and reads a checkpoint in a new namespace."""
    Saved(address).check(1)


def list_runs(s: Saved) -> Start:
    """ListRuns."""
    return one_answer(
        s.checkpoints.ListRuns,
        checkpoint_api.ListRunsRequest(parent=f"namespaces/{s.run.namespace}"),
    )


def get_run(s: Saved) -> Start:
    """GetRun."""
    return one_answer(
        s.checkpoints.GetRun, checkpoint_api.GetRunRequest(name=s.run.resource)
    )


def update_run(s: Saved) -> Start:
    """UpdateRun."""
    run = checkpoint_api.Run(name=s.run.resource, labels={"a": "b"})
    request = checkpoint_api.UpdateRunRequest(
        run=run, update_mask=FieldMask(paths=["labels"]), request_id=_id()
    )
    return one_answer(s.checkpoints.UpdateRun, request)


def apply_retention(s: Saved) -> Start:
    """ApplyRetention."""
    s.writer(2).save()
    latest = retention_pb2.RetentionPolicy(latest=retention_pb2.KeepLatest(count=1))
    run = checkpoint_api.Run(name=s.run.resource, retention=latest)
    s.checkpoints.UpdateRun(
        checkpoint_api.UpdateRunRequest(
            run=run, update_mask=FieldMask(paths=["retention"]), request_id=_id()
        )
    )
    request = checkpoint_api.ApplyRetentionRequest(name=s.run.resource)
    return many_answers(s.checkpoints.ApplyRetention, request)


def list_checkpoints(s: Saved) -> Start:
    """ListCheckpoints."""
    request = checkpoint_api.ListCheckpointsRequest(parent=s.run.resource)
    return one_answer(s.checkpoints.ListCheckpoints, request)


def get_checkpoint(s: Saved) -> Start:
    """GetCheckpoint."""
    name = f"{s.run.resource}/checkpoints/latest"
    return one_answer(
        s.checkpoints.GetCheckpoint, checkpoint_api.GetCheckpointRequest(name=name)
    )


def read_manifest(s: Saved) -> Start:
    """ReadManifest."""
    request = checkpoint_api.ReadManifestRequest(name=s.step(1).name)
    return many_answers(s.checkpoints.ReadManifest, request)


def update_checkpoint(s: Saved) -> Start:
    """UpdateCheckpoint."""
    changed = checkpoint_api.Checkpoint(name=s.step(1).name, labels={"a": "b"})
    request = checkpoint_api.UpdateCheckpointRequest(
        checkpoint=changed, update_mask=FieldMask(paths=["labels"]), request_id=_id()
    )
    return one_answer(s.checkpoints.UpdateCheckpoint, request)


def delete_checkpoint(s: Saved) -> Start:
    """DeleteCheckpoint."""
    request = checkpoint_api.DeleteCheckpointRequest(
        name=s.step(1).name, request_id=_id()
    )
    return one_answer(s.checkpoints.DeleteCheckpoint, request)


def undelete_checkpoint(s: Saved) -> Start:
    """UndeleteCheckpoint."""
    name = s.step(1).name
    s.checkpoints.DeleteCheckpoint(
        checkpoint_api.DeleteCheckpointRequest(name=name, request_id=_id())
    )
    request = checkpoint_api.UndeleteCheckpointRequest(name=name, request_id=_id())
    return one_answer(s.checkpoints.UndeleteCheckpoint, request)


def purge_checkpoint(s: Saved) -> Start:
    """PurgeCheckpoint."""
    name = s.step(1).name
    s.checkpoints.DeleteCheckpoint(
        checkpoint_api.DeleteCheckpointRequest(
            name=name, request_id=_id(), purge_delay=Duration()
        )
    )
    return one_answer(
        s.checkpoints.PurgeCheckpoint, checkpoint_api.PurgeCheckpointRequest(name=name)
    )


def diff_checkpoints(s: Saved) -> Start:
    """DiffCheckpoints."""
    s.writer(2).save()
    request = checkpoint_api.DiffCheckpointsRequest(
        base=s.step(1).name, name=s.step(2).name
    )
    return many_answers(s.checkpoints.DiffCheckpoints, request)


def watch_checkpoints(s: Saved) -> Start:
    """WatchCheckpoints."""
    parent = s.run.resource
    watch = s.checkpoints.WatchCheckpoints(
        checkpoint_api.WatchCheckpointsRequest(parent=parent)
    )
    token = next(watch).resume_token
    watch.cancel()
    s.writer(3).save()
    request = checkpoint_api.WatchCheckpointsRequest(parent=parent, resume_token=token)
    return many_answers(s.checkpoints.WatchCheckpoints, request, count=2)


def set_tag(s: Saved) -> Start:
    """SetTag."""
    request = checkpoint_api.SetTagRequest(
        name=f"{s.run.resource}/tags/best", checkpoint=s.step(1).name, request_id=_id()
    )
    return one_answer(s.checkpoints.SetTag, request)


def delete_tag(s: Saved) -> Start:
    """DeleteTag."""
    set_tag(s)().end()
    request = checkpoint_api.DeleteTagRequest(
        name=f"{s.run.resource}/tags/best", request_id=_id()
    )
    return one_answer(s.checkpoints.DeleteTag, request)


def list_tags(s: Saved) -> Start:
    """ListTags."""
    set_tag(s)().end()
    request = checkpoint_api.ListTagsRequest(parent=s.run.resource)
    return one_answer(s.checkpoints.ListTags, request)


def create_hold(s: Saved) -> Start:
    """CreateHold."""
    request = checkpoint_api.CreateHoldRequest(
        parent=s.step(1).name, request_id=_id(), owner="me", ttl=Duration(seconds=60)
    )
    return one_answer(s.checkpoints.CreateHold, request)


def _hold(s: Saved) -> str:
    request = checkpoint_api.CreateHoldRequest(
        parent=s.step(1).name, request_id=_id(), owner="me", ttl=Duration(seconds=60)
    )
    name: str = s.checkpoints.CreateHold(request).hold.name
    return name


def renew_hold(s: Saved) -> Start:
    """RenewHold."""
    return one_answer(
        s.checkpoints.RenewHold, checkpoint_api.RenewHoldRequest(name=_hold(s))
    )


def delete_hold(s: Saved) -> Start:
    """DeleteHold."""
    return one_answer(
        s.checkpoints.DeleteHold, checkpoint_api.DeleteHoldRequest(name=_hold(s))
    )


def list_holds(s: Saved) -> Start:
    """ListHolds."""
    _hold(s)
    request = checkpoint_api.ListHoldsRequest(parent=s.run.resource)
    return one_answer(s.checkpoints.ListHolds, request)


def begin_upload(s: Saved) -> Start:
    """BeginUpload."""
    tree = tree_of()
    opening = uploads.BeginUploadRequest(
        parent=s.run.resource,
        request_id=_id(),
        upload=uploads.Upload(step=3, writer_count=1),
        leaf_count=len(tree.leaves),
    )
    leaves = (
        uploads.BeginUploadRequest(leaves=tree_pb2.LeafTable.FromString(part))
        for part in pack_leaves(tree)
    )
    return one_answer(s.uploads.BeginUpload, [opening, *leaves])


def join_upload(s: Saved) -> Start:
    """JoinUpload."""
    writer = s.writer(3, writers=2)
    writer.begin()
    tree = tree_of()
    join = uploads.JoinOpening(upload=writer.name, writer=1, writer_count=2)
    opening = uploads.JoinUploadRequest(open=join, leaf_count=len(tree.leaves))
    leaves = (
        uploads.JoinUploadRequest(leaves=tree_pb2.LeafTable.FromString(part))
        for part in pack_leaves(tree)
    )
    return one_answer(s.uploads.JoinUpload, [opening, *leaves])


def _begun(s: Saved) -> Writer:
    writer = s.writer(3)
    writer.begin()
    return writer


def _written(s: Saved) -> Writer:
    writer = _begun(s)
    writer.write(frame(0, 1, 2))
    return writer


def get_upload(s: Saved) -> Start:
    """GetUpload."""
    return one_answer(
        s.uploads.GetUpload, uploads.GetUploadRequest(name=_begun(s).name)
    )


def list_uploads(s: Saved) -> Start:
    """ListUploads."""
    _begun(s)
    request = uploads.ListUploadsRequest(parent=s.run.resource)
    return one_answer(s.uploads.ListUploads, request)


def keep_upload_alive(s: Saved) -> Start:
    """KeepUploadAlive."""
    writer = _begun(s)
    request = uploads.KeepUploadAliveRequest(name=writer.name, epoch=writer.epoch)
    return one_answer(s.uploads.KeepUploadAlive, request)


def find_chunks(s: Saved) -> Start:
    """FindChunks."""
    requests = [uploads.FindChunksRequest(open=_written(s).ref())]
    requests += [
        uploads.FindChunksRequest(chunks=part) for part in pack_sums(sums(0, 1))
    ]
    return many_answers(s.uploads.FindChunks, requests)


def write_chunks(s: Saved) -> Start:
    """WriteChunks: whole chunks, and the parts of one."""
    opening = uploads.WriteChunksRequest(open=_begun(s).ref())
    whole = uploads.WriteChunksRequest(frame=frame(0, 1))
    return many_answers(s.uploads.WriteChunks, [opening, whole, *_pieces()])


def write_within_a_chunk(s: Saved) -> Start:
    """WriteChunks that ends within a chunk."""
    opening = uploads.WriteChunksRequest(open=_begun(s).ref())
    requests = [opening, next(_pieces())]
    start = many_answers(s.uploads.WriteChunks, requests)
    return _failing(start, grpc.StatusCode.INVALID_ARGUMENT)


def _failing(start: Start, code: grpc.StatusCode) -> Start:
    """Returns a start of a call that ends with a status."""

    def start_it() -> Any:
        started = start()

        def end() -> None:
            try:
                started.end()
            except grpc.RpcError as e:
                assert isinstance(e, grpc.Call)
                if e.code() is not code:
                    raise

        return started._replace(end=end)

    return start_it


def _pieces() -> Iterator[uploads.WriteChunksRequest]:
    data, half = stored(2), CHUNK // 2
    for at, piece in ((0, data[:half]), (half, data[half:])):
        part = uploads.ChunkFrame(
            chunk=[2], offset=[at], length=[len(piece)], data=piece
        )
        yield uploads.WriteChunksRequest(frame=part)


def finish_writer(s: Saved) -> Start:
    """FinishWriter."""
    requests = [uploads.FinishWriterRequest(open=_written(s).ref(), chunk_count=3)]
    requests += [
        uploads.FinishWriterRequest(chunks=part) for part in pack_sums(sums(0, 1, 2))
    ]
    return one_answer(s.uploads.FinishWriter, requests)


def commit_upload(s: Saved) -> Start:
    """CommitUpload."""
    writer = _written(s)
    writer.finish(sums(0, 1, 2))
    request = uploads.CommitUploadRequest(name=writer.name, epoch=writer.epoch)
    return one_answer(s.uploads.CommitUpload, request)


def abort_upload(s: Saved) -> Start:
    """AbortUpload."""
    request = uploads.AbortUploadRequest(name=_written(s).name)
    return one_answer(s.uploads.AbortUpload, request)


def read_chunks(s: Saved) -> Start:
    """ReadChunks."""
    found = s.step(1)
    request = chunks.ReadChunksRequest(name=found.name, uid=found.uid, chunk=[0, 1, 2])
    return many_answers(s.chunks.ReadChunks, request)


def get_server_info(s: Saved) -> Start:
    """GetServerInfo."""
    return one_answer(s.maintenance.GetServerInfo, maintenance.GetServerInfoRequest())


def verify_checkpoint(s: Saved) -> Start:
    """VerifyCheckpoint."""
    request = maintenance.VerifyCheckpointRequest(name=s.step(1).name)
    return many_answers(s.maintenance.VerifyCheckpoint, request)


def collect_garbage(s: Saved) -> Start:
    """CollectGarbage."""
    purge_checkpoint(s)().end()
    request = maintenance.CollectGarbageRequest(parent=s.run.resource, grace=Duration())
    return many_answers(s.maintenance.CollectGarbage, request)


def get_usage(s: Saved) -> Start:
    """GetUsage."""
    return one_answer(
        s.maintenance.GetUsage, maintenance.GetUsageRequest(name=s.run.resource)
    )


def get_login_options(s: Saved) -> Start:
    """GetLoginOptions."""
    return one_answer(s.access.GetLoginOptions, access.GetLoginOptionsRequest())


def get_identity(s: Saved) -> Start:
    """GetIdentity."""
    return one_answer(s.access.GetIdentity, access.GetIdentityRequest())


def permissions_tested(s: Saved) -> Start:
    """TestPermissions."""
    request = access.TestPermissionsRequest(resource=s.run.resource)
    return one_answer(s.access.TestPermissions, request)


def lend_credentials(s: Saved) -> Start:
    """LendCredentials, of a server that lends none."""
    request = access.LendCredentialsRequest(upload=_begun(s).ref())
    start = one_answer(s.access.LendCredentials, request)
    return _failing(start, grpc.StatusCode.FAILED_PRECONDITION)


def get_quota(s: Saved) -> Start:
    """GetQuota."""
    request = access.GetQuotaRequest(parent=f"namespaces/{s.run.namespace}")
    return one_answer(s.access.GetQuota, request)


def list_audit_entries(s: Saved) -> Start:
    """ListAuditEntries, of a server without an audit log."""
    request = access.ListAuditEntriesRequest()
    start = one_answer(s.access.ListAuditEntries, request)
    return _failing(start, grpc.StatusCode.FAILED_PRECONDITION)


CALLS: Final[dict[str, list[Make]]] = {
    "ListRuns": [list_runs],
    "GetRun": [get_run],
    "UpdateRun": [update_run],
    "ApplyRetention": [apply_retention],
    "ListCheckpoints": [list_checkpoints],
    "GetCheckpoint": [get_checkpoint],
    "ReadManifest": [read_manifest],
    "UpdateCheckpoint": [update_checkpoint],
    "DeleteCheckpoint": [delete_checkpoint],
    "UndeleteCheckpoint": [undelete_checkpoint],
    "PurgeCheckpoint": [purge_checkpoint],
    "DiffCheckpoints": [diff_checkpoints],
    "WatchCheckpoints": [watch_checkpoints],
    "SetTag": [set_tag],
    "DeleteTag": [delete_tag],
    "ListTags": [list_tags],
    "CreateHold": [create_hold],
    "RenewHold": [renew_hold],
    "DeleteHold": [delete_hold],
    "ListHolds": [list_holds],
    "BeginUpload": [begin_upload],
    "JoinUpload": [join_upload],
    "GetUpload": [get_upload],
    "ListUploads": [list_uploads],
    "KeepUploadAlive": [keep_upload_alive],
    "FindChunks": [find_chunks],
    "WriteChunks": [write_chunks, write_within_a_chunk],
    "FinishWriter": [finish_writer],
    "CommitUpload": [commit_upload],
    "AbortUpload": [abort_upload],
    "ReadChunks": [read_chunks],
    "GetServerInfo": [get_server_info],
    "VerifyCheckpoint": [verify_checkpoint],
    "CollectGarbage": [collect_garbage],
    "GetUsage": [get_usage],
    "GetLoginOptions": [get_login_options],
    "GetIdentity": [get_identity],
    "TestPermissions": [permissions_tested],
    "LendCredentials": [lend_credentials],
    "GetQuota": [get_quota],
    "ListAuditEntries": [list_audit_entries],
}
"""Functions that make a call, by its name."""
