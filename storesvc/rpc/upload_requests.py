"""Parses the requests that carry chunks, without a copy of the chunks' bytes."""

from typing import Final

from storesvc.format import wire
from storesvc.rpc.parsing import parsed
from storesvc_proto.v1 import upload_service_pb2 as upload_api

_RECEIVED: Final = wire.tag(upload_api.WriteChunksRequest.FRAME_FIELD_NUMBER)


def part_of(request: bytes) -> wire.Frame | upload_api.WriteChunksRequest:
    """Returns the frame of a serialised ``WriteChunksRequest``, or one that has none.

    Raises:
        InvalidFieldError: It is no such request.
    """
    found = wire.split(request, _RECEIVED)
    if found is not None:
        return found
    message = parsed(upload_api.WriteChunksRequest, request)
    if message.HasField("frame"):
        return wire.Frame(message.frame, memoryview(message.frame.data))
    return message
