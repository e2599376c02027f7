"""The navigation: the pages that every user has, and those that the server permits.

The server is asked once a minute, not for each page; the navigation may be wrong for
that long, but it only shows links: the server decides about each page.
"""

import time
from typing import Final

from storesvc_client import Client, StoreError

Section = tuple[str, str]
"""Name and address of a page."""

SECTIONS: Final[tuple[Section, ...]] = (
    ("Runs", "/"),
    ("Uploads", "/uploads"),
    ("Storage", "/storage"),
    ("Events", "/events"),
    ("Help", "/help"),
)
"""Pages for every user."""

AUDIT: Final[Section] = ("Audit", "/audit")

_SECONDS: Final = 60.0
"""Time for which an answer of the server is used."""


class Navigation:
    """The sections of a console."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._until = 0.0
        self.known = SECTIONS
        """The sections as the server has last permitted them."""

    def current(self) -> tuple[Section, ...]:
        """Returns the sections; asks the server if its last answer is old."""
        if time.monotonic() >= self._until:
            # assigned last: other threads show what was known until then
            reads = self._reads_audit_log()
            self.known = (*SECTIONS[:-1], AUDIT, SECTIONS[-1]) if reads else SECTIONS
            self._until = time.monotonic() + _SECONDS
        return self.known

    def _reads_audit_log(self) -> bool:
        """Returns whether the user may read the audit log, and there is one."""
        try:
            # first, because the log records a denial
            if not self._client.test_permissions(None, ["audit.read"]):
                return False
            self._client.audit_entries().read_page(1)
        except StoreError:  # an older server, or one without a log
            return False
        return True
