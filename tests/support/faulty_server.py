"""A server on a real socket, whose bucket fails as planned."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storesvc.rpc.calls import OPEN, Security
from storesvc.store import Store
from tests.support.faulty_bucket import FaultyBucket, Plan, no_faults
from tests.support.thread_server import ThreadServer


@contextmanager
def serving(
    root: Path, plan: Plan = no_faults, security: Security = OPEN
) -> Iterator[str]:
    """Serves a root through a bucket that fails as planned; yields the address."""

    class FaultyServer(ThreadServer):
        async def open_store(self) -> Store:
            bucket = await FaultyBucket.faulty(root.as_uri())
            opened = await Store.open(bucket)
            bucket.calls.follow(plan)
            return opened

    with FaultyServer(root.as_uri(), security=security) as server:
        yield server.address
