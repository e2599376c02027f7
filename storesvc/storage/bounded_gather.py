"""Runs calls of the bucket at the same time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
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


async def together(*calls: Coroutine[Any, Any, None]) -> None:
    """Runs calls at the same time. The first error cancels the others, and is raised
    once they have ended."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
