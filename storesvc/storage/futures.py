"""Awaits what a storage library does outside the event loop.

`await_future` awaits a TensorStore future, `run_in_daemon_thread` a blocking call.
Neither delays the exit of the process or of a cancelled caller.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    import tensorstore as ts

P = ParamSpec("P")
T = TypeVar("T")


async def await_future(future: "ts.Future[T]") -> T:
    """Returns the result of a TensorStore future; on cancellation drops the future
    without `cancel()`, which can deadlock.

    Replaces ``await future``: if that is cancelled while the result arrives,
    ``tensorstore.Future.cancel`` holds the interpreter lock while it waits for a
    TensorStore thread, which waits for that lock (seen in 0.1.86, once in some 50,000
    cancellations at the moment of the result). A future without references is dropped
    as well, and blocks nothing.

    Raises:
        Exception: The error of the future.
    """
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def settle() -> None:
        if not done.done():
            done.set_result(None)

    def notify(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(notify)
    try:
        await done
    finally:
        future.remove_done_callback(notify)
    return future.result()


async def run_in_daemon_thread(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Returns the result of a blocking function, run in a new daemon thread; on
    cancellation leaves the thread running.

    ``asyncio.to_thread`` uses executor threads, which the interpreter joins at exit: a
    storage that does not answer would delay the exit by the timeout of its client.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run(result: Future[T]) -> None:
        try:
            result.set_result(function(*args, **kwargs))
        except BaseException as e:  # noqa: BLE001 - the awaiting caller raises it
            result.set_exception(e)
        # An error refers to the frames that it passed: if one of them referred to the
        # result, sockets of the function would wait for the garbage collector.
        del result

    threading.Thread(
        target=run, args=(result,), name="storesvc-blocking-call", daemon=True
    ).start()
    waiting = [asyncio.wrap_future(result)]
    del result
    return await waiting.pop()
