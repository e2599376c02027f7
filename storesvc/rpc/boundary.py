"""What all calls share: refusals, streams with parts, limits of messages."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final, Literal, Protocol, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from storesvc.errors import (
    InvalidFieldError,
    LimitExceededError,
    StalledError,
    StorageUnavailableError,
    StoreError,
)
from storesvc.format.names import InvalidNameError
from storesvc.rpc.message_budget import LEAST_BYTES_PER_SECOND, RETRY_SECONDS, Share
from storesvc.rpc.parsing import MESSAGE_TYPE
from storesvc.rpc.request_limits import check_counts
from storesvc.rpc.status import refuse
from storesvc.storage.log_throttle import LogThrottle
from storesvc_proto.v1 import upload_service_pb2 as upload_api

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Bytes of a message, either way: gRPC's default, kept."""

STALL_SECONDS: Final = 60.0
"""How long a stream may send nothing."""

TAKE_SECONDS: Final = 15.0
"""How long a client may take no message."""

CALL_SECONDS: Final = 60.0
"""How long the work of a call may take, once its table has come."""

WAY_SECONDS: Final = 1.0
"""How long a last answer may be on its way."""

_KEPT: Final = (
    "the server has waited for its storage, or for the stream, as long as the call may "
    "take; try again, or allow more time"
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class _Parted(Protocol):
    """A message of a stream, which holds one of several parts."""

    def WhichOneof(self, group: Literal["part"], /) -> str | None:
        """Returns which one."""


PartedRequest: TypeAlias = (
    upload_api.BeginUploadRequest
    | upload_api.JoinUploadRequest
    | upload_api.FindChunksRequest
    | upload_api.FinishWriterRequest
)
"""A message of a stream that brings a table."""

S = TypeVar("S")
T = TypeVar("T", bound=PartedRequest)

_log = logging.getLogger(__name__)
_lines = LogThrottle()


@asynccontextmanager
async def refusals(context: Context) -> AsyncIterator[None]:
    """Ends the call with the status of any refusal raised inside, and before its time
    is over: who gives a call up hears nothing of what it was kept by."""
    try:
        async with asyncio.timeout(_answer_seconds(context)) as limit:
            yield
    except InvalidNameError as e:
        await refuse(context, InvalidFieldError(str(e)))
    except StoreError as e:
        _log_trouble(e)
        await refuse(context, e)
    except TimeoutError:
        if limit.expired():
            await refuse(context, StorageUnavailableError(_KEPT))
        late = f"the call took longer than {CALL_SECONDS:.0f} s; repeat it"
        await refuse(context, StalledError(late))
    except grpc.aio.AbortError:
        raise
    except Exception:  # noqa: BLE001 - a boundary: told to the log, not to the client
        bug = uuid.uuid4().hex[:8]
        _log.exception("bug %s", bug)
        await context.abort(
            grpc.StatusCode.INTERNAL,
            f"a bug of the server, {bug} in its log; please report it",
        )


def _answer_seconds(context: Context) -> float | None:
    """How long a call may take here; None: as long as it wants."""
    # None, whatever its types say, where the client has set no deadline
    left = cast("float | None", context.time_remaining())
    return None if left is None else left - min(left / 4, WAY_SECONDS)


def _log_trouble(error: StoreError) -> None:
    """Logs, throttled, the errors of a storage and bytes that are no request."""
    if "read_only" in error.metadata:  # logged at the start; each restore meets it
        return
    if "storage" in error.metadata:
        kind = (type(error), error.metadata["storage"])
    elif MESSAGE_TYPE in error.metadata:
        kind = (type(error), MESSAGE_TYPE)
    else:
        return
    if _lines.admits(kind, now=time.monotonic()):
        _log.warning("%s", error)


def host_of(peer: str) -> str:
    """Returns the host of a peer as gRPC names it, without its port."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else peer


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
    """The first message of a stream, which holds another part than the others."""
    async for message in following(stream, part):
        return message
    raise missing(part)


async def following(stream: AsyncIterator[T], *parts: str) -> AsyncIterator[T]:
    """The other messages of a stream; none may be of another part, or be late."""
    async for message in in_time(stream):
        check_part(message, *parts)
        check_counts(message)
        yield message


class Patience:
    """With the messages of a stream: none may be late."""

    def __init__(self) -> None:
        self._limit: asyncio.Timeout | None = None

    async def with_each(self, stream: AsyncIterator[S]) -> AsyncIterator[S]:
        """Yields the messages of a stream.

        Raises:
            StalledError: The next one is late.
        """
        while True:
            try:
                # wait_for would make a task of each
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
        """Begins anew to count how late the next message is: who sends it waits for
        us."""
        if self._limit is not None and not self._limit.expired():
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(now + STALL_SECONDS)


def in_time(stream: AsyncIterator[S]) -> AsyncIterator[S]:
    """Returns the messages of a stream; none may be late."""
    return Patience().with_each(stream)


def check_part(message: _Parted, *parts: str) -> None:
    """Refuses a message of another part.

    Raises:
        InvalidFieldError: It is.
    """
    found = message.WhichOneof("part")
    if found not in parts:
        raise unexpected(" or ".join(parts), found)


def missing(part: str) -> InvalidFieldError:
    """Returns the refusal of a stream without its first message."""
    return InvalidFieldError(f"stream: expected a first message with {part}, got none")


def unexpected(expected: str, found: str | None) -> InvalidFieldError:
    """Returns the refusal of a message of a stream."""
    return InvalidFieldError(f"stream: expected a message with {expected}, got {found}")


async def write(
    context: Context, message: Message | bytes, share: Share | None = None
) -> None:
    """Sends a message; a client that does not take it holds memory of the server.

    Args:
        context: Of the call.
        message: The message.
        share: What the call holds of a budget; None: nothing others wait for.

    Raises:
        StalledError: The client took nothing for too long.
        LimitExceededError: It was slow, and others waited for what it holds.
    """
    if share is None:
        limit: AbstractAsyncContextManager[object] = asyncio.timeout(TAKE_SECONDS)
    else:
        limit = share.awaiting_client(TAKE_SECONDS)
    try:
        # wait_for would make a task of each
        async with limit:
            await context.write(message)
    except TimeoutError as e:
        if share is not None and share.is_cut:
            raise LimitExceededError(
                f"the client took less than {LEAST_BYTES_PER_SECOND} bytes a second, "
                "and others waited for the memory; ask again in a moment",
                retry_seconds=RETRY_SECONDS,
            ) from e
        raise StalledError(
            f"the client took nothing for {TAKE_SECONDS:.0f} s; ask for what is "
            "missing in a new call"
        ) from e
    except grpc.aio.InternalError as e:
        # The client has gone. gRPC cancels the call for that, sooner or later.
        raise asyncio.CancelledError from e
    if share is not None:
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        share.count(size)
