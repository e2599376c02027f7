"""Projects events to metrics in the format of Prometheus.

Metrics of calls have the names of gRPC's own (gRFC A66) as the OpenTelemetry exporter
writes them: dots become underscores, and the unit is a suffix. Ours begin with
``storesvc_``. Labels have few values: methods, statuses, reasons, operations. Runs are
labels only of ``storesvc_checkpoint_newest_timestamp_seconds``, for runs that the
operator lists.

Example:
    >>> metrics = Metrics(runs=("prod/llama",))
    >>> metrics(Retried(operation="read", kind="hedge"))
    >>> metrics.registry.get_sample_value(
    ...     "storesvc_storage_retries_total", {"operation": "read", "kind": "hedge"}
    ... )
    1.0
"""

import math
import platform
import time
from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final, assert_never

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from storesvc.telemetry.events import (
    AuditFailed,
    BugFound,
    CallEnded,
    CallStarted,
    ChunksMoved,
    CollectorChanged,
    Committed,
    DamageFound,
    Event,
    RetentionApplied,
    Retried,
    RunCollected,
    RunContents,
    Stalled,
    StorageRequested,
    StoreCollected,
    Waited,
)

_LATENCY: Final = (
    *(0, 1e-5, 5e-5, 1e-4, 3e-4, 6e-4, 8e-4, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3),
    *(8e-3, 0.01, 0.013, 0.016, 0.02, 0.025, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.13),
    *(0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.65, 0.8, 1, 2, 5, 10, 20, 50, 100),
)
"""Bounds of the durations of calls in seconds, from gRFC A66."""

_SIZES: Final = (
    *(0, 1024, 2048, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216),
    *(67108864, 268435456, 1073741824, 4294967296),
)
"""Bounds of the bytes of calls, from gRFC A66."""


_COMMITS: Final = frozenset(
    f"storesvc.v1.UploadService/{rpc}" for rpc in ("CommitUpload", "CreateCheckpoint")
)

_DENIALS: Final = frozenset(
    {
        *("PERMISSION_DENIED", "IDENTITY_REQUIRED", "CERTIFICATE_INVALID"),
        *("TOKEN_INVALID", "TOKEN_EXPIRED", "TOKEN_AUDIENCE_MISMATCH"),
        "ISSUER_UNKNOWN",
    }
)
"""Reasons of calls that were rejected because of their caller."""


_COMMIT_REASONS: Final = (
    *("CHECKPOINT_EXISTS", "CHUNKS_INCOMPLETE", "CONFLICT", "CORRUPT_DATA"),
    *("STORAGE_DENIED", "STORAGE_FULL", "STORAGE_UNAVAILABLE", "UPLOAD_NOT_FOUND"),
    *("UPLOAD_SUPERSEDED", "WRITER_UNFINISHED"),
)
"""Reasons for which a commit usually fails."""

_RESULTS: Final = {
    "": "ok",
    "PreconditionError": "conflict",  # a usual response to a conditional write
    "CancelledError": "cancelled",
}
"""Results of requests to the storage, by the class of their error; else "error"."""

_ENDS: Final = ("upload aborted", "checkpoint deleted", "checkpoint purged")
"""Ends of uploads and checkpoints by a collection or a retention policy."""

_TOTALS: Final = {
    "runs": "Runs",
    "checkpoints": "Committed checkpoints",
    "logical_bytes": "Bytes of the leaves of committed checkpoints",
    "stored_bytes": "Bytes that committed checkpoints wrote",
    "uploads_open": "Open uploads",
    "uploads_oldest_seconds": "Age of the oldest open upload",
}
"""Metrics of the contents of the store, and what each is."""

_DAMAGES: Final = ("missing", "checksum", "digest", "key_space", "file_table")
"""``Damage.Kind`` of the contract."""


class Metrics:
    """The metrics of a server, as a subscriber of its events. Thread-safe."""

    def __init__(self, *, runs: Collection[str] = ()) -> None:
        """Creates the metrics with their own registry.

        Args:
            runs: Runs (``namespace/run``) whose newest commit is a metric.
        """
        self.registry = CollectorRegistry()
        self._runs = frozenset(runs)
        # Cached, because looking labels up takes longer than counting.
        self._of_method = cache(
            lambda method: (
                self._started.labels(method),
                self._in_flight.labels(method),
            )
        )
        self._of_call = cache(
            lambda method, status: (
                self._durations.labels(method, status),
                self._received.labels(method, status),
                self._sent.labels(method, status),
            )
        )
        self._of_request = cache(
            lambda storage, operation, error: self._storage.labels(
                storage, operation, _RESULTS.get(error, "error")
            )
        )
        self._newest_of: dict[str, float] = {}
        """Time of the newest commit of each of these runs."""
        self._contents: dict[str, RunContents] = {}
        """Contents of each run at its last collection."""
        PlatformCollector(self.registry)
        ProcessCollector(registry=self.registry)
        self._make_calls()
        self._make_data()
        self._make_storage()
        self._make_collection()
        self._totals = {
            name: self._gauge(
                f"storesvc_{name}", f"{text} at the last collection by this server."
            )
            for name, text in _TOTALS.items()
        }
        self._forget_contents()
        self._make_known()
        self._gauge(
            "storesvc_build_info",
            "Versions of the server; always 1.",
            *("version", "python", "grpc", "tensorstore"),
        ).labels(
            version=_version("storesvc"),
            python=platform.python_version(),
            grpc=_version("grpcio"),
            tensorstore=_version("tensorstore"),
        ).set(1)

    def __call__(self, event: Event) -> None:
        match event:
            case CallStarted():
                started, in_flight = self._of_method(event.method)
                started.inc()
                in_flight.inc()
            case CallEnded():
                self._end_call(event)
            case StorageRequested():
                key = (event.storage, event.operation, event.error)
                self._of_request(*key).observe(event.seconds)
            case Retried():
                self._retries.labels(event.operation, event.kind).inc()
            case Stalled():
                self._stalls.labels(event.storage).inc()
            case ChunksMoved():
                self._chunk_bytes.labels(event.direction, event.path).inc(
                    event.size_bytes
                )
            case Committed():
                self._commit(event)
            case Waited():
                self._waits.labels(event.purpose).observe(event.seconds)
            case RunCollected():
                self._collect_run(event)
            case StoreCollected():
                self._collect_store(event)
            case CollectorChanged():
                self._forget_contents()
            case RetentionApplied():
                self._ended.labels("checkpoint deleted").inc(event.deleted_checkpoints)
            case BugFound():
                self._bugs.inc()
            case DamageFound():
                self._damage.labels(event.kind).inc()
            case AuditFailed():
                self._audit_failures.inc()
            case _:
                assert_never(event)

    def track_certificate(self, expiry: Callable[[], float]) -> None:
        """Adds the time at which the TLS certificate expires.

        Args:
            expiry: Returns it, in seconds since the epoch; called at each scrape.
        """
        self._gauge(
            "storesvc_tls_certificate_expiry_timestamp_seconds",
            "Time at which the TLS certificate of the server expires.",
        ).set_function(expiry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=bounds, registry=self.registry)

    def _make_calls(self) -> None:
        self._started = self._counter(
            "grpc_server_call_started_total", "Calls that arrived.", "grpc_method"
        )
        self._durations = self._histogram(
            "grpc_server_call_duration_seconds",
            "Duration of calls, by their final status.",
            _LATENCY,
            *("grpc_method", "grpc_status"),
        )
        self._received = self._histogram(
            "grpc_server_call_rcvd_total_compressed_message_size_bytes",
            "Bytes of the messages that a call received.",
            _SIZES,
            *("grpc_method", "grpc_status"),
        )
        self._sent = self._histogram(
            "grpc_server_call_sent_total_compressed_message_size_bytes",
            "Bytes of the messages that a call sent.",
            _SIZES,
            *("grpc_method", "grpc_status"),
        )
        self._in_flight = self._gauge(
            "storesvc_calls_in_flight", "Calls in flight.", "grpc_method"
        )
        self._errors = self._counter(
            "storesvc_call_errors_total",
            "Calls that failed with a reason of the contract.",
            *("grpc_method", "reason"),
        )
        self._denied = self._counter(
            "storesvc_auth_denied_total",
            "Calls that were rejected because of their caller.",
            "reason",
        )
        self._bugs = self._counter(
            "storesvc_bugs_total", "Calls that failed because of a bug of the server."
        )
        self._waits = self._histogram(
            "storesvc_queue_wait_seconds",
            "Wait of calls for their turn, if they had to wait.",
            (0.001, 0.01, 0.1, 1, 5, 20),
            "purpose",
        )
        self._audit_failures = self._counter(
            "storesvc_audit_failures_total",
            "Entries that could not be written to the audit log.",
        )

    def _make_data(self) -> None:
        self._chunk_bytes = self._counter(
            "storesvc_chunk_bytes_total",
            "Bytes of stored chunks between clients and the storage.",
            *("direction", "path"),
        )
        self._commits = self._counter(
            "storesvc_commits_total", "Checkpoints that were committed."
        )
        self._commit_failures = self._counter(
            "storesvc_commit_failures_total", "Commits that failed.", "reason"
        )
        self._commit_durations = self._histogram(
            "storesvc_commit_duration_seconds",
            "Time from the call of a commit to its checkpoint.",
            (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60),
        )
        self._committed_bytes = self._counter(
            "storesvc_committed_bytes_total",
            "Bytes of the chunks of committed checkpoints.",
            "source",
        )
        self._committed_chunks = self._counter(
            "storesvc_committed_chunks_total", "Chunks of committed checkpoints."
        )
        self._newest = self._gauge(
            "storesvc_checkpoint_newest_timestamp_seconds",
            "Time of the newest commit of the runs that --metrics-run lists.",
            *("namespace", "run"),
        )
        self._damage = self._counter(
            "storesvc_damage_found_total",
            "Damages that verifications have found.",
            "kind",
        )

    def _make_storage(self) -> None:
        self._storage = self._histogram(
            "storesvc_storage_request_duration_seconds",
            "Duration of requests to the storage, with their retries.",
            (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 1, 2.5, 10, 30, 60),
            *("storage", "operation", "result"),
        )
        self._retries = self._counter(
            "storesvc_storage_retries_total",
            "Requests to the storage that were sent again.",
            *("operation", "kind"),
        )
        self._stalls = self._counter(
            "storesvc_storage_stalls_total",
            "Requests that the storage has not answered for 15 s or more.",
            "storage",
        )

    def _make_collection(self) -> None:
        self._passes = self._counter(
            "storesvc_gc_passes_total",
            "Passes of the garbage collection over all runs.",
            "result",
        )
        self._pass_durations = self._histogram(
            "storesvc_gc_duration_seconds",
            "Duration of passes of the garbage collection over all runs.",
            (0.01, 0.1, 1, 10, 60, 600, 3600),
        )
        self._last_success = self._gauge(
            "storesvc_gc_last_success_timestamp_seconds",
            "Time of the last complete pass of this server over all runs; at first "
            "the start of the server.",
        )
        self._last_success.set(time.time())
        self._deleted = self._counter(
            "storesvc_gc_deleted_objects_total",
            "Objects that the garbage collection deleted.",
        )
        self._ended = self._counter(
            "storesvc_gc_ended_total",
            "Uploads and checkpoints that the garbage collection ended.",
            "what",
        )

    def _forget_contents(self) -> None:
        """Sets the contents of the store to unknown: this server does not collect."""
        for gauge in self._totals.values():
            gauge.set(math.nan)

    def _make_known(self) -> None:
        """Begins known series at 0, since a counter that begins at 1 has no rate."""
        for path in (("in", "stream"), ("in", "direct"), ("out", "stream")):
            self._chunk_bytes.labels(*path)
        for source in ("sent", "reused"):
            self._committed_bytes.labels(source)
        for kind in _DAMAGES:
            self._damage.labels(kind)
        for operation in ("read", "write", "change"):
            for how in ("hedge", "retry"):
                self._retries.labels(operation, how)
        for reason in _COMMIT_REASONS:
            self._commit_failures.labels(reason)
        for result in ("complete", "incomplete"):
            self._passes.labels(result)
        for reason in _DENIALS:
            self._denied.labels(reason)
        for what in _ENDS:
            self._ended.labels(what)

    def _end_call(self, event: CallEnded) -> None:
        method, status = event.method, event.status
        _, in_flight = self._of_method(method)
        in_flight.dec()
        seconds, received_bytes, sent_bytes = self._of_call(method, status)
        seconds.observe(event.seconds)
        received_bytes.observe(event.received_bytes)
        sent_bytes.observe(event.sent_bytes)
        if event.reason:
            self._errors.labels(method, event.reason).inc()
        if event.reason in _DENIALS:
            self._denied.labels(event.reason).inc()
        if method in _COMMITS and status != "OK":
            self._commit_failures.labels(event.reason or status).inc()

    def _commit(self, event: Committed) -> None:
        self._commits.inc()
        self._commit_durations.observe(event.seconds)
        self._committed_bytes.labels("sent").inc(event.own_bytes)
        self._committed_bytes.labels("reused").inc(event.stored_bytes - event.own_bytes)
        self._committed_chunks.inc(event.chunk_count)
        self._see_newest(event.run, event.start + event.seconds)

    def _see_newest(self, run: str, commit_time: float) -> None:
        # A pass reports what it read when it began: a commit may be newer.
        if run in self._runs and commit_time > self._newest_of.get(run, 0.0):
            self._newest_of[run] = commit_time
            self._newest.labels(*run.split("/", 1)).set(commit_time)

    def _collect_run(self, event: RunCollected) -> None:
        self._deleted.inc(event.deleted_objects)
        self._ended.labels("upload aborted").inc(event.aborted_uploads)
        self._ended.labels("checkpoint deleted").inc(event.deleted_checkpoints)
        self._ended.labels("checkpoint purged").inc(event.purged_checkpoints)
        if event.contents is not None:
            self._contents[event.run] = event.contents
            self._see_newest(event.run, event.contents.newest_commit)

    def _collect_store(self, event: StoreCollected) -> None:
        self._passes.labels("complete" if event.is_complete else "incomplete").inc()
        self._pass_durations.observe(event.seconds)
        if event.is_complete:
            self._last_success.set(event.start + event.seconds)
        self._contents = {
            run: self._contents[run] for run in event.runs if run in self._contents
        }
        held = self._contents.values()
        since = [each.oldest_upload for each in held if each.oldest_upload]
        totals = {
            "runs": len(event.runs),
            "checkpoints": sum(each.checkpoints for each in held),
            "logical_bytes": sum(each.logical_bytes for each in held),
            "stored_bytes": sum(each.own_bytes for each in held),
            "uploads_open": sum(each.uploads_open for each in held),
            "uploads_oldest_seconds": time.time() - min(since) if since else 0.0,
        }
        for name, total in totals.items():
            self._totals[name].set(total)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
