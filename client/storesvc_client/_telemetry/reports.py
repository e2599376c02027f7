"""Reports of saves and restores: what they moved, and how long each part took.

A job writes the report of a restore to a file, and ``storectl trace --report`` shows it
elsewhere. The file may come from anyone: each value is checked, so that whatever
reads a report gets finite numbers of possible sizes and short texts. Fields that this
release does not know are ignored.

Example:
    >>> text = opened.report.to_json()
    >>> parse_report(text).seconds == opened.report.seconds
    True
    >>> print(timeline_text(report.timeline, report.seconds, width=60))
    phase    start    end   busy  0                      0.024 s
    plan     0.000  0.002  0.002  ##
    write    0.002  0.020  0.031    #################
    commit   0.020  0.024  0.004                     ####
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from types import MappingProxyType, NoneType
from typing import (
    Any,
    Final,
    NoReturn,
    Self,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from storesvc_client._values.messages import read_message
from storesvc_client._views.texts import (
    ABSENT,
    json_value,
    printable,
    size_text,
    time_text,
)
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import report_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSpan:
    """Time of one phase of a save or a restore, over all threads."""

    name: str
    """Name of the phase, as in the ``timings`` of a report."""
    start_seconds: float
    """Seconds from the start of the operation to the first start of the phase."""
    end_seconds: float
    """Seconds from the start of the operation to the last end of the phase."""
    busy_seconds: float
    """Seconds that threads spent in it, summed: more than the difference where several
    worked at the same time, less where it paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterReport:
    """Measurements of one process of a save, which its checkpoint keeps."""

    writer: int = 0
    """Index of the process among the writers of the save."""
    owner: str = ""
    """Host and process."""
    start_time: datetime
    """Time of the call of ``Run.save``, in UTC, by the clock of the process."""
    seconds: float
    """Seconds until the process had stored its chunks."""
    total_bytes: int
    """Bytes of the chunks of this process."""
    sent_bytes: int
    """Bytes of these that it sent; the store had the others already."""
    timeline: tuple[PhaseSpan, ...]
    """Phases until then, in the order of their start."""

    def to_message(self) -> pb.WriterReport:
        """Returns the protobuf message."""
        message = pb.WriterReport(
            owner=self.owner,
            seconds=self.seconds,
            total_bytes=self.total_bytes,
            sent_bytes=self.sent_bytes,
            phases=(pb.PhaseSpan(**asdict(span)) for span in self.timeline),
        )
        message.start_time.FromDatetime(self.start_time)
        return message

    @classmethod
    def from_message(cls, message: pb.WriterReport) -> "WriterReport":
        """Returns the value of a protobuf message."""
        spans = tuple(read_message(PhaseSpan, span) for span in message.phases)
        return read_message(cls, message, timeline=spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTrace:
    """Timeline of a save, as its checkpoint keeps it; from ``Run.trace``."""

    run: str
    """Name of the run, ``namespace/run``."""
    step: int
    """Step of the checkpoint."""
    upload: str
    """Id of the upload, and of the trace that a collector has of the save."""
    create_time: datetime
    """Time when the upload began, in UTC, by the clock of the server."""
    commit_time: datetime
    """Time of the commit, in UTC, by the clock of the server."""
    writers: tuple[WriterReport, ...]
    """The 16 processes that took longest, in the order of their index; empty for
    checkpoints of earlier releases."""

    def __str__(self) -> str:
        return trace_text(self)

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import trace_html

        return trace_html(self)


class _Report:
    """Texts of a report, of a save or of a restore."""

    __slots__ = ()

    seconds: float
    timeline: tuple[PhaseSpan, ...]

    def timeline_text(self, *, width: int = 100) -> str:
        """Returns the phases as a table with bars of text, at most `width` wide."""
        return timeline_text(self.timeline, self.seconds, width=width)

    def to_json(self) -> str:
        """Returns the report as JSON, which ``storectl trace --report`` shows."""
        return json.dumps(report_document(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Returns the report that ``to_json`` has written.

        Raises:
            InvalidRequestError: It is no report of this kind, or it is damaged.
        """
        found = parse_report(text)
        if not isinstance(found, cls):
            raise InvalidRequestError(
                f"report: expected one of a {_KINDS[cls]}, got another one; use "
                f"{type(found).__name__}.from_json"
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(_Report):
    """Bytes and timings of a save; from ``Save.report``. Bytes count stored chunks."""

    run: str
    """Name of the run, ``namespace/run``."""
    step: int
    """Step of the checkpoint."""
    start_time: datetime
    """Time of the call of ``Run.save``, in UTC."""
    total_bytes: int
    """Bytes of all chunks of the checkpoint."""
    sent_bytes: int
    """Bytes of the chunks that were sent."""
    reused_bytes: int
    """Bytes of the chunks that the store had already."""
    seconds: float
    """Seconds from the call of ``Run.save`` to the commit."""
    blocking_seconds: float
    """Seconds of these for which ``Run.save`` blocked its caller."""
    timings: Mapping[str, float]
    """Seconds by phase, summed over all threads: await previous (save of the run),
    plan, snapshot, wait (for staging memory), begin, digest, find (chunks that the
    store has), write and sync (data files) or send (to the server), acknowledge (after
    the last send), finish, await others (of the job), commit. Phases that did not occur
    are left out."""
    timeline: tuple[PhaseSpan, ...] = ()
    """The same phases with their start and end, in the order of their start."""
    slowest: str
    """Data file, or "stream" for a stream to the server, that this process wrote for
    the longest time; "" if it wrote nothing."""
    slowest_seconds: float
    """Seconds that it took."""
    last_process: str
    """Process of the job that finished last, with its host, ``process 2 (tpu-host-2)``;
    "" if this process saved alone, or the last one ended without reporting."""
    needs_like: tuple[str, ...]
    """``key: class`` of the containers, such as named tuples, that only a restore with
    ``like=`` rebuilds; without it they are returned as dicts or lists."""
    upload: str = ""
    """Id of the upload: 32 hexadecimal digits, the same in all processes of a job, and
    the id of its trace."""

    def __repr__(self) -> str:
        sent, reused = size_text(self.sent_bytes), size_text(self.reused_bytes)
        return (
            f"<SaveReport {self.run}@{self.step}, {sent} sent, {reused} reused, "
            f"{self.seconds:.3g} s>"
        )

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import save_report_html

        return save_report_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """Reads of one process of a job during a restore."""

    process: str
    """Index and host of the process, ``process 2 (tpu-host-2)``."""
    read_bytes: int
    """Bytes of stored chunks that it read."""
    seconds: float
    """Seconds that it read, without waits for other processes."""
    slowest: str
    """Data file, or stream from the server, of its longest read; "" if it read
    nothing."""
    slowest_seconds: float
    """Seconds that this read took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport(_Report):
    """Bytes and timings of a restore; ``OpenCheckpoint.report``."""

    run: str
    """Name of the run, ``namespace/run``."""
    step: int
    """Step of the checkpoint."""
    start_time: datetime
    """Time of its start, in UTC."""
    read_bytes: int
    """Bytes of stored chunks that this process read."""
    received_bytes: int
    """Bytes of stored chunks that other processes of the job read for it."""
    returned_bytes: int
    """Bytes of the restored arrays, before a cast."""
    seconds: float
    """Seconds that the restore took."""
    timings: Mapping[str, float]
    """Seconds by phase, summed over all threads: plan, read (including waits for the
    storage or the server), verify, copy (into buffers), place (on devices), rebuild
    (the tree); in a job also await others, and exchange (chunks between devices)."""
    timeline: tuple[PhaseSpan, ...] = ()
    """The same phases with their start and end, in the order of their start."""
    slowest: str
    """Data file, or stream from the server, of the longest read; "" if nothing was
    read."""
    slowest_seconds: float
    """Seconds that this read took."""
    slowest_process: ProcessReading | None
    """Process of the job that read the longest; None if this process restored alone."""
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Newer checkpoints that were skipped because they are damaged: the damage by step.
    Only with ``on_damage="older"``."""
    is_verified: bool = True
    """True if each chunk was compared with a stored checksum. False for checkpoints of
    other projects whose formats have none."""
    mapping: str = ""
    """Names of the rules that made the tree, of ``mapping=`` or of migrations of the
    run; "" if it was restored as it is stored."""

    def __repr__(self) -> str:
        read, returned = size_text(self.read_bytes), size_text(self.returned_bytes)
        unverified = "" if self.is_verified else ", unverified"
        mapped = f" mapped by {self.mapping}" if self.mapping else ""
        return (
            f"<RestoreReport {self.run}@{self.step}{mapped}, {read} read, "
            f"{returned} returned, {self.seconds:.3g} s{unverified}>"
        )

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import restore_report_html

        return restore_report_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal."""

    ok: bool
    """True if the checkpoint can be restored by its model's class or, if the class
    needs arguments of its own, by a factory."""
    message: str
    """Reason why it cannot, and what to do; "" if it can."""


MAX_REPORT_BYTES: Final = 1 << 20
"""Maximum size of a report as JSON; that of a restore has less than 10 KiB."""

_MAX_ROWS: Final = 1000
"""Maximum phases, and maximum entries of a mapping."""
_MAX_TEXT: Final = 4096
_MAX_SECONDS: Final = 1e9
_MAX_INTEGER: Final = (1 << 63) - 1
_PLAIN: Final[Mapping[Any, tuple[str, Callable[[Any], bool]]]] = MappingProxyType(
    {
        str: (
            f"a text of at most {_MAX_TEXT} characters",
            lambda value: isinstance(value, str) and len(value) <= _MAX_TEXT,
        ),
        bool: ("true or false", lambda value: isinstance(value, bool)),
        int: (
            "a whole number, at least 0",
            lambda value: type(value) is int and 0 <= value <= _MAX_INTEGER,
        ),
        float: (
            f"seconds, 0 to {_MAX_SECONDS:g}",
            lambda value: type(value) in (int, float) and 0 <= value <= _MAX_SECONDS,
        ),
    }
)
"""For each plain type of a field, what its JSON value must be, and whether it is."""
_SHOWN: Final = 40
"""Characters of a wrong value that an error shows."""

_KINDS: Final[Mapping[type[Any], str]] = {SaveReport: "save", RestoreReport: "restore"}


def report_document(report: _Report) -> dict[str, Any]:
    """Returns a report as JSON types."""
    return {"report": _KINDS[type(report)], **json_value(report)}


def parse_report(
    text: str | bytes, place: str = "report"
) -> SaveReport | RestoreReport:
    """Returns the report that its ``to_json`` has written."""
    try:
        found = _mapping(_load_json(text), "report")
        for cls, kind in _KINDS.items():
            if kind == found.get("report"):
                report: SaveReport | RestoreReport = _parse_object(cls, found)
                return report
        _refuse("report", "'save' or 'restore'", found.get("report"))
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
    raise _DamagedError(f"{printable(name)[:_SHOWN]}: expected {expected}, got {shown}")


def _load_json(text: str | bytes) -> object:
    if len(text) > MAX_REPORT_BYTES:
        raise _DamagedError(
            f"expected a report of at most {MAX_REPORT_BYTES:,} bytes, got more"
        )
    try:
        return json.loads(text)
    # a text of other bytes, of nested lists without end, or no JSON at all
    except (ValueError, RecursionError):
        raise _DamagedError("expected a report as JSON, got something else") from None


def _parse_object(cls: type[Any], value: object, name: str = "report") -> Any:
    """Returns the value of a dataclass, from a JSON object with its fields."""
    found, kinds = _mapping(value, name), get_type_hints(cls)
    names = [each.name for each in fields(cls)]
    return cls(**{each: _parse(kinds[each], found.get(each), each) for each in names})


def _parse(kind: Any, value: Any, name: str) -> Any:
    plain, parts = get_origin(kind) or kind, get_args(kind)
    if plain in _PLAIN:
        expected, is_valid = _PLAIN[plain]
        if not is_valid(value):
            _refuse(name, expected, value)
        return float(value) if plain is float else value
    if plain is datetime:
        return _parse_time(value, name)
    if NoneType in parts:
        return None if value is None else _parse(parts[0], value, name)
    if is_dataclass(kind):
        return _parse_object(cast("type[Any]", kind), value, name)
    if plain is tuple:
        if not isinstance(value, list) or len(value) > _MAX_ROWS:
            _refuse(name, f"a list of at most {_MAX_ROWS} entries", value)
        return tuple(_parse(parts[0], each, name) for each in value)
    items = _mapping(value, name).items()
    named = {key: _parse(parts[1], each, key) for key, each in items}
    if parts[0] is int:
        return {_parse_step(key, name): each for key, each in named.items()}
    return named


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(name, "an object", value)
    if len(value) > _MAX_ROWS:
        _refuse(name, f"at most {_MAX_ROWS} entries", len(value))
    return value


def _parse_step(text: str, name: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        _refuse(name, "steps", text)
    return int(text)


def _parse_time(value: Any, name: str) -> datetime:
    try:
        found = datetime.fromisoformat(value)
        if found.tzinfo is not None:
            return found.astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        pass
    _refuse(name, "a time with its time zone", value)


_LEAST_BAR: Final = 10
"""Minimum width of the bars; narrower tables have none."""


def timeline_text(spans: Sequence[PhaseSpan], seconds: float, *, width: int) -> str:
    """Returns a table of phases with bars on a common axis from 0 to the duration."""
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
