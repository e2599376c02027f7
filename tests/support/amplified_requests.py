"""Requests that take a multiple of their size when they are unpacked.

For each call and each repeated field of its request, makes a message that is filled
with the smallest possible entries of the field.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor

from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support import restrictions
from tests.support.contract import Writer
from tests.support.rpcs import METHODS

MESSAGE_BYTES: Final = (4 << 20) - 200
"""Bytes of the entries in a message, with room for the rest of it."""

_FIXED: Final = {
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_DOUBLE: 8,
}


@dataclass(frozen=True, kw_only=True)
class Amplified:
    """One call, and the repeated field to fill."""

    method: MethodDescriptor
    path: tuple[FieldDescriptor, ...]
    """Path from the request to the repeated field."""

    def __str__(self) -> str:
        return ".".join([self.method.name, *(field.name for field in self.path)])

    def message(self) -> bytes:
        """Returns a request that is filled with entries of the field."""
        *outer, field = self.path
        if field.is_packed:
            size = _FIXED.get(field.type, 1)
            data = b"\1" * (MESSAGE_BYTES // size * size)
            data = _tag(field) + _varint(len(data)) + data
        else:
            data = (_tag(field) + b"\0") * (MESSAGE_BYTES // (len(_tag(field)) + 1))
        for around in reversed(outer):
            data = _tag(around) + _varint(len(data)) + data
        return data

    def send(self, address: str, writer: Writer, *, parts: int) -> str:
        """Sends the message, several times in a stream; returns the status."""
        service = self.method.containing_service.full_name
        is_stream = self.method.client_streaming
        kind = f"{'stream' if is_stream else 'unary'}_"
        kind += "stream" if self.method.server_streaming else "unary"
        messages = [opening_of(self.method.name, writer), *[self.message()] * parts]
        with restrictions.channel(address) as channel:
            call = getattr(channel, kind)(f"/{service}/{self.method.name}")
            try:
                answer = call(
                    iter(messages) if is_stream else self.message(), timeout=60
                )
                if self.method.server_streaming:
                    list(answer)
            except grpc.RpcError as e:
                assert isinstance(e, grpc.Call)
                return e.code().name
        return "OK"


def opening_of(method: str, writer: Writer) -> bytes:
    """Returns the first message of a stream, which announces the allowed maximum."""
    ref = writer.ref()
    join = api.JoinOpening(upload=writer.name, writer=1, writer_count=2)
    match method:
        case "BeginUpload":
            return api.BeginUploadRequest(
                parent=writer.name.partition("/uploads/")[0],
                request_id=writer.request_id,
                upload=api.Upload(step=10**6, writer_count=1),
                leaf_count=10**6,
            ).SerializeToString()
        case "JoinUpload":
            opening = api.JoinUploadRequest(open=join, leaf_count=10**6)
            return opening.SerializeToString()
        case "FinishWriter":
            count = 4_000_000
            receipt = api.FinishWriterRequest(open=ref, chunk_count=count)
            return receipt.SerializeToString()
        case "FindChunks":
            return api.FindChunksRequest(open=ref).SerializeToString()
        case "WriteChunks":
            return api.WriteChunksRequest(open=ref).SerializeToString()
    return b""


def all_amplified() -> Iterator[Amplified]:
    """Yields each call with each repeated field of its request."""
    for method in METHODS:
        for path in repeated_fields(method.input_type):
            yield Amplified(method=method, path=path)


def repeated_fields(
    message: Descriptor, around: tuple[FieldDescriptor, ...] = ()
) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Yields the path of each repeated field of a message; recursive ones once."""
    for field in message.fields:
        path = (*around, field)
        if field.is_repeated:
            yield path
        inner = field.message_type
        seen = {f.message_type.full_name for f in around if f.message_type}
        if inner is None or inner.GetOptions().map_entry:
            continue
        if inner.full_name not in seen | {message.full_name}:
            yield from repeated_fields(inner, path)


def _tag(field: FieldDescriptor) -> bytes:
    return _varint(field.number << 3 | 2)


def _varint(number: int) -> bytes:
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
