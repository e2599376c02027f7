"""Reads the audit log of a server from its end, a bounded part for each page.

The log is read through the file that the server has open, so that a rotation between
two steps of the server changes nothing: a renamed file is read until the server opens
the next one. A page ends where the entries that were asked for are found, or after
``SCAN_BYTES``; a log of any size costs no more.
"""

import asyncio
import errno
import hashlib
import os
import re
from dataclasses import dataclass
from typing import Final, Self

from storesvc.audit.backwards import MAX_LINE_BYTES, BackwardLines, Position
from storesvc.audit.entries import AuditFilter, Entry, Unreadable
from storesvc.audit.log import AuditLog
from storesvc.audit.search import PageSearch
from storesvc.errors import AuditUnavailableError, InvalidPageTokenError
from storesvc.format.names import InvalidNameError
from storesvc.storage.hedged_calls import run_in_daemon_thread

SCAN_BYTES: Final = 8 << 20
"""Maximum bytes of the log that are searched for a page."""

_BLOCK_BYTES: Final = 64 << 10
_STAMP_BYTES: Final = 256
_DIGEST_BYTES: Final = 12
_BOOKMARK: Final = re.compile(r"(\d{1,18}):(\d{0,18}):([01]):([0-9a-f]{24})", re.ASCII)

# so that each page reaches the beginning of a line, or finds that it is too long
assert MAX_LINE_BYTES + 2 * _BLOCK_BYTES < SCAN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """The place in a log where a page ended; its text is in the token of the next."""

    at: Position
    stamp: str
    """Digest of the first bytes of the file, which no later entry changes."""
    torn: bool = False
    """True if the last entry of the page follows a line that was cut off."""

    def __str__(self) -> str:
        end = "" if self.at.long_end is None else self.at.long_end
        return f"{self.at.offset}:{end}:{int(self.torn)}:{self.stamp}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the bookmark of a text.

        Raises:
            InvalidNameError: It is none.
        """
        found = _BOOKMARK.fullmatch(text)
        if found is None:
            raise InvalidNameError("expected the place of an audit entry")
        offset, end, torn, stamp = found.groups()
        at = Position(offset=int(offset), long_end=int(end) if end else None)
        return cls(at=at, stamp=stamp, torn=torn == "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """A page of entries, the newest first."""

    rows: tuple[Entry | Unreadable, ...]
    after: Bookmark | None
    """Place at which the next page begins; None: there is none."""


class AuditReader:
    """Reads the audit log that a server writes."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log
        self._turn = asyncio.Lock()
        """Held while a page is read, also if its call was cancelled: on a disk that
        hangs, one thread waits, whatever the number of calls."""

    @property
    def server(self) -> str:
        """Name of the server whose log it is."""
        return self._log.server

    async def page(
        self, wanted: AuditFilter, *, after: Bookmark | None, size: int
    ) -> AuditPage:
        """Returns a page of the entries that match.

        Args:
            wanted: The filter; lines that are no entries match every filter.
            after: Where the page before ended; None: the first page.
            size: Maximum number of entries.

        Raises:
            InvalidPageTokenError: The log was rotated since the page before.
            AuditUnavailableError: The log cannot be read.
        """
        await self._turn.acquire()
        reading = asyncio.ensure_future(
            run_in_daemon_thread(self._page, wanted, after, size)
        )
        reading.add_done_callback(self._end_turn)
        try:
            return await asyncio.shield(reading)
        except OSError as e:
            raise AuditUnavailableError(
                f"audit log: cannot be read ({e.strerror}); ask an administrator of "
                "the server to look at its disk"
            ) from e

    def _end_turn(self, reading: "asyncio.Future[AuditPage]") -> None:
        self._turn.release()
        if not reading.cancelled():
            reading.exception()  # a cancelled call does not read it

    def _page(
        self, wanted: AuditFilter, after: Bookmark | None, size: int
    ) -> AuditPage:
        """Reads a page; runs in a thread."""
        file, end = self._log.duplicate()
        try:
            if after is not None:
                self._check(file, end, after)
            search = PageSearch(wanted, size, torn=after is not None and after.torn)
            at = Position(offset=end) if after is None else after.at
            stopped = self._search(search, file, at)
            bookmark = None
            if stopped is not None:
                stamp = self._stamp(file, stopped.offset)
                bookmark = Bookmark(at=stopped, stamp=stamp, torn=search.torn)
            return AuditPage(rows=tuple(search.rows), after=bookmark)
        finally:
            os.close(file)

    def _search(self, search: PageSearch, file: int, at: Position) -> Position | None:
        """Searches from a position towards the beginning of the file.

        Returns where the search stopped; None: nothing is left to search.
        """
        lines = BackwardLines(at)
        offset, least = at.offset, max(0, at.offset - SCAN_BYTES)
        while offset > least:
            block = self._bytes(file, max(least, offset - _BLOCK_BYTES), offset)
            offset -= len(block)
            found = lines.add(block)
            if offset == 0:
                found += lines.finish()
            for line in found:
                if not search.add(line):
                    is_end = search.is_over or line.start == 0
                    return None if is_end else Position(offset=line.start)
        return lines.position if offset else None

    def _check(self, file: int, end: int, after: Bookmark) -> None:
        """Checks that a bookmark is of this file.

        Raises:
            InvalidPageTokenError: It is of another one.
        """
        offset, long_end = after.at.offset, after.at.long_end
        is_inside = 0 < offset <= end
        if long_end is not None:
            is_inside = 0 < offset < long_end - MAX_LINE_BYTES <= end - MAX_LINE_BYTES
        if not is_inside or self._stamp(file, offset) != after.stamp:
            raise InvalidPageTokenError(
                "page_token: expected a token of the file that the server "
                f"{self.server} writes now, got one of another file: the audit log was "
                "rotated, or the page before was of another server; start without a "
                "token, at the address of one server"
            )

    def _stamp(self, file: int, offset: int) -> str:
        """Returns the digest of the first bytes of a file that is read up to there."""
        first = self._bytes(file, 0, min(_STAMP_BYTES, offset))
        return hashlib.blake2b(first, digest_size=_DIGEST_BYTES).hexdigest()

    def _bytes(self, file: int, start: int, end: int) -> bytes:
        """Reads a part of a file."""
        parts = list[bytes]()
        while start < end:
            part = os.pread(file, end - start, start)
            if not part:
                raise OSError(errno.EIO, "it became shorter while it was read")
            start += len(part)
            parts.append(part)
        return b"".join(parts)
