"""Keeps a reserve of disk space, so that deletions still work on a full disk.

A deletion begins with writes: an announcement, a slot that becomes FREE. On a full disk
they would fail, and no space could ever be freed. So a store on files keeps an object
of zeros, which a call that frees space may delete first.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from storesvc.errors import (
    StorageDeniedError,
    StorageFullError,
    StorageUnavailableError,
)
from storesvc.format import layout
from storesvc.storage.bucket import IF_ABSENT, Bucket, PreconditionError

RESERVE_BYTES: Final = 1 << 20
"""Size of the reserve: some hundred small records."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Reserve:
    """The disk reserve of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._is_kept = False

    async def keep(self) -> None:
        """Creates the reserve, and keeps it from now on."""
        self._is_kept = True
        await self.put_back()

    async def put_back(self) -> None:
        """Creates the reserve again, if it was used and there is space."""
        if not self._is_kept or await self._bucket.list(layout.RESERVE):
            return
        with suppress(PreconditionError):  # another process has created it
            try:
                await self._bucket.write(
                    layout.RESERVE, bytes(RESERVE_BYTES), condition=IF_ABSENT
                )
            except (
                StorageDeniedError,
                StorageFullError,
                StorageUnavailableError,
            ) as e:
                _log.warning("%s is not created yet: %s", layout.RESERVE, e)

    async def spent_on(
        self,
        call: Callable[P, Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs a call that frees space, and returns its result; if the storage is full,
        deletes the reserve and runs the call again.

        Raises:
            StorageFullError: The storage is full without the reserve, too.
        """
        try:
            return await call(*args, **kwargs)
        except StorageFullError:
            if not self._is_kept:
                raise
        _log.warning("the storage is full: deleting %s", layout.RESERVE)
        await self._bucket.delete(layout.RESERVE)
        try:
            return await call(*args, **kwargs)
        finally:
            await self.put_back()
