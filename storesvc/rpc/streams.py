"""Reads and writes the streams of calls: timeouts, parts of messages, memory.

A stalled client must not occupy the server: a stream whose client sends nothing, or
reads nothing, for too long fails with `StalledError`.

A stream that collects its request, or keeps its response, holds bytes of a budget.
These rules ensure that no client keeps memory from others:

- If the budget is short, the slowest clients are cut off, starting with the peer that
  holds most, if they are slower than ``LEAST_BYTES_PER_SECOND``.
- A single peer cannot hold the whole budget.
- A stream that gets no memory within ``WAIT_SECONDS`` fails with an error that permits
  a retry. If all streams wait for each other, the one that holds least fails at once.

Example::

    with budget.share(peer) as share:
        async for part in parts:
            await share.take(len(part))
            share.count(len(part))
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from storesvc.errors import InvalidFieldError, LimitExceededError, StalledError
from storesvc.rpc.requests import check_counts
from storesvc.rpc.status import Context
from storesvc_proto.v1 import upload_service_pb2 as upload_api

LEAST_BYTES_PER_SECOND: Final = 64 << 10
"""Minimum rate of a client while others wait: below the rate of a modem. A part of a
table (2 MiB) would take more than half a minute."""

CREDIT_SECONDS: Final = 2.0
"""Time that a client may be idle before its rate counts."""

WAIT_SECONDS: Final = 20.0
"""Maximum wait of a stream for memory: below the deadlines of calls."""

RETRY_SECONDS: Final = 1
"""Retry delay without memory."""


_LEAST_BYTES: Final = 16 << 10
"""Minimum that a stream counts for: its own objects."""


class Share:
    """The memory that one stream holds of a budget."""

    def __init__(self, budget: "MessageBudget", peer: str, *, now: float) -> None:
        self._budget = budget
        self.peer = peer
        self.is_cut = False
        """True if the stream was cut off: its client was slow while others waited."""
        self._limit: asyncio.Timeout | None = None
        self.waits = False
        """True while it waits for memory; then its client is not the slow side."""
        self.size_bytes = _LEAST_BYTES
        self._moved_bytes = 0
        self._client_seconds = -CREDIT_SECONDS
        self._awaits_since: float | None = now

    async def take(self, size_bytes: int) -> None:
        """Adds bytes to the share once the budget has them.

        Raises:
            LimitExceededError: The budget had none in time.
        """
        await self._budget.take(self, size_bytes)

    def give_back(self, size_bytes: int) -> None:
        self.size_bytes -= size_bytes

    def count(self, size_bytes: int) -> None:
        """Counts bytes that the client sent or read."""
        self._moved_bytes += size_bytes

    @asynccontextmanager
    async def awaiting_client(self, seconds: float) -> AsyncIterator[None]:
        """Counts the duration of the context as time of the client.

        Raises:
            TimeoutError: It exceeded the seconds, or the stream was cut off.
        """
        clock = asyncio.get_running_loop().time
        self._awaits_since = clock()
        try:
            async with asyncio.timeout(0 if self.is_cut else seconds) as self._limit:
                yield
        finally:
            self._limit = None
            self._client_seconds += clock() - self._awaits_since
            self._awaits_since = None

    def cut(self) -> None:
        """Cuts off the stream while it waits for its client."""
        self.is_cut = True
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    def spare_seconds(self, now: float) -> float:
        """Returns the time credit of the client; negative: it is slow."""
        seconds = self._client_seconds
        if self._awaits_since is not None:
            seconds += now - self._awaits_since
        return self._moved_bytes / LEAST_BYTES_PER_SECOND - seconds


@dataclass(eq=False, repr=False)
class MessageBudget:
    """Bounds the bytes of the messages of all streams; for one event loop."""

    limit_bytes: int
    """Maximum bytes of all streams."""
    peer_bytes: int
    """Maximum bytes of the streams of one peer."""
    purpose: str
    """Contents of the memory, for error messages: "tables"."""
    _shares: "set[Share]" = field(default_factory=set)

    @property
    def held_bytes(self) -> int:
        """Bytes that all streams hold together."""
        return sum(share.size_bytes for share in self._shares)

    @contextmanager
    def share(self, peer: str) -> Iterator[Share]:
        """Yields the share of a stream; returns its memory when the context ends."""
        share = Share(self, peer, now=asyncio.get_running_loop().time())
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)

    async def take(self, share: Share, size_bytes: int) -> None:
        """Adds bytes to a share once the budget has them."""
        clock = asyncio.get_running_loop().time
        until = clock() + WAIT_SECONDS
        # A request above the limit of a peer waits for all of it.
        size_bytes = min(size_bytes, self.peer_bytes - share.size_bytes)
        share.waits = True
        try:
            while True:
                short = size_bytes + max(
                    self.held_bytes - self.limit_bytes,
                    self._held_by_peer(share.peer) - self.peer_bytes,
                )
                if short <= 0:
                    break
                self._cut_slow(short, clock())
                # If all streams wait for each other, the one that holds least gives up.
                is_stuck = all(s.waits for s in self._shares) and share == min(
                    self._shares, key=lambda s: (s.size_bytes, id(s))
                )
                if clock() >= until or is_stuck:
                    raise LimitExceededError(
                        f"the server keeps at most {self.limit_bytes} bytes of "
                        f"{self.purpose} in memory, and other clients use all of "
                        "them; retry in a moment",
                        retry_seconds=RETRY_SECONDS,
                    )
                await asyncio.sleep(0.1)
        finally:
            share.waits = False
        share.size_bytes += size_bytes

    def _held_by_peer(self, peer: str) -> int:
        return sum(s.size_bytes for s in self._shares if s.peer == peer)

    def _cut_slow(self, short_bytes: int, now: float) -> None:
        """Cuts off enough slow streams to free the bytes."""
        coming = sum(s.size_bytes for s in self._shares if s.is_cut)
        slow = [
            s
            for s in self._shares
            if not (s.is_cut or s.waits) and s.spare_seconds(now) < 0
        ]
        slow.sort(key=lambda s: (-self._held_by_peer(s.peer), s.spare_seconds(now)))
        for share in slow:
            if coming >= short_bytes:
                return
            coming += share.size_bytes
            share.cut()


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

    async def limit(self, stream: AsyncIterator[S]) -> AsyncGenerator[S, None]:
        """Yields the messages of a stream."""
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
async def release_messages(stream: AsyncIterator[S]) -> AsyncIterator[None]:
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
    async with aclosing(StreamTimeout().limit(stream)) as messages:
        async for message in messages:
            check_part(message, *parts)
            check_counts(message)
            yield message


def check_part(message: _Parted, *parts: str) -> None:
    found = message.WhichOneof("part")
    if found not in parts:
        raise unexpected_part_error(" or ".join(parts), found)


def missing(part: str) -> InvalidFieldError:
    """Returns the error for a stream without a first message."""
    return InvalidFieldError(f"stream: expected a first message with {part}, got none")


def unexpected_part_error(expected: str, found: str | None) -> InvalidFieldError:
    """Returns the error for a message with another part."""
    return InvalidFieldError(f"stream: expected a message with {expected}, got {found}")


async def write(
    context: Context, message: Message | bytes, share: Share | None = None
) -> None:
    """Sends a message; limits the time until the client has read it.

    Args:
        share: The memory that the call holds of a budget; None: it holds none.
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
