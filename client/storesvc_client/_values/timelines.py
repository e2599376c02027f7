"""Draws timelines of saves and restores as text.

Example:
    >>> print(timeline_text(report.timeline, report.seconds, width=60))
    phase    start    end   busy  0                      0.024 s
    plan     0.000  0.002  0.002  ##
    write    0.002  0.020  0.031    #################
    commit   0.020  0.024  0.004                     ####
"""

from collections.abc import Sequence
from typing import Final

from storesvc_client._values.reports import (
    PhaseSpan,
    RestoreReport,
    SaveReport,
    SaveTrace,
)
from storesvc_client._values.texts import ABSENT, printable, size_text, time_text

_LEAST_BAR: Final = 10
"""Minimum width of the bars; narrower tables have none."""


def timeline_text(spans: Sequence[PhaseSpan], seconds: float, *, width: int) -> str:
    """Returns a table of phases with bars on a common axis from 0 to the duration.

    Args:
        spans: The phases.
        seconds: Duration of the operation.
        width: Maximum width of a line.
    """
    numbers = max(5, len(f"{seconds:.3f}"))
    columns = [
        ("phase", "start", "end", "busy"),
        *(
            (
                printable(span.name),
                f"{span.start_seconds:.3f}",
                f"{span.end_seconds:.3f}",
                f"{span.busy_seconds:.3f}",
            )
            for span in spans
        ),
    ]
    names = max(len(name) for name, *_ in columns)
    lines = [
        "  ".join((name.ljust(names), *(number.rjust(numbers) for number in rest)))
        for name, *rest in columns
    ]
    room = width - len(lines[0]) - 2
    if room >= _LEAST_BAR:
        end = f"{seconds:.3f} s"
        bars = ["0" + end.rjust(room - 1)]
        bars += [_bar(span, seconds, room) for span in spans]
        lines = [f"{line}  {bar}" for line, bar in zip(lines, bars, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def trace_text(trace: SaveTrace, *, width: int = 100) -> str:
    """Returns the timeline of a save: one table for each process."""
    took = (trace.commit_time - trace.create_time).total_seconds()
    blocks = [
        (
            f"{trace.run}@{trace.step}: committed {time_text(trace.commit_time)}, "
            f"{took:.3f} s after the upload began\ntrace {trace.upload}"
        )
    ]
    for one in trace.writers:
        sent, reused = one.sent_bytes, one.total_bytes - one.sent_bytes
        title = (
            f"process {one.writer} ({printable(one.owner) or ABSENT}): "
            f"{one.seconds:.3f} s, {size_text(sent)} sent, {size_text(reused)} reused"
        )
        table = timeline_text(one.timeline, one.seconds, width=width)
        blocks.append(f"{title}\n{table}")
    if not trace.writers:
        blocks.append("the release that saved it kept no timeline")
    return "\n\n".join(blocks)


def report_text(report: SaveReport | RestoreReport, *, width: int = 100) -> str:
    """Returns a report as text: a few lines with its bytes, and its timeline."""
    if isinstance(report, SaveReport):
        lines = _save_lines(report)
    else:
        lines = _restore_lines(report)
    if report.slowest:
        slowest = printable(report.slowest)
        lines.append(f"slowest part: {slowest}, {report.slowest_seconds:.3f} s")
    table = timeline_text(report.timeline, report.seconds, width=width)
    return "\n".join(lines) + f"\n\n{table}"


def _head(report: SaveReport | RestoreReport) -> str:
    return (
        f"{printable(report.run)}@{report.step}, {time_text(report.start_time)}: "
        f"{report.seconds:.3f} s"
    )


def _save_lines(report: SaveReport) -> list[str]:
    sent, reused = size_text(report.sent_bytes), size_text(report.reused_bytes)
    waited = f"{report.blocking_seconds:.3f} s"
    lines = [
        f"save of {_head(report)}, of which the caller waited {waited}",
        f"{sent} sent, {reused} reused",
    ]
    if report.upload:
        lines.append(f"trace {printable(report.upload)}")
    if report.last_process:
        lines.append(f"last process: {printable(report.last_process)}")
    return lines


def _restore_lines(report: RestoreReport) -> list[str]:
    read, received = size_text(report.read_bytes), size_text(report.received_bytes)
    returned = size_text(report.returned_bytes)
    lines = [
        f"restore of {_head(report)}",
        f"{read} read, {received} received from other processes, {returned} returned",
    ]
    if (other := report.slowest_process) is not None:
        lines.append(
            f"slowest process: {printable(other.process)}, "
            f"{size_text(other.read_bytes)} in {other.seconds:.3f} s"
        )
    lines += [
        f"skipped step {step}: {printable(damage)}"
        for step, damage in report.damaged.items()
    ]
    return lines


def _bar(span: PhaseSpan, seconds: float, room: int) -> str:
    """Returns a bar of at least one character."""
    scale = room / seconds if seconds > 0 else 0.0
    start = min(room - 1, int(span.start_seconds * scale))
    end = min(room, max(start + 1, round(span.end_seconds * scale)))
    return " " * start + "#" * (end - start)
