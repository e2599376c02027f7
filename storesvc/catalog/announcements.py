"""Defines what the journal and those who read it agree on about an announcement."""

from datetime import timedelta
from typing import Final

from storesvc.catalog.lease_clock import MARGIN

PATIENCE: Final = timedelta(days=1) + MARGIN
"""How long a change may take after it was announced, a commit excepted: a day, by
the clocks of two machines."""

NOTHING: Final = "none"
"""``Announcement.replaces`` where there was no record."""
