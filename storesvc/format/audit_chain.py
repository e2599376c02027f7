"""The format of the audit log: JSON lines, each with the digest of the line before it.

So a line that is changed, removed, added or moved is found, unless all lines after it
are replaced, too: keep the last digest elsewhere to find even that. A line that a crash
cut off stays, and the line after it says so.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

FIRST: Final = "0" * 64
"""``prev`` of the first line of a log."""

STARTED: Final = "started"
"""``stage`` of the line that a server writes when it opens the log."""

REOPENED: Final = "reopened"
"""``stage`` of the line that a server writes after SIGHUP."""

TORN: Final = "torn"
"""Key of such a line: true if the line before it was cut off."""


def line_digest(line: bytes) -> str:
    """Returns the digest of a line, without its line break."""
    return hashlib.sha256(line).hexdigest()


def make_line(fields: Mapping[str, Any], *, seq: int, prev: str) -> bytes:
    """Returns a line, without its line break.

    Args:
        seq: Number of the line, from 1.
    """
    entry = {"seq": seq, **fields, "prev": prev}
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Break:
    """The first line of a log that does not continue the line before it."""

    place: str
    """File and line."""
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.place}: expected {self.expected}, got {self.got}"


@dataclass(slots=True)
class Verified:
    """The result of a verification."""

    lines: int = 0
    """Number of lines that continue each other."""
    torn: int = 0
    """Number of them that a crash cut off."""
    first: int = 0
    """Number of the first line; 1 unless earlier files were left out."""
    last: int = 0
    digest: str = ""
    """Digest of the last line."""
    broken: Break | None = None
    """The first line that does not; None: there is none."""
    missing: frozenset[str] = frozenset()
    """Digests that were expected, and are of no line."""


def verify(
    lines: Iterable[tuple[str, bytes]],
    *,
    after: str = FIRST,
    expected: Iterable[str] = (),
) -> Verified:
    """Verifies a log.

    Args:
        lines: Each line with its place, without its line break, of all files in order.
        after: Digest of the line before the first one.
        expected: Digests of lines that must be there, as they were kept elsewhere.
    """
    found = Verified(digest=after, missing=frozenset(expected))
    following = iter(lines)
    pending = next(following, None)
    while pending is not None:
        place, line = pending
        pending = next(following, None)
        entry = _entry(line)
        after_it = _entry(pending[1]) if entry is None and pending else None
        if after_it is not None and after_it.get(TORN) is True:
            found.torn += 1
        elif problem := _problem(found, place, line, entry):
            found.broken = problem
            return found
        elif entry is not None:
            found.last = entry["seq"]
            found.first = found.first or found.last
        found.digest = line_digest(line)
        found.missing -= {found.digest}
        found.lines += 1
    return found


def _problem(
    found: Verified, place: str, line: bytes, entry: dict[str, Any] | None
) -> Break | None:
    """Returns why a line does not continue the lines before it; None if it does."""
    if entry is None:
        return Break(place, "a JSON object", f"{line[:40]!r}")
    if not isinstance(entry.get("seq"), int) or isinstance(entry["seq"], bool):
        return Break(place, "the number of a line in seq", repr(entry.get("seq"))[:40])
    if found.last and entry["seq"] != found.last + 1:
        return Break(place, f"the line {found.last + 1}", f"the line {entry['seq']}")
    if not found.lines and found.digest == FIRST != entry.get("prev"):
        return Break(place, "the first line of the log", f"the line {entry['seq']}")
    if entry.get("prev") != found.digest:
        got = str(entry.get("prev"))[:12]
        return Break(place, f"the digest {found.digest[:12]} in prev", got)
    return None


def _entry(line: bytes) -> dict[str, Any] | None:
    """Returns the entry of a line; None if it is no JSON object."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def split_lines(data: bytes, file: str) -> Iterator[tuple[str, bytes]]:
    """Yields the lines of a file with their places; an unfinished last line, too."""
    for number, line in enumerate(data.split(b"\n"), 1):
        if line:
            yield f"{file} line {number}", line
