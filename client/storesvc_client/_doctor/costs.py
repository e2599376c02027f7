"""Estimates what saves of a tree cost a month, from the requests that storesvc makes.

Prices are list prices of one region, for an order of magnitude: Google Cloud Storage
(https://cloud.google.com/storage/pricing, us-central1, STANDARD) and S3
(https://aws.amazon.com/s3/pricing, us-east-1), read in November 2026.
"""

from dataclasses import dataclass
from typing import Final

from storesvc_client._doctor.findings import Finding, passed
from storesvc_client._views.texts import size_text

_MONTH_SECONDS: Final = 30 * 86_400
_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Dollars of a provider."""

    gib_month: float
    write: float
    """Price of one request that writes or lists."""


GCS: Final = Prices(gib_month=0.020, write=5e-6)
S3: Final = Prices(gib_month=0.023, write=5e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The saves of one job."""

    state_bytes: int
    """Bytes of one checkpoint."""
    interval_seconds: float = 600.0
    """Time between two saves."""
    kept_count: int = 5
    """Checkpoints that are kept."""
    purge_seconds: float = 3 * 86_400.0
    """Time for which a deleted checkpoint keeps its bytes."""


FIXED_WRITES: Final = 33
BYTES_A_WRITE: Final = 48 << 20
"""Writing requests of a save: so many, and one more for so many bytes; measured by
``python -m benchmarks requests``."""


def estimate_cost(work: Workload, prices: Prices) -> list[Finding]:
    """Returns the requests and dollars of a month."""
    saves = _MONTH_SECONDS / work.interval_seconds
    writes = saves * (FIXED_WRITES + -(-work.state_bytes // BYTES_A_WRITE))
    kept = work.kept_count + work.purge_seconds / work.interval_seconds
    stored = min(kept, saves) * work.state_bytes
    storing = stored / _GIB * prices.gib_month
    requests = writes * prices.write
    return [
        passed(
            "cost",
            f"{size_text(work.state_bytes)} every {work.interval_seconds / 60:g} min: "
            f"{writes:,.0f} writing requests (${requests:,.2f}) and up to "
            f"{size_text(round(stored))} stored (${storing:,.0f}) a month, if each "
            "save changes every byte and deleted checkpoints stay for "
            f"{work.purge_seconds / 86_400:g} days",
        )
    ]
