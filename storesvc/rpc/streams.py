"""Reads and writes the streams of calls: timeouts, parts of messages, memory.

A stalled client must not occupy the server: a stream whose client sends nothing, or
reads nothing, for too long fails with `StalledError`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from storesvc.errors import InvalidFieldError, LimitExceededError, StalledError
from storesvc.rpc.boundary import Context
from storesvc.rpc.message_budget import LEAST_BYTES_PER_SECOND, RETRY_SECONDS, Share
from storesvc.rpc.request_limits import check_counts
from storesvc_proto.v1 import upload_service_pb2 as upload_api

STALL_SECONDS: Final = 60.0
"""Maximum time between two messages of a client."""

READ_SECONDS: Final = 15.0
"""Maximum time until a client has read a message."""


class _Parted(Protocol):
    """A message with a oneof ``part``."""

    def WhichOneof(self, group: Literal["part"], /) -> str | None:
        """Returns the name of the field that is set."""


PartedRequest: TypeAlias = (
    upload_api.BeginUploadRequest
    | upload_api.JoinUploadRequest
    | upload_api.FindChunksRequest
    | upload_api.FinishWriterRequest
)
"""A message of a stream that has a table in parts."""

S = TypeVar("S")
T = TypeVar("T", bound=PartedRequest)


class StreamTimeout:
    """Limits the time between two messages of one stream."""

    def __init__(self) -> None:
        self._limit: asyncio.Timeout | None = None

    async def limit(self, stream: AsyncIterator[S]) -> AsyncIterator[S]:
        """Yields the messages of a stream.

        Raises:
            StalledError: The client sent nothing for `STALL_SECONDS`.
        """
        while True:
            try:
                # Not wait_for, which would create a task per message.
                async with asyncio.timeout(STALL_SECONDS) as self._limit:
                    message = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError as e:
                raise StalledError(
                    f"the stream sent nothing for {STALL_SECONDS:.0f} s; send what was "
                    "not acknowledged in a new one"
                ) from e
            finally:
                self._limit = None
            yield message

    def renew(self) -> None:
        """Restarts the timeout, because the client waits for the server."""
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(now + STALL_SECONDS)


@asynccontextmanager
async def released(stream: AsyncIterator[S]) -> AsyncIterator[None]:
    """Releases the messages of a stream when the context ends.

    gRPC's iterator refers to itself, and to the message that it returned last: a stream
    that is not read to its end would keep that in memory until the next full garbage
    collection.
    """
    try:
        yield
    finally:
        messages = aiter(stream)
        if isinstance(messages, AsyncGenerator):
            await messages.aclose()


async def first(stream: AsyncIterator[T], part: str) -> T:
    """Returns the first message of a stream.

    Raises:
        InvalidFieldError: There is none, or it has another part.
        StalledError: It did not arrive in time.
    """
    async for message in following(stream, part):
        return message
    raise missing(part)


async def following(stream: AsyncIterator[T], *parts: str) -> AsyncIterator[T]:
    """Yields the messages of a stream; each must have one of the parts."""
    async for message in StreamTimeout().limit(stream):
        check_part(message, *parts)
        check_counts(message)
        yield message


def check_part(message: _Parted, *parts: str) -> None:
    """Rejects a message with another part.

    Raises:
        InvalidFieldError: The message has none of the parts.
    """
    found = message.WhichOneof("part")
    if found not in parts:
        raise unexpected(" or ".join(parts), found)


def missing(part: str) -> InvalidFieldError:
    """Returns the error for a stream without a first message."""
    return InvalidFieldError(f"stream: expected a first message with {part}, got none")


def unexpected(expected: str, found: str | None) -> InvalidFieldError:
    """Returns the error for a message with another part."""
    return InvalidFieldError(f"stream: expected a message with {expected}, got {found}")


async def write(
    context: Context, message: Message | bytes, share: Share | None = None
) -> None:
    """Sends a message; limits the time until the client has read it.

    Args:
        context: Context of the call.
        message: The message, or its serialised bytes.
        share: The memory that the call holds of a budget; None: it holds none.

    Raises:
        StalledError: The client read nothing for `READ_SECONDS`.
        LimitExceededError: The client was slow while others waited for memory.
    """
    if share is None:
        limit: AbstractAsyncContextManager[object] = asyncio.timeout(READ_SECONDS)
    else:
        limit = share.awaiting_client(READ_SECONDS)
    try:
        # Not wait_for, which would create a task per message.
        async with limit:
            await context.write(message)
    except TimeoutError as e:
        if share is not None and share.is_cut:
            raise LimitExceededError(
                f"the client read less than {LEAST_BYTES_PER_SECOND} bytes per second "
                "while others waited for memory; retry in a moment",
                retry_seconds=RETRY_SECONDS,
            ) from e
        raise StalledError(
            f"the client read nothing for {READ_SECONDS:.0f} s; request what is "
            "missing in a new call"
        ) from e
    except grpc.aio.InternalError as e:
        # The client has disconnected; gRPC cancels the call for it sooner or later.
        raise asyncio.CancelledError from e
    if share is not None:
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        share.count(size)
