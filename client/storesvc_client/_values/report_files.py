"""Writes reports of saves and restores as JSON, and reads them again.

A job writes the report of a restore to a file, and ``storectl trace --report`` shows it
elsewhere. The file may come from anyone: each value is checked, so that whatever
reads a report gets finite numbers of possible sizes and short texts. Fields that this
release does not know are ignored.

Example:
    >>> text = report_json(opened.report)
    >>> parse_report(text).seconds == opened.report.seconds
    True
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

from storesvc_client._values.json_values import json_value
from storesvc_client._values.reports import (
    PhaseSpan,
    ProcessReading,
    RestoreReport,
    SaveReport,
)
from storesvc_client._values.texts import printable
from storesvc_client.errors import InvalidRequestError

MAX_REPORT_BYTES: Final = 1 << 20
"""Maximum size of a report as JSON; that of a restore has less than 10 KiB."""

_MAX_ROWS: Final = 1000
"""Maximum phases, and maximum entries of a mapping."""
_MAX_TEXT: Final = 4096
_MAX_SECONDS: Final = 1e9
_MAX_INTEGER: Final = (1 << 63) - 1
_SHOWN: Final = 40
"""Characters of a wrong value that an error shows."""

_KINDS: Final = {SaveReport: "save", RestoreReport: "restore"}


def report_json(report: SaveReport | RestoreReport) -> str:
    """Returns a report as one JSON object."""
    return json.dumps(report_document(report), indent=1) + "\n"


def report_document(report: SaveReport | RestoreReport) -> dict[str, Any]:
    """Returns a report as JSON types."""
    return {"report": _KINDS[type(report)], **json_value(report)}


def parse_report(
    text: str | bytes, place: str = "report"
) -> SaveReport | RestoreReport:
    """Returns the report that ``report_json`` has written.

    Args:
        text: The JSON object.
        place: Name of the text in errors, such as that of its file.

    Raises:
        InvalidRequestError: It is no report, or it is damaged.
    """
    try:
        fields = _object(_loaded(text))
        match kind := fields.get("report"):
            case "restore":
                return _restore(fields)
            case "save":
                return _save(fields)
            case _:
                _refuse("report", "'save' or 'restore'", kind)
    except _DamagedError as e:
        raise InvalidRequestError(
            f"{place}: {e}; pass a file that a job has written with report.to_json()"
        ) from None


class _DamagedError(Exception):
    """The text is no report; its text says what was expected and found."""


def _refuse(name: str, expected: str, got: object) -> NoReturn:
    shown = printable(repr(got))
    if len(shown) > _SHOWN:
        shown = f"{shown[:_SHOWN]}..."
    raise _DamagedError(f"{name}: expected {expected}, got {shown}")


def _loaded(text: str | bytes) -> object:
    if len(text) > MAX_REPORT_BYTES:
        raise _DamagedError(
            f"expected a report of at most {MAX_REPORT_BYTES:,} bytes, got more"
        )
    try:
        return json.loads(text)
    # a text of other bytes, of nested lists without end, or no JSON at all
    except (ValueError, RecursionError):
        raise _DamagedError("expected a report as JSON, got something else") from None


def _object(value: object, name: str = "report") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(name, "an object", value)
    if len(value) > _MAX_ROWS:
        _refuse(name, f"at most {_MAX_ROWS} entries", len(value))
    return value


def _restore(fields: Mapping[str, Any]) -> RestoreReport:
    other = fields.get("slowest_process")
    return RestoreReport(
        run=_text(fields, "run"),
        step=_count(fields, "step"),
        start_time=_time(fields, "start_time"),
        read_bytes=_count(fields, "read_bytes"),
        received_bytes=_count(fields, "received_bytes"),
        returned_bytes=_count(fields, "returned_bytes"),
        seconds=_seconds(fields, "seconds"),
        timings=_timings(fields),
        timeline=_timeline(fields),
        slowest=_text(fields, "slowest"),
        slowest_seconds=_seconds(fields, "slowest_seconds"),
        slowest_process=None if other is None else _reading(other),
        damaged=_damaged(fields),
        is_verified=_flag(fields, "is_verified"),
    )


def _save(fields: Mapping[str, Any]) -> SaveReport:
    return SaveReport(
        run=_text(fields, "run"),
        step=_count(fields, "step"),
        start_time=_time(fields, "start_time"),
        total_bytes=_count(fields, "total_bytes"),
        sent_bytes=_count(fields, "sent_bytes"),
        reused_bytes=_count(fields, "reused_bytes"),
        seconds=_seconds(fields, "seconds"),
        blocking_seconds=_seconds(fields, "blocking_seconds"),
        timings=_timings(fields),
        timeline=_timeline(fields),
        slowest=_text(fields, "slowest"),
        slowest_seconds=_seconds(fields, "slowest_seconds"),
        last_process=_text(fields, "last_process"),
        needs_like=tuple(
            _text({"needs_like": one}, "needs_like")
            for one in _list(fields, "needs_like")
        ),
        upload=_text(fields, "upload"),
    )


def _reading(value: object) -> ProcessReading:
    fields = _object(value, "slowest_process")
    return ProcessReading(
        process=_text(fields, "process"),
        read_bytes=_count(fields, "read_bytes"),
        seconds=_seconds(fields, "seconds"),
        slowest=_text(fields, "slowest"),
        slowest_seconds=_seconds(fields, "slowest_seconds"),
    )


def _timeline(fields: Mapping[str, Any]) -> tuple[PhaseSpan, ...]:
    return tuple(
        PhaseSpan(
            name=_text(one, "name"),
            start_seconds=_seconds(one, "start_seconds"),
            end_seconds=_seconds(one, "end_seconds"),
            busy_seconds=_seconds(one, "busy_seconds"),
        )
        for one in (_object(each, "timeline") for each in _list(fields, "timeline"))
    )


def _timings(fields: Mapping[str, Any]) -> dict[str, float]:
    timings = _object(fields.get("timings"), "timings")
    return {name: _seconds(timings, name) for name in timings}


def _damaged(fields: Mapping[str, Any]) -> dict[int, str]:
    damaged = _object(fields.get("damaged"), "damaged")
    for step in damaged:
        if not (step.isascii() and step.isdecimal() and len(step) < 20):
            _refuse("damaged", "steps", step)
    return {int(step): _text(damaged, step) for step in damaged}


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > _MAX_ROWS:
        _refuse(name, f"a list of at most {_MAX_ROWS} entries", value)
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        _refuse(printable(name), f"a text of at most {_MAX_TEXT} characters", value)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool):
        _refuse(name, "true or false", value)
    return value


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
        _refuse(name, "a whole number, at least 0", value)
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= _MAX_SECONDS  # no NaN is
    ):
        _refuse(printable(name)[:_SHOWN], f"seconds, 0 to {_MAX_SECONDS:g}", value)
    return float(value)


def _time(fields: Mapping[str, Any], name: str) -> datetime:
    value = fields.get(name)
    try:
        found = datetime.fromisoformat(value)  # type: ignore[arg-type]  # caught below
        if found.tzinfo is not None:
            return found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        pass
    _refuse(name, "a time with its time zone", value)
