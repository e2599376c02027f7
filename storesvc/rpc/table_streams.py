"""Streams that bring a table in parts: gathered without a place of the server.

A client may send its parts as slowly as ``LEAST_BYTES_PER_SECOND``. Meanwhile its
stream holds nothing that others wait for but the bytes that came, of a budget from
which the slowest are cut. Only the work after the last part takes a place.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from storesvc.errors import LimitExceededError, StalledError, StoreError
from storesvc.rpc import boundary
from storesvc.rpc.boundary import Context, PartedRequest, check_part, host_of, released
from storesvc.rpc.message_budget import (
    LEAST_BYTES_PER_SECOND,
    RETRY_SECONDS,
    MemoryBudget,
    Share,
)
from storesvc.rpc.request_limits import check_counts

T = TypeVar("T", bound=PartedRequest)


class PartStream(Generic[T]):
    """The messages of one stream behind its opening."""

    def __init__(self, stream: AsyncIterator[T], part: str) -> None:
        self._stream = stream
        self._part = part
        self._share: Share | None = None

    @asynccontextmanager
    async def sharing(
        self, budget: MemoryBudget, context: Context
    ) -> AsyncIterator["PartStream[T]"]:
        """Accounts what ``keep`` counts to a budget while the context lasts."""
        with budget.share(host_of(context.peer())) as self._share:
            async with released(self._stream):
                yield self

    async def keep(self, size_bytes: int) -> None:
        """Counts bytes that are kept of the messages so far.

        Raises:
            LimitExceededError: There is no room for them.
        """
        assert self._share is not None
        await self._share.take(size_bytes)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yields the messages.

        Raises:
            LimitExceededError: A message has too many entries; or the client is slow,
                and others wait.
            InvalidFieldError: A message is of another part.
            StalledError: The client is slower than any may be.
        """
        share = self._share
        assert share is not None
        clock = asyncio.get_running_loop().time
        while True:
            grace = boundary.STALL_SECONDS + min(0.0, share.spare_seconds(clock()))
            try:
                async with share.awaiting_client(grace):
                    message = await anext(self._stream)
            except StopAsyncIteration:
                return
            except TimeoutError as e:
                raise _late(share) from e
            check_part(message, self._part)
            check_counts(message)
            share.count(message.ByteSize())
            yield message


def _late(share: Share) -> StoreError:
    if share.is_cut:
        return LimitExceededError(
            f"the stream sent less than {LEAST_BYTES_PER_SECOND} bytes a second, and "
            "others waited for the memory of its table; send the table again",
            retry_seconds=RETRY_SECONDS,
        )
    return StalledError(
        f"the stream sent nothing for {boundary.STALL_SECONDS:.0f} s, or less than "
        f"{LEAST_BYTES_PER_SECOND} bytes a second; send its table in a new one"
    )
