"""Lends credentials for the storage of a store.

A lender checks nothing about its caller: `storesvc.rpc` has checked permissions, and
that the upload is open or the hold live.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from storesvc.access.call import principal_name
from storesvc.clock import Clock, SystemClock
from storesvc.errors import LendingUnsupportedError, StorageUnavailableError
from storesvc.format.names import HoldName, UploadName
from storesvc.lending import boundary
from storesvc.lending.boundary import Boundary
from storesvc.lending.config import Lending
from storesvc.lending.credentials import Issuer, LentCredential
from storesvc.lending.gcs import STS_URL, GcsIssuer
from storesvc.lending.s3 import S3Issuer
from storesvc.storage.hedged_calls import run_in_daemon_thread
from storesvc.storage.location import Storage

TIMEOUT_SECONDS: Final = 30.0
"""Maximum wait for a credential."""


class Lender:
    """Lends credentials for one storage, as the configuration in force permits."""

    def __init__(
        self,
        storage: Storage,
        config: Callable[[], Lending | None],
        *,
        clock: Clock | None = None,
        gcs_sts_url: str = STS_URL,
    ) -> None:
        """Makes a lender; sends no request.

        Args:
            storage: The storage of the store.
            config: Returns the configuration in force; None: lends nothing.
            clock: Clock; None: the system's.
            gcs_sts_url: The token service of Google, or an emulator of it.
        """
        self._storage = storage
        self._config = config
        self._clock = clock or SystemClock()
        self._gcs_sts_url = gcs_sts_url
        self._opened: tuple[Lending, Issuer] | None = None
        """The issuer, with the configuration that it was opened with."""

    async def lend_write(self, upload: UploadName) -> LentCredential:
        """Lends a credential that permits to create data files of an upload.

        Raises:
            LendingUnsupportedError: The server is not configured to lend, or the
                storage has no credentials that are limited to a prefix.
            StorageDeniedError: The provider lends the server none.
            StorageUnavailableError: The provider does not answer.
        """
        return await self._lend(boundary.of_upload(self._storage, upload))

    async def lend_read(self, hold: HoldName) -> LentCredential:
        """Lends a credential that permits to read the data files of the run of a hold.

        Raises:
            StoreError: As for ``lend_write``.
        """
        return await self._lend(boundary.of_pool(self._storage, hold.run))

    async def _lend(self, limits: Boundary) -> LentCredential:
        config = _enabled(self._config(), limits)
        session = principal_name()

        def issue() -> LentCredential:
            issuer = self._issuer(config, limits)
            asked = self._clock.now()
            secret, until = issuer.issue(limits, session=session)
            until = min(until, asked + max(config.lifetime, timedelta(0)))
            return LentCredential(prefix=limits.uri, expire_time=until, secret=secret)

        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await run_in_daemon_thread(issue)
        except TimeoutError as e:
            raise StorageUnavailableError(
                f"{self._storage.name}: the token service did not answer within "
                f"{TIMEOUT_SECONDS:g} s; try again",
                storage=self._storage.name,
            ) from e

    def _issuer(self, config: Lending, limits: Boundary) -> Issuer:
        """Returns the issuer; opens another one after a change of the configuration."""
        if self._opened is None or self._opened[0] != config:
            issuer: Issuer
            if limits.scheme == "gs":
                issuer = GcsIssuer.open(
                    self._storage, clock=self._clock, sts_url=self._gcs_sts_url
                )
            else:
                issuer = S3Issuer.open(self._storage, config)
            self._opened = config, issuer
        return self._opened[1]


def _enabled(config: Lending | None, limits: Boundary) -> Lending:
    """Returns the configuration, if it enables a storage.

    Raises:
        LendingUnsupportedError: It does not.
    """
    option = "gcs = true" if limits.scheme == "gs" else "s3_role_arn"
    is_enabled = config is not None and (
        config.gcs if limits.scheme == "gs" else config.s3_role_arn
    )
    if config is None or not is_enabled:
        raise LendingUnsupportedError(
            f"lending: expected {option} in [lending] of the server's policy file, "
            "found none; ask its administrator for it, or connect without "
            "lend_credentials="
        )
    return config
