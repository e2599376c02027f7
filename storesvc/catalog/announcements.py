"""Constants that the writers and the readers of announcements share."""

from datetime import timedelta
from typing import Final

from storesvc.catalog.lease_clock import MARGIN

PATIENCE: Final = timedelta(days=1) + MARGIN
"""Maximum time between an announcement and its change, a commit excepted: a day, by the
clocks of two machines."""

NOTHING: Final = "none"
"""``Announcement.replaces`` if there was no record."""
