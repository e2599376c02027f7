"""Answers of TensorStore, awaited by who may be cancelled."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import tensorstore as ts

T = TypeVar("T")


async def answered(asked: "ts.Future[T]") -> T:
    """Returns an answer, once it is there; who is cancelled meanwhile gives it up.

    To be used in place of ``await asked``, which may stop the process for ever: where
    that is cancelled while the answer comes in, ``tensorstore.Future.cancel`` keeps the
    interpreter's lock, and waits for a thread of TensorStore that waits for that lock
    (seen in 0.1.86, once in some 50,000 that were cancelled as they were answered).
    What nobody has a reference to is given up as well, and waits for nothing.

    Raises:
        Exception: What it failed with.
    """
    loop = asyncio.get_running_loop()
    come = loop.create_future()

    def settle() -> None:
        if not come.done():
            come.set_result(None)

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle)

    asked.add_done_callback(tell)
    try:
        await come
    finally:
        asked.remove_done_callback(tell)
    return asked.result()
