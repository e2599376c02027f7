"""Leases: writes that an upload is still live.

Progress renews a lease often, and usually a process knows that it wrote the record a
short time ago. Calls that renew one lease at the same time share one write, because a
bucket rejects many writes of one object. The write goes on if one of these calls is
cancelled, and ends with the server.
"""

import asyncio
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from cachetools import LRUCache

from storesvc.catalog.records import timestamp
from storesvc.clock import Clock
from storesvc.format.layout import RunPaths
from storesvc.format.names import UploadName
from storesvc.format.seal import seal
from storesvc.storage.bucket import Bucket
from storesvc_proto.v1 import bucket_pb2 as pb

_KEPT_RENEWALS: Final = 10_000

_RENEWALS_A_LEASE: Final = 6
"""Maximum lease records that progress writes within one lease."""


@dataclass(frozen=True, slots=True)
class _Renewal:
    """A lease record that this process wrote."""

    when: datetime
    at: float
    """``Clock.elapsed`` at that time."""


class Leases:
    """Renews the leases of the uploads of a bucket."""

    def __init__(self, bucket: Bucket, *, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._renewals: LRUCache[UploadName, _Renewal] = LRUCache(_KEPT_RENEWALS)
        self._writing: dict[UploadName, asyncio.Task[_Renewal]] = {}

    async def renew(self, name: UploadName, length: timedelta) -> datetime:
        """Renews the lease of an upload, and returns when it expires.

        Progress calls this for each batch; only ``_RENEWALS_A_LEASE`` renewals per
        lease are written to the bucket.
        """
        interval = length.total_seconds() / _RENEWALS_A_LEASE
        last = self._renewals.get(name)
        if last is None or self._clock.elapsed() - last.at >= interval:
            writing = self._writing.get(name)
            if writing is None:
                writing = asyncio.create_task(self._write(name))
                self._writing[name] = writing
                writing.add_done_callback(partial(self._written, name))
            last = await asyncio.shield(writing)
        return last.when + length

    async def end(self) -> None:
        """Cancels the writes whose calls were cancelled, and waits until they have
        ended; for a server that has ended all calls."""
        left = list(self._writing.values())
        for writing in left:
            writing.cancel()
        if left:
            await asyncio.wait(left)

    async def _write(self, name: UploadName) -> _Renewal:
        renewal = _Renewal(self._clock.now(), self._clock.elapsed())
        lease = pb.LeaseRecord(
            renew_time=timestamp(renewal.when), nonce=uuid.uuid4().hex
        )
        place = RunPaths(name.run).lease(name.upload)
        await self._bucket.write(place, seal(lease, place=place))
        self._renewals[name] = renewal
        return renewal

    def _written(self, name: UploadName, writing: "asyncio.Task[_Renewal]") -> None:
        del self._writing[name]
        if not writing.cancelled():
            writing.exception()  # marks it as retrieved, even if no caller waits
