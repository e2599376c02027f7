"""Receives the parts of a table from a stream, within a memory budget.

A client may send the parts as slowly as ``LEAST_BYTES_PER_SECOND``. While it sends, its
stream holds only the bytes that have arrived, of a budget from which the slowest
streams are cut off. Only the work after the last part holds the semaphore of the
service.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from storesvc.errors import LimitExceededError, StalledError, StoreError
from storesvc.rpc import streams
from storesvc.rpc.boundary import Context, share_key
from storesvc.rpc.message_budget import (
    LEAST_BYTES_PER_SECOND,
    RETRY_SECONDS,
    MessageBudget,
    Share,
)
from storesvc.rpc.request_limits import check_counts
from storesvc.rpc.streams import PartedRequest, check_part, released

T = TypeVar("T", bound=PartedRequest)


class PartStream(Generic[T]):
    """The messages of one stream after its opening."""

    def __init__(self, stream: AsyncIterator[T], part: str) -> None:
        self._stream = stream
        self._part = part
        self._share: Share | None = None

    @asynccontextmanager
    async def sharing(
        self, budget: MessageBudget, context: Context
    ) -> AsyncIterator["PartStream[T]"]:
        """Accounts the bytes of ``keep`` to a budget while the context lasts."""
        with budget.share(share_key(context)) as self._share:
            async with released(self._stream):
                yield self

    async def keep(self, size_bytes: int) -> None:
        """Adds bytes of the received messages to the budget.

        Raises:
            LimitExceededError: The budget has no memory for them.
        """
        assert self._share is not None
        await self._share.take(size_bytes)

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yields the messages.

        Raises:
            LimitExceededError: A message has too many entries, or the client is slow
                while others wait for memory.
            InvalidFieldError: A message has another part.
            StalledError: The client is slower than permitted.
        """
        share = self._share
        assert share is not None
        clock = asyncio.get_running_loop().time
        while True:
            grace = streams.STALL_SECONDS + min(0.0, share.spare_seconds(clock()))
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
            f"the stream sent less than {LEAST_BYTES_PER_SECOND} bytes per second "
            "while others waited for memory; send the table again",
            retry_seconds=RETRY_SECONDS,
        )
    return StalledError(
        f"the stream sent nothing for {streams.STALL_SECONDS:.0f} s, or less than "
        f"{LEAST_BYTES_PER_SECOND} bytes per second; send its table in a new one"
    )
