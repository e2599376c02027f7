"""Public prices, and the fleet that is computed with them."""

from typing import Final

DOLLARS_A: Final = 0.005 / 1000
"""A class A operation (write, list); errors are not billed. The list prices of Standard
storage in us-central1, of https://cloud.google.com/storage/pricing: they change."""
DOLLARS_B: Final = 0.0004 / 1000
"""A class B operation: a read. Within the region its bytes cost nothing."""
DOLLARS_GB_MONTH: Final = 0.020
"""A GB for a month."""

FLEETS: Final = (1_000, 10_000)
"""Hosts of the jobs that are computed."""
SAVE_BYTES: Final = 10**12
"""Size of a checkpoint."""
SAVES: Final = 30 * 24 * 6
"""Saves and collections in a month: one each ten minutes."""
HELD: Final = 3 + 3 * 24 * 6
"""Checkpoints in the bucket: 3 that the policy keeps, and those that are deleted and
not yet purged, of the default purge delay of 3 days."""
