"""Asides: functions that wait for a storage, each in a thread of its own that nobody
waits for when the process ends.

Threads of executors, as of ``asyncio.to_thread``, are waited for: a storage that does
not answer would keep a process from ending for as long as its client is patient.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns what a function returns; who is cancelled meanwhile leaves it alone."""
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            answer.set_result(function(*args, **kwargs))
        except BaseException as e:  # noqa: BLE001 - for who waits for it
            answer.set_exception(e)

    threading.Thread(target=run, name="storesvc-aside", daemon=True).start()
    return await asyncio.wrap_future(answer)
