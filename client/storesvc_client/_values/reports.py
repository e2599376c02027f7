"""Reports of saves and restores: what they moved, and how long each part took."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from storesvc_client._values.texts import size_text
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
            phases=(
                pb.PhaseSpan(
                    name=span.name,
                    start_seconds=span.start_seconds,
                    end_seconds=span.end_seconds,
                    busy_seconds=span.busy_seconds,
                )
                for span in self.timeline
            ),
        )
        message.start_time.FromDatetime(self.start_time)
        return message

    @classmethod
    def from_message(cls, message: pb.WriterReport) -> "WriterReport":
        """Returns the value of a protobuf message."""
        return cls(
            writer=message.writer,
            owner=message.owner,
            start_time=message.start_time.ToDatetime(UTC),
            seconds=message.seconds,
            total_bytes=message.total_bytes,
            sent_bytes=message.sent_bytes,
            timeline=tuple(
                PhaseSpan(
                    name=span.name,
                    start_seconds=span.start_seconds,
                    end_seconds=span.end_seconds,
                    busy_seconds=span.busy_seconds,
                )
                for span in message.phases
            ),
        )


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
        from storesvc_client._values.timelines import trace_text

        return trace_text(self)

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import trace_html

        return trace_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
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

    def timeline_text(self, *, width: int = 100) -> str:
        """Returns the phases as a table with bars of text, at most `width` wide."""
        from storesvc_client._values.timelines import timeline_text

        return timeline_text(self.timeline, self.seconds, width=width)

    def to_json(self) -> str:
        """Returns the report as JSON, which ``storectl trace --report`` shows."""
        from storesvc_client._values.report_files import report_json

        return report_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> "SaveReport":
        """Returns the report that ``to_json`` has written.

        Raises:
            InvalidRequestError: It is no report of a save, or it is damaged.
        """
        from storesvc_client._values.report_files import parse_report

        found = parse_report(text)
        if not isinstance(found, cls):
            raise InvalidRequestError(
                "report: expected one of a save, got another one; use "
                f"{type(found).__name__}.from_json"
            )
        return found

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import save_report_html

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
class RestoreReport:
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

    def __repr__(self) -> str:
        read, returned = size_text(self.read_bytes), size_text(self.returned_bytes)
        unverified = "" if self.is_verified else ", unverified"
        return (
            f"<RestoreReport {self.run}@{self.step}, {read} read, {returned} returned, "
            f"{self.seconds:.3g} s{unverified}>"
        )

    def timeline_text(self, *, width: int = 100) -> str:
        """Returns the phases as a table with bars of text, at most `width` wide."""
        from storesvc_client._values.timelines import timeline_text

        return timeline_text(self.timeline, self.seconds, width=width)

    def to_json(self) -> str:
        """Returns the report as JSON, which ``storectl trace --report`` shows."""
        from storesvc_client._values.report_files import report_json

        return report_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> "RestoreReport":
        """Returns the report that ``to_json`` has written.

        Raises:
            InvalidRequestError: It is no report of a restore, or it is damaged.
        """
        from storesvc_client._values.report_files import parse_report

        found = parse_report(text)
        if not isinstance(found, cls):
            raise InvalidRequestError(
                "report: expected one of a restore, got another one; use "
                f"{type(found).__name__}.from_json"
            )
        return found

    def _repr_html_(self) -> str:
        from storesvc_client._values.notebook import restore_report_html

        return restore_report_html(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal."""

    ok: bool
    """True if the checkpoint can be restored by its model's class or, if the class
    needs arguments of its own, by a factory."""
    message: str
    """Reason why it cannot, and what to do; "" if it can."""
