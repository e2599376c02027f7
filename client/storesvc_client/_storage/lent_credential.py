"""Credentials that the server lends, renewed before they expire.

Everything here runs on one event loop, so concurrent requests share a renewal. At
``RENEWED_AT`` of its life a credential is renewed in the background, while requests
still use the old one; they wait only for the first credential, for one that replaces
an expired one, and for one that replaces a rejected one.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from storesvc.storage.hedged_calls import run_in_daemon_thread
from storesvc_client.errors import StoreError

RENEWED_AT: Final = 0.8
"""Share of its life after which a credential is renewed."""

LEAST_LIFE_SECONDS: Final = 1.0
"""Life of a credential that has expired by this machine's clock, which may be wrong."""

PAUSE_SECONDS: Final = 5.0
"""Pause after a renewal that failed while the credential is still valid."""

_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsSecret:
    """An access token for Google Cloud Storage."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Secret:
    """Temporary keys for S3."""

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str = field(repr=False)


Secret: TypeAlias = GcsSecret | S3Secret


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lent:
    """A credential; each is another one."""

    secret: Secret
    expire_seconds: float
    """When it expires, in seconds of the epoch."""


class LentCredential:
    """The credential in use for one upload or one run. For one event loop."""

    def __init__(
        self,
        lend: Callable[[], Lent],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates it; nothing is lent yet.

        Args:
            lend: Asks the server for another credential; blocks.
            clock: Returns seconds of the epoch.
        """
        self._lend = lend
        self._clock = clock
        self._lent: Lent | None = None
        self._due = self._end = 0.0
        self._renewing: asyncio.Task[Lent] | None = None

    async def current(self) -> Lent:
        """Returns a credential that is valid now, as far as this machine knows.

        Raises:
            StoreError: The server lends none.
        """
        now = self._clock()
        if self._lent is None or now >= self._end:
            return await self._renewed()
        if now >= self._due:
            self._start()
        return self._lent

    async def instead_of(self, rejected: Lent) -> Lent:
        """Returns another credential than one that the storage has rejected.

        Raises:
            StoreError: The server lends none.
        """
        if self._lent is not None and self._lent is not rejected:
            return self._lent
        return await self._renewed()

    async def _renewed(self) -> Lent:
        # a request that is dropped must not end the renewal of the others
        return await asyncio.shield(self._start())

    def _start(self) -> "asyncio.Task[Lent]":
        """Returns the renewal in progress; begins one if there is none."""
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())
            self._renewing.add_done_callback(self._ended)
        return self._renewing

    async def _renew(self) -> Lent:
        lent = await run_in_daemon_thread(self._lend)
        now = self._clock()
        life = max(lent.expire_seconds - now, LEAST_LIFE_SECONDS)
        self._lent, self._due, self._end = lent, now + RENEWED_AT * life, now + life
        return lent

    def _ended(self, renewing: "asyncio.Task[Lent]") -> None:
        self._renewing = None
        if renewing.cancelled():
            return
        error = renewing.exception()  # marks it as retrieved
        if error is None:
            return
        # Others may wait for the same renewal, and raise its error.
        level = logging.WARNING if isinstance(error, StoreError) else logging.ERROR
        if self._clock() < self._end:
            self._due = self._clock() + PAUSE_SECONDS
            _log.log(level, "a lent credential is not renewed yet: %s", error)
