"""Checks the reports of writers, and chooses which are kept with a checkpoint.

The record of a checkpoint is read with each list, so it keeps the reports of the few
writers that took longest: the others waited for them.
"""

import math
import re
from collections.abc import Iterable
from typing import Final

from storesvc.errors import InvalidFieldError
from storesvc_proto.v1 import report_pb2

MAX_PHASES: Final = 32
MAX_WRITERS: Final = 16
"""Maximum reports in the record of a checkpoint."""

_NAME: Final = re.compile(r"[a-z ]{1,32}")


def check_report(report: report_pb2.WriterReport) -> None:
    """Rejects a malformed report.

    Raises:
        InvalidFieldError: A field is invalid; names it.
    """
    if len(report.phases) > MAX_PHASES:
        raise InvalidFieldError(
            f"report.phases: expected at most {MAX_PHASES}, got {len(report.phases)}"
        )
    if not 0 <= report.sent_bytes <= report.total_bytes:
        raise InvalidFieldError(
            f"report.sent_bytes: expected 0 to {report.total_bytes}, which is "
            f"report.total_bytes, got {report.sent_bytes}"
        )
    try:
        report.start_time.ToDatetime()
    except ValueError as e:
        raise InvalidFieldError(
            f"report.start_time: expected a time of the years 1 to 9999, got "
            f"{report.start_time.seconds} s since 1970"
        ) from e
    _check_seconds("report.seconds", report.seconds)
    for at, phase in enumerate(report.phases):
        place = f"report.phases[{at}]"
        if not _NAME.fullmatch(phase.name):
            raise InvalidFieldError(
                f"{place}.name: expected 1 to 32 lower-case letters and spaces, got "
                f"{phase.name[:40]!r}"
            )
        _check_seconds(f"{place}.start_seconds", phase.start_seconds)
        _check_seconds(f"{place}.end_seconds", phase.end_seconds)
        _check_seconds(f"{place}.busy_seconds", phase.busy_seconds)
        if phase.end_seconds < phase.start_seconds:
            raise InvalidFieldError(
                f"{place}.end_seconds: expected {phase.start_seconds:g} or more, got "
                f"{phase.end_seconds:g}"
            )


def longest(
    reports: Iterable[report_pb2.WriterReport],
) -> list[report_pb2.WriterReport]:
    """Returns the reports that a record keeps, ascending by writer."""
    by_seconds = sorted(reports, key=lambda report: (-report.seconds, report.writer))
    return sorted(by_seconds[:MAX_WRITERS], key=lambda report: report.writer)


def _check_seconds(place: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InvalidFieldError(f"{place}: expected 0 or more, got {seconds:g}")
