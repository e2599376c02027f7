"""Decides which lines of an audit log are the rows of a page.

Lines come from the end of the log. A line that is no entry is a row of every page that
reaches it, with its place and the reason; its text is not returned, because it may be
of anything.
"""

from dataclasses import dataclass, field
from typing import Final

from storesvc.audit.backwards import MAX_LINE_BYTES, Line
from storesvc.audit.entries import OLD_IN_A_ROW, AuditFilter, Entry, Unreadable, parsed

PAGE_BYTES: Final = 1 << 20
"""Bytes of lines after which a page ends: with the last line, which may be as long as
``MAX_LINE_BYTES``, its message stays below gRPC's maximum."""


@dataclass(slots=True)
class PageSearch:
    """The search for the rows of one page."""

    wanted: AuditFilter
    size: int
    """Maximum number of rows."""
    torn: bool = False
    """True if the line after the next one states that the next one was cut off."""
    rows: list[Entry | Unreadable] = field(default_factory=list)
    is_over: bool = False
    """True once no earlier line is searched."""
    _held_bytes: int = 0
    _old: int = 0
    """Old entries that were found one after another."""

    def add(self, line: Line) -> bool:
        """Takes the next line, and returns whether the page goes on."""
        row = self._row(line)
        self.torn = isinstance(row, Entry) and row.follows_torn_line
        if isinstance(row, Entry):
            self._old = self._old + 1 if self.wanted.is_old(row) else 0
            self.is_over = self._old == OLD_IN_A_ROW
            if not self.wanted.matches(row):
                return not self.is_over
        self.rows.append(row)
        self._held_bytes += len(line.data or b"")
        return len(self.rows) < self.size and self._held_bytes < PAGE_BYTES

    def _row(self, line: Line) -> Entry | Unreadable:
        size_bytes = line.end - line.start
        place = f"audit log, {size_bytes:,} bytes at byte {line.start:,}"
        if line.data is None:
            return Unreadable(
                problem=f"{place}: expected a line of at most {MAX_LINE_BYTES:,} bytes;"
                f" {_ADVICE}"
            )
        found = parsed(line.data)
        if isinstance(found, Entry):
            return found
        if self.torn:
            return Unreadable(
                problem=f"{place}: the line was cut off, as by a crash of the server"
            )
        if not line.is_whole:
            return Unreadable(problem=f"{place}: the line has no end; {_ADVICE}")
        return Unreadable(problem=f"{place}: {found.problem}; {_ADVICE}")


_ADVICE: Final = "run storectl audit verify on the file"
