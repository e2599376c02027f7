"""Deletes what committed uploads leave: their staging tables and their parts.

A checkpoint needs none of it, and garbage collection deletes what a crash leaves. So
``storectl serve`` over a bucket, where deletions take several requests, answers a
commit first and deletes in the background: between ``defer`` and ``drain``. Elsewhere,
as in an embedded store, ``delete`` waits.
"""

import asyncio
import logging
from typing import Final

from storesvc.errors import StoreError
from storesvc.failpoints import Failpoint, reach
from storesvc.format.layout import RunPaths
from storesvc.format.names import UploadName
from storesvc.storage.hedged_calls import together
from storesvc.storage.tensorstore_bucket import TensorStoreBucket

MAX_DEFERRED: Final = 64
"""Uploads whose deletion may be in the background at a time; commits beyond it wait for
their own, so that a storage that deletes slowly slows commits down."""

_log = logging.getLogger(__name__)


class Discards:
    """Deletes the staging of committed uploads."""

    def __init__(self, bucket: TensorStoreBucket) -> None:
        self._bucket = bucket
        self._is_deferred = False
        self._tasks: set[asyncio.Task[None]] = set()

    def defer(self) -> None:
        """Deletes in the background from now on."""
        self._is_deferred = True

    async def drain(self, seconds: float) -> None:
        """Waits for the deletions in the background; the next ones are waited for.

        Args:
            seconds: Maximum time; garbage collection deletes what is left.
        """
        self._is_deferred = False
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    async def delete(self, name: UploadName) -> None:
        """Deletes the staging of an upload, or begins to; a failure is logged."""
        if not self._is_deferred or len(self._tasks) >= MAX_DEFERRED:
            await self._delete(name)
            return
        task = asyncio.create_task(self._delete(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete(self, name: UploadName) -> None:
        places = RunPaths(name.run)
        try:
            await reach(Failpoint.COMMIT_BEFORE_DISCARD)
            await together(
                self._bucket.delete_below(places.staging_of(name.upload)),
                self._bucket.delete_below(places.upload_parts(name.upload)),
            )
        except StoreError:
            # The commit stands; garbage collection deletes the rest.
            _log.warning("%s: its staging was not deleted", name, exc_info=True)
