"""The emulator for tests."""

import math
from collections.abc import Collection, Sequence

from tests.fake_gcs.emulator import Emulator
from tests.fake_s3.keys import Keys
from tests.fake_s3.s3_api import S3Api


class FakeS3(Emulator):
    """An S3 in memory; a context manager that listens inside its block."""

    def __init__(
        self,
        *,
        buckets: Sequence[str] = (),
        conditional_methods: Collection[str] = ("GET", "HEAD", "PUT", "DELETE"),
        latency_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
        keys: Keys | None = None,
    ) -> None:
        """Makes an emulator that does not listen yet.

        Args:
            buckets: Names of the buckets at the start.
            conditional_methods: Methods whose conditions are checked; some storages
                that imitate S3 ignore the conditions of others.
            latency_seconds: See ``Emulator``.
            bytes_per_second: See ``Emulator``.
            keys: Valid keys, of which every request needs one; None: no authentication.
        """
        super().__init__(
            lambda made: S3Api(
                made, conditional_methods=conditional_methods, keys=keys
            ),
            buckets=buckets,
            latency_seconds=latency_seconds,
            bytes_per_second=bytes_per_second,
        )
