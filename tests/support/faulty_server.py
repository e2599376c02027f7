"""A server on a real socket, whose bucket fails as planned."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storesvc.rpc.calls import OPEN, Security
from storesvc.server import app
from storesvc.store import Store
from tests.support.faulty_bucket import FaultyBucket, Plan, no_faults


@contextmanager
def serving(
    root: Path, plan: Plan = no_faults, security: Security = OPEN
) -> Iterator[str]:
    """Serves a root through a bucket that fails as planned; yields the address."""
    ready: list[str] = []

    async def run() -> None:
        bucket = await FaultyBucket.faulty(root.as_uri())
        opened = await Store.open(bucket)
        bucket.calls.follow(plan)
        async with app.running(opened, "127.0.0.1:0", security=security) as port:
            ready.append(f"127.0.0.1:{port}")
            await stop.wait()

    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    while not ready:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
