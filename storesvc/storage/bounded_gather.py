"""Runs calls of the bucket at the same time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

AT_ONCE: Final = 128
"""Small objects that one call reads or writes concurrently."""

S = TypeVar("S")
T = TypeVar("T")


async def each(
    look: Callable[[S], Awaitable[T]], things: Iterable[S], *, at_once: int = AT_ONCE
) -> list[T]:
    """Returns the result of `look` for each item, in the order of the items.

    Args:
        look: Called once for each item.
        things: The items.
        at_once: Maximum concurrent calls.
    """
    slots = asyncio.Semaphore(at_once)

    async def bounded(thing: S) -> T:
        async with slots:
            return await look(thing)

    return await asyncio.gather(*map(bounded, things))


@asynccontextmanager
async def beside(call: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Runs a call while the context lasts; yields its task, whose result the caller
    awaits if it needs it. Cancels the call at the end, and waits until it has ended."""
    task = asyncio.create_task(call)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # asyncio would log one that no caller retrieves


async def together(*calls: Coroutine[Any, Any, None]) -> None:
    """Runs calls at the same time. The first error cancels the others, and is raised
    once they have ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
