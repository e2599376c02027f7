"""The emulator as tests hold it."""

import math
from collections.abc import Collection, Sequence

from tests.fake_gcs.emulator import Emulator
from tests.fake_s3.s3_api import S3Api


class FakeS3(Emulator):
    """An S3 in memory, which listens while it is entered."""

    def __init__(
        self,
        *,
        buckets: Sequence[str] = (),
        heeds: Collection[str] = ("GET", "HEAD", "PUT", "DELETE"),
        latency_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
    ) -> None:
        """Makes one that does not listen yet.

        Args:
            buckets: The names of buckets to begin with.
            heeds: The methods whose conditions count; those of imitations do not all.
            latency_seconds: As of ``Emulator``.
            bytes_per_second: As of ``Emulator``.
        """
        super().__init__(
            lambda made: S3Api(made, heeds=heeds),
            buckets=buckets,
            latency_seconds=latency_seconds,
            bytes_per_second=bytes_per_second,
        )
