"""Parsing: the one place where the bytes of a request become a message.

gRPC would answer bytes that it cannot parse with a status of its own, and with a
traceback in the log. Here they are a malformed request like any other.
"""

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from storesvc.errors import InvalidFieldError

M = TypeVar("M", bound=Message)

MESSAGE_TYPE: Final = "message_type"
"""The key of the error's metadata that names the expected message."""


def parsed(kind: type[M], data: bytes) -> M:
    """Returns the message that bytes are.

    Raises:
        InvalidFieldError: They are no such message.
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
