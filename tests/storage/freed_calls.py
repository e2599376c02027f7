"""Finds calls of a bucket that wait for Python's garbage collector."""

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from storesvc.storage.requests import HedgedCall

_SECONDS = 60


@contextmanager
def assert_calls_freed() -> Iterator[None]:
    """Fails if a call that began in the context stays in memory after it, without the
    collector. Calls of earlier tests do not count: their threads may still run."""
    gc.collect()
    earlier: weakref.WeakSet[HedgedCall[Any]] = weakref.WeakSet(_find_calls())
    gc.disable()
    try:
        yield
        # a thread that made a call may not have returned yet; a cycle stays for ever
        deadline = time.monotonic() + _SECONDS
        while any(call not in earlier for call in _find_calls()):
            assert time.monotonic() < deadline, "calls wait for the collector"
            time.sleep(0.01)
    finally:
        gc.enable()


def _find_calls() -> list[HedgedCall[Any]]:
    return [one for one in gc.get_objects() if isinstance(one, HedgedCall)]
