"""Every call of the contract, each in a new namespace."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from storesvc.format.chunks import pack_sums
from storesvc.format.names import RunName
from storesvc.format.trees import pack_leaves
from storesvc_proto.v1 import access_service_pb2 as access
from storesvc_proto.v1 import checkpoint_service_pb2 as api
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
        self.uploads = UploadServiceStub(channel)
        access, maintenance = (
            AccessServiceStub(channel),
            MaintenanceServiceStub(channel),
        )
        stubs = (self.checkpoints, self.chunks, self.uploads, access, maintenance)
        self.methods: dict[str, Any] = {
            name: method for stub in stubs for name, method in vars(stub).items()
        }
        """Methods of the contract by name."""
        self.writer(1).save()

    def writer(self, step: int, *, writers: int = 1) -> Writer:
        """Returns one of this run."""
        return Writer(self.address, str(self.run), step, writers=writers)

    def step(self, number: int) -> api.Checkpoint:
        """Returns a checkpoint."""
        name = f"{self.run.resource}/checkpoints/{number}"
        request = api.GetCheckpointRequest(name=name)
        found: api.Checkpoint = self.checkpoints.GetCheckpoint(request).checkpoint
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
"""Prepares a call, and returns a function that begins it."""


def _id() -> str:
    return str(uuid.uuid4())


def check_save(address: str) -> None:
    """Saves and reads a checkpoint in a new namespace."""
    Saved(address).check(1)


def _apply_retention(s: Saved) -> Any:
    s.writer(2).save()
    latest = retention_pb2.RetentionPolicy(latest=retention_pb2.KeepLatest(count=1))
    s.checkpoints.UpdateRun(
        api.UpdateRunRequest(
            run=api.Run(name=s.run.resource, retention=latest),
            update_mask=FieldMask(paths=["retention"]),
            request_id=_id(),
        )
    )
    return api.ApplyRetentionRequest(name=s.run.resource)


def _undelete_checkpoint(s: Saved) -> Any:
    name = s.step(1).name
    s.checkpoints.DeleteCheckpoint(
        api.DeleteCheckpointRequest(name=name, request_id=_id())
    )
    return api.UndeleteCheckpointRequest(name=name, request_id=_id())


def _purge_checkpoint(s: Saved) -> Any:
    name = s.step(1).name
    s.checkpoints.DeleteCheckpoint(
        api.DeleteCheckpointRequest(name=name, request_id=_id(), purge_delay=Duration())
    )
    return api.PurgeCheckpointRequest(name=name)


def _diff_checkpoints(s: Saved) -> Any:
    s.writer(2).save()
    return api.DiffCheckpointsRequest(base=s.step(1).name, name=s.step(2).name)


def _watch_checkpoints(s: Saved) -> Start:
    parent = s.run.resource
    watch = s.checkpoints.WatchCheckpoints(api.WatchCheckpointsRequest(parent=parent))
    token = next(watch).resume_token
    watch.cancel()
    s.writer(3).save()
    request = api.WatchCheckpointsRequest(parent=parent, resume_token=token)
    return many_answers(s.checkpoints.WatchCheckpoints, request, count=2)


def _tag_request(s: Saved) -> Any:
    return api.SetTagRequest(
        name=f"{s.run.resource}/tags/best", checkpoint=s.step(1).name, request_id=_id()
    )


def _delete_tag(s: Saved) -> Any:
    name = s.checkpoints.SetTag(_tag_request(s)).tag.name
    return api.DeleteTagRequest(name=name, request_id=_id())


def _list_tags(s: Saved) -> Any:
    s.checkpoints.SetTag(_tag_request(s))
    return api.ListTagsRequest(parent=s.run.resource)


def _hold_request(s: Saved) -> Any:
    return api.CreateHoldRequest(
        parent=s.step(1).name, request_id=_id(), owner="me", ttl=Duration(seconds=60)
    )


def _hold(s: Saved) -> str:
    """Creates a hold; returns its name."""
    name: str = s.checkpoints.CreateHold(_hold_request(s)).hold.name
    return name


def _list_holds(s: Saved) -> Any:
    _hold(s)
    return api.ListHoldsRequest(parent=s.run.resource)


def _leaves(kind: Any) -> Iterator[Any]:
    """Yields the requests with the leaves of a tree."""
    for part in pack_leaves(tree_of()):
        yield kind(leaves=tree_pb2.LeafTable.FromString(part))


def _begin_upload(s: Saved) -> Any:
    opening = uploads.BeginUploadRequest(
        parent=s.run.resource,
        request_id=_id(),
        upload=uploads.Upload(step=3, writer_count=1),
        leaf_count=len(tree_of().leaves),
    )
    return [opening, *_leaves(uploads.BeginUploadRequest)]


def _join_upload(s: Saved) -> Any:
    writer = s.writer(3, writers=2)
    writer.begin()
    join = uploads.JoinOpening(upload=writer.name, writer=1, writer_count=2)
    count = len(tree_of().leaves)
    opening = uploads.JoinUploadRequest(open=join, leaf_count=count)
    return [opening, *_leaves(uploads.JoinUploadRequest)]


def _begun(s: Saved) -> Writer:
    writer = s.writer(3)
    writer.begin()
    return writer


def _written(s: Saved) -> Writer:
    writer = _begun(s)
    writer.write(frame(0, 1, 2))
    return writer


def _list_uploads(s: Saved) -> Any:
    _begun(s)
    return uploads.ListUploadsRequest(parent=s.run.resource)


def _keep_upload_alive(s: Saved) -> Any:
    writer = _begun(s)
    return uploads.KeepUploadAliveRequest(name=writer.name, epoch=writer.epoch)


def _find_chunks(s: Saved) -> Any:
    parts = pack_sums(sums(0, 1))
    return [
        uploads.FindChunksRequest(open=_written(s).ref()),
        *(uploads.FindChunksRequest(chunks=part) for part in parts),
    ]


def write_chunks(s: Saved) -> Start:
    """WriteChunks: whole chunks, and the parts of one."""
    opening = uploads.WriteChunksRequest(open=_begun(s).ref())
    whole = uploads.WriteChunksRequest(frame=frame(0, 1))
    return many_answers(s.uploads.WriteChunks, [opening, whole, *_pieces()])


def write_within_a_chunk(s: Saved) -> Start:
    """WriteChunks that ends within a chunk."""
    opening = uploads.WriteChunksRequest(open=_begun(s).ref())
    start = many_answers(s.uploads.WriteChunks, [opening, next(_pieces())])
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


def _finish_writer(s: Saved) -> Any:
    parts = pack_sums(sums(0, 1, 2))
    return [
        uploads.FinishWriterRequest(open=_written(s).ref(), chunk_count=3),
        *(uploads.FinishWriterRequest(chunks=part) for part in parts),
    ]


def _commit_upload(s: Saved) -> Any:
    writer = _written(s)
    writer.finish(sums(0, 1, 2))
    return uploads.CommitUploadRequest(name=writer.name, epoch=writer.epoch)


def _end_and_commit(s: Saved) -> Start:
    """CommitUpload in which the only writer finishes, too."""
    writer = _written(s)
    (table,) = pack_sums(sums(0, 1, 2))
    end = uploads.WriterEnd(chunks=table)
    request = uploads.CommitUploadRequest(name=writer.name, epoch=writer.epoch, end=end)
    return one_answer(s.methods["CommitUpload"], request)


def _create_checkpoint(s: Saved) -> Any:
    (leaves,) = pack_leaves(tree_of())
    return uploads.CreateCheckpointRequest(
        parent=s.run.resource,
        request_id=_id(),
        upload=uploads.Upload(step=3, writer_count=1),
        leaves=tree_pb2.LeafTable.FromString(leaves),
        data=b"".join(map(stored, range(3))),
    )


def _read_chunks(s: Saved) -> Any:
    found = s.step(1)
    return chunks.ReadChunksRequest(name=found.name, uid=found.uid, chunk=[0, 1, 2])


def _collect_garbage(s: Saved) -> Any:
    s.checkpoints.PurgeCheckpoint(_purge_checkpoint(s))
    return maintenance.CollectGarbageRequest(parent=s.run.resource, grace=Duration())


def _lend_credentials(s: Saved) -> Start:
    """LendCredentials, of a server that lends none."""
    request = access.LendCredentialsRequest(upload=_begun(s).ref())
    start = one_answer(s.methods["LendCredentials"], request)
    return _failing(start, grpc.StatusCode.FAILED_PRECONDITION)


def _list_audit_entries(s: Saved) -> Start:
    """ListAuditEntries, of a server without an audit log."""
    request = access.ListAuditEntriesRequest()
    start = one_answer(s.methods["ListAuditEntries"], request)
    return _failing(start, grpc.StatusCode.FAILED_PRECONDITION)


_LABELS = FieldMask(paths=["labels"])

_REQUESTS: Final[dict[str, Callable[[Saved], Any]]] = {
    "ListRuns": lambda s: api.ListRunsRequest(parent=f"namespaces/{s.run.namespace}"),
    "GetRun": lambda s: api.GetRunRequest(name=s.run.resource),
    "UpdateRun": lambda s: api.UpdateRunRequest(
        run=api.Run(name=s.run.resource, labels={"a": "b"}),
        update_mask=_LABELS,
        request_id=_id(),
    ),
    "ApplyRetention": _apply_retention,
    "ListCheckpoints": lambda s: api.ListCheckpointsRequest(parent=s.run.resource),
    "GetCheckpoint": lambda s: api.GetCheckpointRequest(
        name=f"{s.run.resource}/checkpoints/latest"
    ),
    "ReadManifest": lambda s: api.ReadManifestRequest(name=s.step(1).name),
    "UpdateCheckpoint": lambda s: api.UpdateCheckpointRequest(
        checkpoint=api.Checkpoint(name=s.step(1).name, labels={"a": "b"}),
        update_mask=_LABELS,
        request_id=_id(),
    ),
    "DeleteCheckpoint": lambda s: api.DeleteCheckpointRequest(
        name=s.step(1).name, request_id=_id()
    ),
    "UndeleteCheckpoint": _undelete_checkpoint,
    "PurgeCheckpoint": _purge_checkpoint,
    "DiffCheckpoints": _diff_checkpoints,
    "SetTag": _tag_request,
    "DeleteTag": _delete_tag,
    "ListTags": _list_tags,
    "CreateHold": _hold_request,
    "RenewHold": lambda s: api.RenewHoldRequest(name=_hold(s)),
    "DeleteHold": lambda s: api.DeleteHoldRequest(name=_hold(s)),
    "ListHolds": _list_holds,
    "BeginUpload": _begin_upload,
    "JoinUpload": _join_upload,
    "GetUpload": lambda s: uploads.GetUploadRequest(name=_begun(s).name),
    "ListUploads": _list_uploads,
    "KeepUploadAlive": _keep_upload_alive,
    "FindChunks": _find_chunks,
    "FinishWriter": _finish_writer,
    "CommitUpload": _commit_upload,
    "AbortUpload": lambda s: uploads.AbortUploadRequest(name=_written(s).name),
    "CreateCheckpoint": _create_checkpoint,
    "ReadChunks": _read_chunks,
    "GetServerInfo": lambda _: maintenance.GetServerInfoRequest(),
    "VerifyCheckpoint": lambda s: maintenance.VerifyCheckpointRequest(
        name=s.step(1).name
    ),
    "CollectGarbage": _collect_garbage,
    "GetUsage": lambda s: maintenance.GetUsageRequest(name=s.run.resource),
    "UpgradeStore": lambda _: maintenance.UpgradeStoreRequest(),
    "GetLoginOptions": lambda _: access.GetLoginOptionsRequest(),
    "GetIdentity": lambda _: access.GetIdentityRequest(),
    "TestPermissions": lambda s: access.TestPermissionsRequest(resource=s.run.resource),
    "GetQuota": lambda s: access.GetQuotaRequest(
        parent=f"namespaces/{s.run.namespace}"
    ),
}
"""Functions that prepare a call, and return its request or requests."""


def _make(name: str, saved: Saved) -> Start:
    method, request = saved.methods[name], _REQUESTS[name](saved)
    is_stream = isinstance(
        method, grpc.UnaryStreamMultiCallable | grpc.StreamStreamMultiCallable
    )
    return (many_answers if is_stream else one_answer)(method, request)


CALLS: Final[dict[str, list[Make]]] = {
    **{name: [partial(_make, name)] for name in _REQUESTS},
    "CommitUpload": [partial(_make, "CommitUpload"), _end_and_commit],
    "WatchCheckpoints": [_watch_checkpoints],
    "WriteChunks": [write_chunks, write_within_a_chunk],
    "LendCredentials": [_lend_credentials],
    "ListAuditEntries": [_list_audit_entries],
}
"""Functions that make a call, by its name."""
