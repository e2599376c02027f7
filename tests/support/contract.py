"""Sends the calls of the contract one by one, for tests of misbehaving clients."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

import storesvc_client as store
from storesvc.format.checksums import crc32c, digest
from storesvc.format.chunks import ChunkLocations, Sums, pack_placed, pack_sums
from storesvc.format.names import RunName
from storesvc.format.trees import Leaf, Tree, pack_leaves
from storesvc.format.wire import Frame
from storesvc_client.errors import translate_rpc_errors
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support import restrictions

CHUNK = 1000
"""Elements of a chunk, each of one byte."""

LENGTH = CHUNK + 4
"""Bytes of a stored chunk."""


def tree_of(chunks: int = 3) -> Tree:
    """Returns a tree of one leaf, "x", of that many chunks."""
    leaf = Leaf(
        key="x",
        path_kinds="k",
        kind=tree_pb2.LEAF_KIND_HOST_ARRAY,
        dtype="uint8",
        shape=(chunks * CHUNK,),
        chunk_shape=(CHUNK,),
    )
    return Tree((leaf,))


def elements(chunk: int, version: int = 0) -> bytes:
    """Returns the elements of a chunk, different in each version."""
    return bytes([chunk + 100 * version]) * CHUNK


WHOLE = elements(0) + elements(1) + elements(2)
"""Elements of all chunks of ``tree_of()``."""


def stored(chunk: int, version: int = 0) -> bytes:
    """Returns a chunk as it is stored."""
    data = elements(chunk, version)
    return data + crc32c(data).to_bytes(4, "little")


def frame(*chunks: int, version: int = 0) -> api.ChunkFrame:
    """Returns the frame that holds whole chunks."""
    return api.ChunkFrame(
        chunk=chunks,
        offset=[0] * len(chunks),
        length=[LENGTH] * len(chunks),
        data=b"".join(stored(chunk, version) for chunk in chunks),
    )


def received(sent: api.ChunkFrame) -> Frame:
    """Returns a frame as the server receives it."""
    return Frame(sent, memoryview(sent.data))


def sums(*chunks: int, version: int = 0) -> Sums:
    """Returns the receipt for chunks."""
    return mixed_sums(dict.fromkeys(chunks, version))


def mixed_sums(versions: Mapping[int, int]) -> Sums:
    """Returns the receipt for chunks, each of a version."""
    data = [(chunk, elements(chunk, version)) for chunk, version in versions.items()]
    return Sums.of_rows([(chunk, crc32c(d), digest(d)) for chunk, d in data])


def placed_table(*places: tuple[str, int, int]) -> tree_pb2.ChunkTable:
    """Returns the table of chunks in data files: file, number of the chunk within it,
    and within the tree."""
    rows = [(file, LENGTH * at, LENGTH) for file, at, _ in places]
    receipt = sums(*(chunk for *_, chunk in places))
    (table,) = pack_placed(receipt, ChunkLocations.of_rows(rows), with_ordinals=True)
    return table


@contextmanager
def refused(reason: str, match: str | None = None) -> Iterator[None]:
    """Expects an error of the store with a reason."""
    with (
        pytest.raises(store.StoreError, match=match) as caught,
        translate_rpc_errors("here"),
    ):
        yield
    assert reason == caught.value.reason


class Writer:
    """An upload of ``tree_of()``, call by call."""

    def __init__(
        self,
        address: str,
        run: str,
        step: int,
        *,
        writers: int = 1,
        chunks: int = 3,
        channel: grpc.Channel | None = None,
    ) -> None:
        self.stub = UploadServiceStub(channel or restrictions.channel(address))
        self.request_id = str(uuid.uuid4())
        self._parent = RunName.parse(run).resource
        self._upload = api.Upload(step=step, writer_count=writers)
        self._tree = tree_of(chunks)
        self.name, self.epoch = "", 0
        self.leaf_digests = b""
        """Of its one leaf; b"": it sends none."""

    def begin(self, **changes: Any) -> api.Upload:
        """Begins the upload, with some fields changed; keeps its name and epoch."""
        upload = api.Upload()
        upload.CopyFrom(self._upload)
        upload.MergeFrom(api.Upload(**changes))

        def requests() -> Iterator[api.BeginUploadRequest]:
            yield api.BeginUploadRequest(
                parent=self._parent,
                request_id=self.request_id,
                upload=upload,
                leaf_count=len(self._tree.leaves),
            )
            for part in pack_leaves(self._tree):
                leaves = tree_pb2.LeafTable.FromString(part)
                yield api.BeginUploadRequest(
                    leaves=leaves, leaf_digests=self.leaf_digests
                )

        begun: api.Upload = self.stub.BeginUpload(requests(), timeout=30).upload
        self.name, self.epoch = begun.name, begun.epoch
        return begun

    def ref(self, writer: int = 0) -> api.WriterRef:
        """Returns the reference that opens a stream."""
        return api.WriterRef(upload=self.name, epoch=self.epoch, writer=writer)

    def write(self, *frames: api.ChunkFrame, writer: int = 0) -> list[int]:
        """Sends frames; returns the acknowledgements."""
        requests = [
            api.WriteChunksRequest(open=self.ref(writer)),
            *(api.WriteChunksRequest(frame=f) for f in frames),
        ]
        answers = self.stub.WriteChunks(iter(requests), timeout=30)
        return [answer.durable_count for answer in answers]

    def find(self, wanted: Sums, *, writer: int = 0) -> list[int]:
        """Returns the chunks that need not be sent."""
        requests = [
            api.FindChunksRequest(open=self.ref(writer)),
            *(api.FindChunksRequest(chunks=part) for part in pack_sums(wanted)),
        ]
        answers = self.stub.FindChunks(iter(requests), timeout=30)
        return [ordinal for answer in answers for ordinal in answer.found]

    def get(self) -> api.Upload:
        """Returns the upload, from the server."""
        request = api.GetUploadRequest(name=self.name)
        found: api.Upload = self.stub.GetUpload(request, timeout=30).upload
        return found

    def keep_alive(self) -> api.KeepUploadAliveResponse:
        """Renews the lease."""
        request = api.KeepUploadAliveRequest(name=self.name, epoch=self.epoch)
        response: api.KeepUploadAliveResponse = self.stub.KeepUploadAlive(
            request, timeout=30
        )
        return response

    def finish(self, receipt: Sums, *, writer: int = 0) -> api.FinishWriterResponse:
        """Sends a receipt."""
        requests = [
            api.FinishWriterRequest(open=self.ref(writer), chunk_count=len(receipt)),
            *(api.FinishWriterRequest(chunks=part) for part in pack_sums(receipt)),
        ]
        response: api.FinishWriterResponse = self.stub.FinishWriter(
            iter(requests), timeout=30
        )
        return response

    def create(self, **changes: Any) -> api.CreateCheckpointResponse:
        """Makes all of the save in one call, with some fields of it changed."""
        fields = {
            "parent": self._parent,
            "request_id": self.request_id,
            "upload": self._upload,
            "leaves": tree_pb2.LeafTable.FromString(b"".join(pack_leaves(self._tree))),
            "data": b"".join(map(stored, range(self._tree.chunk_count))),
        }
        request = api.CreateCheckpointRequest(**{**fields, **changes})
        response: api.CreateCheckpointResponse = self.stub.CreateCheckpoint(
            request, timeout=30
        )
        return response

    def commit(self) -> api.CommitUploadResponse:
        """Commits."""
        request = api.CommitUploadRequest(name=self.name, epoch=self.epoch)
        response: api.CommitUploadResponse = self.stub.CommitUpload(request, timeout=30)
        return response

    def abort(self) -> None:
        """Aborts."""
        self.stub.AbortUpload(api.AbortUploadRequest(name=self.name), timeout=30)

    def save(self, chunks: Sequence[int] = (0, 1, 2)) -> None:
        """Saves the whole tree, from begin to commit."""
        self.begin()
        self.complete(chunks)

    def complete(self, chunks: Sequence[int] = (0, 1, 2)) -> None:
        """Stores the chunks of an upload that has begun, and commits it."""
        self.write(frame(*chunks))
        self.finish(sums(*chunks))
        self.commit()
