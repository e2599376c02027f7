"""Reads the audit log of a server from its end, a bounded part for each page.

1. The log is read through the file that the server has open, so that a rotation between
   two steps of the server changes nothing: a renamed file is read until the server
   opens the next one. A page ends where the entries that were asked for are found, or
   after ``SCAN_BYTES``; a log of any size costs no more.
2. ``BackwardLines`` splits blocks, from the last one of the file to the first one, into
   lines, the last line first. Memory is bounded: of a line that is longer than
   ``MAX_LINE_BYTES`` only the place and the size are kept.
3. Each line is parsed to an ``Entry`` or an ``Unreadable``; none is left out, because a
   line that was changed is what an auditor looks for.
4. ``PageSearch`` chooses the rows of a page by a filter. A line that is no entry is a
   row of every page that reaches it, with its place and the reason; its text is not
   returned, because it may be of anything.

All but the first step is pure, so that each way to cut a file into blocks can be
tested.

>>> lines = BackwardLines(Position(offset=6))
>>> [line.data for line in (*lines.add(b"a\\nbb\\n\\n"), *lines.finish())]
[b'bb', b'a']
>>> time = "2026-11-24T07:55:00.000000000Z"
>>> parse_line(f'{{"seq":1,"time":"{time}","stage":"started"}}'.encode()).stage
<Stage.STARTED: 'started'>
"""

import asyncio
import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any, Final, Self, TypeVar

from storesvc.audit.log import AuditLog
from storesvc.auth.policy import AllRuns, Authentication, Namespace, Resource, SomeRun
from storesvc.errors import AuditUnavailableError, InvalidPageTokenError
from storesvc.format.audit_chain import REOPENED, STARTED, TORN
from storesvc.format.names import InvalidNameError, RunName
from storesvc.storage.requests import retrieve_error, run_in_daemon_thread

MAX_LINE_BYTES: Final = 2 << 20
"""Maximum bytes of a line that is kept. Entries of a server are far shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place up to which a file was read from its end."""

    offset: int
    """Offset of the first byte that was read."""
    long_end: int | None = None
    """End of the line that begins before ``offset``, if it is too long to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a file."""

    start: int
    """Offset of its first byte."""
    end: int
    """Offset after its last byte, without the line break."""
    data: bytes | None
    """Its bytes; None: there are more than ``MAX_LINE_BYTES``."""
    is_whole: bool = True
    """False if it has no line break, as the last line of a file that was cut off."""


class BackwardLines:
    """Splits blocks into lines; empty lines are left out."""

    def __init__(
        self, after: Position, *, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        """Begins at a position, at which the first block must end."""
        self._offset = after.offset
        """Offset of the first byte of the last block."""
        self._kept = b""
        """Bytes of blocks that belong to a line whose beginning was not found yet."""
        self._long_end = after.long_end
        self._max = max_line_bytes

    @property
    def position(self) -> Position:
        """The place after the lines of all blocks that were given."""
        if self._long_end is not None:
            return Position(offset=self._offset, long_end=self._long_end)
        return Position(offset=self._offset + len(self._kept))

    def add(self, block: bytes) -> list[Line]:
        """Returns the lines that begin in the block before those that were given."""
        self._offset -= len(block)
        found = list[Line]()
        if self._long_end is not None:
            cut = block.rfind(b"\n") + 1
            if not cut:
                return []
            found.append(self._long_line(self._offset + cut))
            block = block[:cut]
        data = block + self._kept
        # a line break at the end belongs to the line that is kept
        cut = data.find(b"\n", 0, len(data) - 1) + 1
        if cut:
            found += self._lines(data[cut:], self._offset + cut)
            data = data[:cut]
        length = len(data.removesuffix(b"\n"))
        if length > self._max:
            self._long_end, data = self._offset + length, b""
        self._kept = data
        return found

    def finish(self) -> list[Line]:
        """Returns the first line of the file, once its first block was given."""
        if self._long_end is not None:
            return [self._long_line(self._offset)]
        found = self._lines(self._kept, self._offset)
        self._kept = b""
        return found

    def _lines(self, data: bytes, start: int) -> list[Line]:
        """Returns the lines of bytes that begin at an offset, the last one first."""
        found = list[Line]()
        for text in data.split(b"\n"):
            end = start + len(text)
            if text:
                is_long = len(text) > self._max
                found.append(Line(start=start, end=end, data=None if is_long else text))
            start = end + 1
        if found and not data.endswith(b"\n"):
            found[-1] = replace(found[-1], is_whole=False)
        return found[::-1]

    def _long_line(self, start: int) -> Line:
        assert self._long_end is not None
        end, self._long_end = self._long_end, None
        return Line(start=start, end=end, data=None)


DISORDER_NS: Final = 600 * 10**9
"""Nanoseconds before the earliest time of a filter from which on an entry is old."""

OLD_IN_A_ROW: Final = 1000
"""Old entries, one after another, that end a search. Entries are in the order in which
they were written, and clocks are corrected: by minutes, or, in a server that has
started before its clock was set, by decades."""

_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{9})Z", re.ASCII)
_YEARS: Final = range(1970, 9999)
"""Years that clients can show in any time zone."""

E = TypeVar("E", bound=Enum)


class Stage(Enum):
    """A moment of a call, or of the log itself."""

    STARTED = STARTED
    REOPENED = REOPENED
    INTENT = "intent"
    ENDED = "ended"
    DENIED = "denied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An entry of an audit log."""

    seq: int
    time_ns: int
    """Nanoseconds since the epoch."""
    stage: Stage
    server: str = ""
    request_id: str = ""
    principal: str = ""
    authentication: Authentication | None = None
    """None in entries about the log itself."""
    peer: str = ""
    method: str = ""
    permissions: tuple[tuple[str, str], ...] = ()
    """Permissions that passed, each with its resource."""
    missing: tuple[str, str] | None = None
    """The permission that the caller lacked, with its resource."""
    detail: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    latency_ms: float | None = None
    """None before the end of a call."""
    left_out: int = 0
    """Denials before it that were not recorded."""
    follows_torn_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A line that is no entry."""

    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """A choice of entries; empty fields match all."""

    principal: str = ""
    method: str = ""
    resource: Resource = field(default_factory=AllRuns)
    """A run, or all runs of a namespace."""
    stage: Stage | None = None
    authentication: Authentication | None = None
    start_ns: int | None = None
    """Earliest time, in nanoseconds since the epoch."""
    end_ns: int | None = None
    """Time before which the entries were made."""

    def matches(self, entry: Entry) -> bool:
        return (
            self.principal in ("", entry.principal)
            and self.method in ("", entry.method)
            and self.stage in (None, entry.stage)
            and self.authentication in (None, entry.authentication)
            and (self.start_ns is None or entry.time_ns >= self.start_ns)
            and (self.end_ns is None or entry.time_ns < self.end_ns)
            and _is_about(entry, self.resource)
        )

    def is_old(self, entry: Entry) -> bool:
        """Returns whether an entry is so old that a search may soon end."""
        return self.start_ns is not None and entry.time_ns < self.start_ns - DISORDER_NS


def _is_about(entry: Entry, resource: Resource) -> bool:
    """Returns whether an entry is about a run, or about a namespace or a run of it."""
    match resource:
        case AllRuns():
            return True
        case Namespace(name) | SomeRun(name):
            name_of_it, short = f"namespaces/{name}", f"{name}/"
        case RunName():
            name_of_it, short = resource.resource, str(resource)
    named = entry.detail.get("name", "")
    if named == name_of_it or named.startswith(f"{name_of_it}/"):
        return True
    checked = [of for _, of in entry.permissions]
    checked += [] if entry.missing is None else [entry.missing[1]]
    if isinstance(resource, RunName):
        return short in checked
    return any(of.startswith(short) for of in checked)


def parse_line(line: bytes) -> Entry | Unreadable:
    """Returns the entry of a line, which is given without its line break."""
    try:
        found = json.loads(line.decode())
    except (ValueError, RecursionError):
        return Unreadable(problem="expected a JSON object, got other text")
    if not isinstance(found, dict):
        return Unreadable(problem="expected a JSON object, got another JSON value")
    try:
        return _entry(found)
    except ValueError as e:
        return Unreadable(problem=f"expected an entry of an audit log, got {e}")


def _entry(found: dict[str, Any]) -> Entry:
    """Returns the entry of a JSON object; a ValueError names a wrong key only."""
    latency, missing = found.get("latency_ms"), found.get("missing")
    how = found.get("authentication")
    entry = Entry(
        seq=_number(found, "seq"),
        time_ns=_time_ns(_text(found.get("time", ""), "time")),
        stage=_member(Stage, _text(found.get("stage", ""), "stage"), "stage"),
        server=_text(found.get("server", ""), "server"),
        request_id=_text(found.get("id", ""), "id"),
        principal=_text(found.get("principal", ""), "principal"),
        authentication=(
            None if how is None else _member(Authentication, how, "authentication")
        ),
        peer=_text(found.get("peer", ""), "peer"),
        method=_text(found.get("method", ""), "method"),
        permissions=_permissions(found.get("permissions", [])),
        missing=None if missing is None else _permissions([missing])[0],
        detail=_detail(found.get("detail", {})),
        reason=_text(found.get("reason", ""), "reason"),
        latency_ms=None if latency is None else _latency_ms(latency),
        left_out=_number(found, "left_out"),
        follows_torn_line=found.get(TORN) is True,
    )
    if entry.seq == 0:
        raise ValueError("no number in seq")
    return entry


def _number(found: Mapping[str, Any], key: str) -> int:
    """Returns a number; 0 if there is none."""
    value: object = found.get(key, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"another type of {key}")  # noqa: TRY004 - data, no argument
    if not 0 <= value < 2**63:
        raise ValueError(f"a number outside of 64 bits in {key}")
    return value


def _text(value: object, key: str) -> str:
    """Returns a text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise ValueError(f"another type of {key}")  # noqa: TRY004 - data, no argument
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"half of a character in {key}") from e
    return value


def _time_ns(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError("no time in RFC 3339 with nanoseconds in time")
    try:
        time = datetime.fromisoformat(f"{match[1]}+00:00")
    except ValueError as e:
        raise ValueError("no time in RFC 3339 with nanoseconds in time") from e
    if time.year not in _YEARS:
        raise ValueError("a time before 1970 or after 9998 in time")
    return int(time.timestamp()) * 10**9 + int(match[2])


def _member(kind: type[E], value: object, key: str) -> E:
    try:
        return kind(value)
    except ValueError as e:
        raise ValueError(f"an unknown {key}") from e


def _permissions(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ValueError("another type of permissions")
    return tuple(
        (
            _text(each.get("permission", ""), "permission"),
            _text(each.get("resource", ""), "resource"),
        )
        for each in value
    )


def _detail(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise ValueError("another type of detail")  # noqa: TRY004 - data, no argument
    return {_text(key, "detail"): _text(each, "detail") for key, each in value.items()}


def _latency_ms(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError("another type of latency_ms")  # noqa: TRY004 - as above
    if not 0 <= value < 10**12:  # nor NaN
        raise ValueError("no duration in latency_ms")
    return float(value)


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
        found = parse_line(line.data)
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

        Raises:
            InvalidPageTokenError: The log was rotated since the page before.
            AuditUnavailableError: The log cannot be read.
        """
        await self._turn.acquire()
        reading = asyncio.ensure_future(
            run_in_daemon_thread(self._page, wanted, after, size)
        )
        reading.add_done_callback(lambda _: self._turn.release())
        reading.add_done_callback(retrieve_error)  # a cancelled call does not read it
        try:
            return await asyncio.shield(reading)
        except OSError as e:
            raise AuditUnavailableError(
                f"audit log: cannot be read ({e.strerror}); ask an administrator of "
                "the server to look at its disk"
            ) from e

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
        """Searches towards the beginning; returns where it stopped, None: there."""
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
        """Rejects a bookmark of another file."""
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
        parts = list[bytes]()
        while start < end:
            part = os.pread(file, end - start, start)
            if not part:
                raise OSError(errno.EIO, "it became shorter while it was read")
            start += len(part)
            parts.append(part)
        return b"".join(parts)
