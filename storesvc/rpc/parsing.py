"""Parses the bytes of requests; no other module does.

gRPC would respond to malformed bytes with a status of its own, and log a traceback.
Here they are an error of the contract.
"""

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from storesvc.errors import InvalidFieldError

M = TypeVar("M", bound=Message)

MESSAGE_TYPE: Final = "message_type"
"""Metadata key for the name of the expected message."""


def parsed(kind: type[M], data: bytes) -> M:
    """Parses a message.

    Raises:
        InvalidFieldError: The bytes are no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError as e:
        name = kind.DESCRIPTOR.full_name
        raise InvalidFieldError(
            f"request: expected a serialized {name}, got {len(data)} bytes that are "
            "not one; use a client of this contract",
            **{MESSAGE_TYPE: name},
        ) from e
