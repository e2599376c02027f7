"""Entries of an audit log as values: parsed from lines, and chosen by a filter.

Pure functions. Each line of a log is an ``Entry`` or an ``Unreadable``; none is left
out, because a line that was changed is what an auditor looks for.

>>> time = "2026-11-24T07:55:00.000000000Z"
>>> parsed(f'{{"seq":1,"time":"{time}","stage":"started"}}'.encode()).stage
<Stage.STARTED: 'started'>
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Final

from storesvc.access.policy import AllRuns, Namespace, Resource, SomeRun
from storesvc.access.principals import Authentication
from storesvc.format.audit_chain import REOPENED, STARTED, TORN
from storesvc.format.names import RunName

DISORDER_NS: Final = 600 * 10**9
"""Nanoseconds before the earliest time of a filter from which on an entry is old."""

OLD_IN_A_ROW: Final = 1000
"""Old entries, one after another, that end a search. Entries are in the order in which
they were written, and clocks are corrected: by minutes, or, in a server that has
started before its clock was set, by decades."""

_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{9})Z", re.ASCII)
_YEARS: Final = range(1970, 9999)
"""Years that clients can show in any time zone."""

_MAX_NUMBER: Final = 2**63 - 1
_MAX_LATENCY_MS: Final = 10**12


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
        """Returns whether an entry is chosen."""
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


def parsed(line: bytes) -> Entry | Unreadable:
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
    """Returns the entry of a JSON object.

    Raises:
        ValueError: A value has another type or form; the message names its key only.
    """
    latency, missing = found.get("latency_ms"), found.get("missing")
    entry = Entry(
        seq=_number(found, "seq"),
        time_ns=_time_ns(_text(found.get("time", ""), "time")),
        stage=_stage(_text(found.get("stage", ""), "stage")),
        server=_text(found.get("server", ""), "server"),
        request_id=_text(found.get("id", ""), "id"),
        principal=_text(found.get("principal", ""), "principal"),
        authentication=_authentication(found.get("authentication")),
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
    if not 0 <= value <= _MAX_NUMBER:
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


def _stage(text: str) -> Stage:
    try:
        return Stage(text)
    except ValueError as e:
        raise ValueError("an unknown stage") from e


def _authentication(value: object) -> Authentication | None:
    if value is None:
        return None
    try:
        return Authentication(value)
    except ValueError as e:
        raise ValueError("an unknown authentication") from e


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
    if not 0 <= value < _MAX_LATENCY_MS:  # nor NaN
        raise ValueError("no duration in latency_ms")
    return float(value)
