"""Public prices, and the fleet that is computed with them."""

from typing import Final

DOLLARS_A: Final = 0.005 / 1000
"""A class A operation (write, list) on Standard storage in a region, such as
us-central1. Source, of all prices here: https://cloud.google.com/storage/pricing, as
read in November 2026. Answers 4xx and 5xx cost nothing."""

DOLLARS_B: Final = 0.0004 / 1000
"""A class B operation: a read. Within the region its bytes cost nothing."""

DOLLARS_GB_MONTH: Final = 0.020
"""A GB of Standard storage for a month."""

FLEETS: Final = (1_000, 10_000)
"""Hosts of the jobs that are computed."""

SAVE_BYTES: Final = 10**12
"""Size of a checkpoint."""

SAVES: Final = 30 * 24 * 6
"""Saves and collections in a month: one each ten minutes."""

KEPT: Final = 3
"""Checkpoints that the policy keeps."""

DELETED: Final = 3 * 24 * 6
"""Checkpoints that are deleted and not yet purged: of the default 3 days."""
