"""Speaks the contract by hand, for tests of what no well-behaved client does."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from storesvc.format.checksums import crc32c, digest
from storesvc.format.chunks import Sums, pack_sums
from storesvc.format.names import RunName
from storesvc.format.trees import Leaf, Tree, pack_leaves
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub

CHUNK = 1000
"""Elements of a chunk, each of one byte."""


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


def elements(chunk: int) -> bytes:
    """Returns the elements of a chunk."""
    return bytes([chunk]) * CHUNK


def stored(chunk: int) -> bytes:
    """Returns a chunk as it is stored."""
    return elements(chunk) + crc32c(elements(chunk)).to_bytes(4, "little")


def frame(*chunks: int) -> api.ChunkFrame:
    """Returns the frame that holds whole chunks."""
    return api.ChunkFrame(
        chunk=chunks,
        offset=[0] * len(chunks),
        length=[CHUNK + 4] * len(chunks),
        data=b"".join(map(stored, chunks)),
    )


def sums(*chunks: int) -> Sums:
    """Returns the receipt for chunks."""
    return Sums(
        ordinal=np.array(chunks, np.int64),
        crc32c=np.array([crc32c(elements(c)) for c in chunks], np.uint32),
        digests=np.frombuffer(
            b"".join(digest(elements(c)) for c in chunks), np.uint8
        ).reshape(-1, 16),
    )


class Writer:
    """An upload of ``tree_of()``, call by call."""

    def __init__(
        self, address: str, run: str, step: int, *, writers: int = 1, chunks: int = 3
    ) -> None:
        self.stub = UploadServiceStub(grpc.insecure_channel(address))
        self.request_id = str(uuid.uuid4())
        self._parent = RunName.parse(run).resource
        self._upload = api.Upload(step=step, writer_count=writers)
        self._tree = tree_of(chunks)
        self.name, self.epoch = "", 0

    def begin(self, **changes: Any) -> api.Upload:
        """Begins, with changed fields of the upload; remembers name and epoch."""
        upload = api.Upload()
        upload.CopyFrom(self._upload)
        upload.MergeFrom(api.Upload(**changes))

        def requests() -> Iterator[api.BeginUploadRequest]:
            yield api.BeginUploadRequest(
                parent=self._parent, request_id=self.request_id, upload=upload
            )
            for part in pack_leaves(self._tree):
                leaves = tree_pb2.LeafTable.FromString(part)
                yield api.BeginUploadRequest(leaves=leaves)

        begun: api.Upload = self.stub.BeginUpload(requests(), timeout=30).upload
        self.name, self.epoch = begun.name, begun.epoch
        return begun

    def ref(self, writer: int = 0) -> api.WriterRef:
        """Returns how a stream opens."""
        return api.WriterRef(upload=self.name, epoch=self.epoch, writer=writer)

    def write(self, *frames: api.ChunkFrame, writer: int = 0) -> list[int]:
        """Sends frames; returns the acknowledgements."""
        requests = [
            api.WriteChunksRequest(open=self.ref(writer)),
            *(api.WriteChunksRequest(frame=f) for f in frames),
        ]
        answers = self.stub.WriteChunks(iter(requests), timeout=30)
        return [answer.durable_count for answer in answers]

    def finish(self, receipt: Sums, *, writer: int = 0) -> api.FinishWriterResponse:
        """Sends a receipt."""
        requests = [
            api.FinishWriterRequest(open=self.ref(writer)),
            *(api.FinishWriterRequest(chunks=part) for part in pack_sums(receipt)),
        ]
        response: api.FinishWriterResponse = self.stub.FinishWriter(
            iter(requests), timeout=30
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
        """Does all of it."""
        self.begin()
        self.write(frame(*chunks))
        self.finish(sums(*chunks))
        self.commit()
