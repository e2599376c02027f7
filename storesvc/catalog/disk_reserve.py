"""The reserve: space that is given up on a full disk, so that deleting still works.

To delete is to write first: a slot that becomes FREE, an announcement. On a disk
without one free block that would fail, and nothing could ever be freed. So a store on
files keeps an object of zeros, which whoever frees space may delete.
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
"""Of the reserve: some hundred small records."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Reserve:
    """That of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._is_kept = False

    async def keep(self) -> None:
        """Keeps a reserve from now on, where there is space for one."""
        self._is_kept = True
        await self.put_back()

    async def put_back(self) -> None:
        """Puts the reserve back where it was given up and there is space again."""
        if not self._is_kept or await self._bucket.list(layout.RESERVE):
            return
        with suppress(PreconditionError):  # another process has
            try:
                await self._bucket.write(
                    layout.RESERVE, bytes(RESERVE_BYTES), condition=IF_ABSENT
                )
            except (
                StorageDeniedError,
                StorageFullError,
                StorageUnavailableError,
            ) as e:
                _log.warning("%s is not kept yet: %s", layout.RESERVE, e)

    async def spent_on(
        self,
        call: Callable[P, Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Returns what a call returns that frees space; where the storage is full, the
        reserve is given up for it, and the call is made again.

        Raises:
            StorageFullError: It is full all the same.
        """
        try:
            return await call(*args, **kwargs)
        except StorageFullError:
            if not self._is_kept:
                raise
        _log.warning("the storage is full: %s is given up", layout.RESERVE)
        await self._bucket.delete(layout.RESERVE)
        try:
            return await call(*args, **kwargs)
        finally:
            await self.put_back()
