"""An open checkpoint: its manifest was read in parts, verified, and is in memory; its
chunks are read on demand."""

import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from storesvc.format.layout import RunPaths
from storesvc.format.manifests import CorruptManifestError, Manifest, unpack_manifest
from storesvc.format.names import CheckpointName, RunName
from storesvc_client._chunks.memory import collector_paused
from storesvc_client._job.job import Job
from storesvc_client._restore.assembly import Assembly, ChunkSource
from storesvc_client._restore.hold_lease import Lease
from storesvc_client._restore.joint import JointRestore, join_restore
from storesvc_client._restore.mapped import MappedReader, MappedSource
from storesvc_client._restore.migrations import map_older, migrate
from storesvc_client._restore.open_tree import OpenTree, TreeReader
from storesvc_client._restore.sources import BucketSource, FileSource, ServerSource
from storesvc_client._restore.spread import PeerSource, SpreadPlan, may_spread
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.retry import clear_variables
from storesvc_client._session import Session
from storesvc_client._storage.bucket import BucketRoot
from storesvc_client._storage.root import LentBucket
from storesvc_client._telemetry.events import Unfinished
from storesvc_client._telemetry.progress import Meter, ProgressCallback
from storesvc_client._telemetry.reports import ProcessReading, RestoreReport
from storesvc_client._values.arguments import (
    NEVER,
    Deadline,
    DurationLike,
    checked_duration,
    checked_patterns,
)
from storesvc_client._values.key_patterns import Pattern, Patterns
from storesvc_client._values.models import IMPORTED, Checkpoint
from storesvc_client._values.options import (
    MappingRules,
    RestoreRequest,
    collect_arguments,
)
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    LimitError,
    MismatchError,
    PreconditionError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

    from storesvc_client._export.elements import ExportRequest, OrbaxLayout, Source
    from storesvc_client._export.exporting import ExportReport
    from storesvc_client._mapping.rules import Rules
    from storesvc_client._pytree.restore_target import Target
    from storesvc_client._values.options import AnyMapping

SPREAD_BYTES: Final = 64 << 20
"""Bytes read more than once across processes from which a restore is spread."""

HOLD_SECONDS: Final = 2.0
"""Maximum wait after a read for the outcome of its hold. A failed hold gives the best
explanation of a failed read."""

_SPREAD: Final = "spread"
_APART: Final = "apart"
"""Choices of processes that restore together."""

_UNWRITABLE: Final = frozenset(
    {"FORMAT_UNSUPPORTED", "STORAGE_DENIED", "STORAGE_FULL", "STORAGE_UNAVAILABLE"}
)
"""Error reasons of a store that accepts no hold but can still be read."""

_log = logging.getLogger("storesvc_client")


class CheckpointReader(TreeReader):
    """Reads one checkpoint of a store whose manifest was read."""

    def __init__(
        self,
        session: Session,
        run: RunName,
        info: Checkpoint,
        manifest: Manifest,
        *,
        held_by: Lease | None = None,
        job: Job | None = None,
        spread: bool | None = None,
        damaged: Mapping[int, str] = MappingProxyType({}),
        migrations: Sequence[bytes] = (),
    ) -> None:
        self.info = info
        """The checkpoint as the catalog had it when it was read."""
        self.migrations = migrations
        """Migrations that its restores apply; () if none were read."""
        self.older: Rules | None = None
        """Rules that apply in place of these, if they fit it."""
        self.unfit: MismatchError | None = None
        """Says why they do not; None if they do."""
        super().__init__(manifest.tree, allocate=session.blocks.take, job=job)
        self._held_by = held_by
        self._spread = spread
        self._damaged = damaged
        self._session = session
        self._connection = session.connection
        self._name = CheckpointName(run, info.step)
        self.manifest = manifest
        self._holds: list[Future[Lease]] = []
        """Holds of the reads in progress."""

    @property
    def name(self) -> str:
        """Name of the checkpoint, ``namespace/run@step``."""
        return str(self._name)

    def find_digests(self, row: int) -> "NDArray[np.uint8]":
        start, stop = self.tree.first_chunk[row : row + 2]
        digests: NDArray[np.uint8] = self.manifest.sums.digests[start:stop]
        return digests

    def map_or_migrate(self, mapping: "AnyMapping | None") -> TreeReader:
        """Returns the reader of the tree that a mapping makes; without one, of the tree
        that ``older`` or the migrations of the run make, if they were read."""
        if mapping is not None:
            return self.map(mapping)
        if self.older is not None:
            try:
                return map_older(self, self.older)
            except MismatchError as e:  # as after a save of what they made
                self.unfit = e
                return self
        return migrate(self, self.migrations, place=str(self._name.run))

    def restore(self, request: RestoreRequest, deadline: DurationLike) -> Any:
        with join_restore(self.job, str(self._name.run)) as joint:
            what = f"restore of {self.name}: deadline="
            ends = Deadline.after(checked_duration(what, deadline).total_seconds())
            if joint is not None:
                joint.begin(self.name, lambda: self._name.resource, ends)
            return self.restore_within(joint, ends, request)

    def restore_within(
        self, joint: JointRestore | None, deadline: Deadline, request: RestoreRequest
    ) -> Any:
        """Restores the state within the rendezvous of a job, and sends its start and
        its end to monitoring."""
        telemetry = self._session.telemetry
        process = 0 if joint is None else joint.job.index
        meter = Meter("restore", self.name, request.progress)
        begun = telemetry.restore_began(meter.start_time)
        try:
            with nullcontext() if begun is None else begun.current():
                result, report = self._read_state(joint, deadline, meter, request)
        except BaseException as e:
            failed = Unfinished(
                run=str(self._name.run),
                step=self.info.step,
                start_time=meter.start_time,
                seconds=meter.seconds,
                timeline=meter.timeline,
                process=process,
            )
            telemetry.restore_failed(e, failed, begun=begun)
            clear_variables(e)
            raise
        self.report = report
        telemetry.restored(report, process=process, begun=begun)
        return result

    def _read_state(
        self,
        joint: JointRestore | None,
        deadline: Deadline,
        meter: Meter,
        request: RestoreRequest,
    ) -> tuple[Any, RestoreReport]:
        """Restores the state, after all processes of ``joint`` have agreed on the
        checkpoint; see ``Run.restore``. Returns it with the report."""
        if joint is None and self._spread:
            self._check_alone()
        chosen = request.patterns(self.name)
        with meter:
            with collector_paused(), meter.phase("plan"):
                # 1. Reject what cannot be restored.
                view = self.map_or_migrate(request.mapping)
                if self._spread and view is not self:
                    raise InvalidRequestError(
                        f"restore of {self.name}: expected spread= without mapping= "
                        "and migrations, got both; leave spread= out, and each process "
                        "reads what its devices need"
                    )
                target = view.choose_target(
                    request,
                    view.select_rows(chosen),
                    has_text_keys=IMPORTED in self.info.labels or view is not self,
                )
            with self.hold():  # 2. until every chunk is read
                assembly = view.plan_reads(
                    target.regions(), target.place, meter, deadline
                )
                source = view.open_source()
                # 3. Meet, after all that can fail alone: the others wait from here on.
                if joint is not None:
                    with meter.phase("await others"):
                        source = self._shared_source(view, source, target, joint)
                since = meter.seconds
                with joint.publishing(assembly.progress) if joint else nullcontext():
                    source.read(assembly.missing, assembly)  # 4. verifies each chunk
                assembly.check_complete()
                reading_seconds = meter.seconds - since
            with meter.phase("rebuild"):
                result = target.result()
        # 5. Meet again: no process returns the state unless all of them have read it.
        return result, self._make_report(view, source, assembly, joint, reading_seconds)

    def _make_report(
        self,
        view: TreeReader,
        source: ChunkSource,
        assembly: Assembly,
        joint: JointRestore | None,
        seconds: float,
    ) -> RestoreReport:
        """Returns the report of a restore, once all processes have ended it; this one
        spent ``seconds`` reading or exchanging chunks."""
        meter = assembly.meter
        read_bytes, received_bytes = meter.done_bytes, 0
        if isinstance(source, MappedSource):
            read_bytes = source.read_bytes
        if isinstance(source, PeerSource):
            read_bytes, received_bytes = source.read_bytes, source.received_bytes
            seconds = source.seconds
        own = ProcessReading(
            process=joint.own_name if joint else "",
            read_bytes=read_bytes,
            seconds=seconds,
            slowest=meter.slowest.name,
            slowest_seconds=meter.slowest.seconds,
        )
        slowest_process = None
        if joint is not None:
            with meter.phase("await others"):
                slowest_process = joint.end(own, seconds=assembly.seconds_left)
        return RestoreReport(
            run=self.info.run,
            step=self.info.step,
            start_time=meter.start_time,
            read_bytes=own.read_bytes,
            received_bytes=received_bytes,
            returned_bytes=assembly.buffer_bytes,
            seconds=meter.seconds,
            timings=meter.timings,
            timeline=meter.timeline,
            slowest=own.slowest,
            slowest_seconds=own.slowest_seconds,
            slowest_process=slowest_process,
            damaged=dict(self._damaged),
            mapping=view.mapped.name if isinstance(view, MappedReader) else "",
        )

    def _check_alone(self) -> None:
        """Rejects ``spread=True`` in a job of which only this process restores. Outside
        a job it is accepted, as this process reads every byte once anyway."""
        from storesvc_client._pytree.jax_job import find_job

        if find_job() is not None:
            raise InvalidRequestError(
                f"restore of {self.name}: expected spread= with all processes of the "
                "job, got a restore by this process alone; open the checkpoint, or "
                "restore it, with Distributed(processes='all') in each of them, or "
                "leave spread= out"
            )

    def make_export_source(
        self,
        select: Sequence[Pattern] | None,
        mapping: "AnyMapping | None",
    ) -> "Source":
        from storesvc_client._export.elements import BucketPool, Source

        view = self.map(mapping)
        # The data files of a mapped tree are not stored: none can be linked or copied.
        root = self._session.data_root if view is self else None
        pool = RunPaths(self._name.run).pool
        return Source(
            name=view.name,
            info=self.info,
            tree=view.tree,
            rows=view.select_rows(select),
            is_whole=select is None,
            containers=view.select_containers(select),
            read=view.read_regions,
            places=view.manifest.places,
            pool=root / pool if isinstance(root, Path) else None,
            bucket_pool=BucketPool(storage=root.storage, path=pool)
            if isinstance(root, BucketRoot)
            else None,
            mapping_digest=view.mapped.digest if isinstance(view, MappedReader) else "",
        )

    def export(self, url: str | Path, request: "ExportRequest") -> "ExportReport":
        """Exports as ``OpenCheckpoint.export``."""
        from storesvc_client._export.exporting import export_checkpoint

        chosen = None
        if request.select is not None:
            place = f"export of {self.name}: select="
            chosen = checked_patterns(place, request.select)
        with self.hold(), Meter("export", self.name, request.progress) as meter:
            source = self.make_export_source(chosen, request.mapping)
            return export_checkpoint(source, url, request, meter)

    @contextmanager
    def hold(self) -> Generator[None]:
        """Holds the checkpoint, which keeps it from being purged during a read.

        The first bytes are read while the hold is being created, which in a bucket
        takes as long as a read. If the checkpoint is purged before that, the read
        cannot return other data, because every chunk is verified; the error then
        states why the checkpoint cannot be held.
        """
        if self._held_by is not None and self._held_by.is_held:
            yield
            return
        has_read = threading.Event()
        holding: Future[None] = Future()
        held: Future[Lease] = Future()
        self._holds.append(held)

        def hold() -> None:
            try:
                held.set_result(Lease(self._connection, self._name, uid=self.info.uid))
            except BaseException as e:  # noqa: BLE001 - raised by the waiting threads
                held.set_exception(e)
            try:
                lease = held.result()
                has_read.wait()
                lease.end()
                holding.set_result(None)
            except BaseException as e:  # noqa: BLE001 - raised by the waiting thread
                holding.set_exception(e)

        # a daemon: a storage that does not answer must not delay the process's exit
        holder = copy_context()  # its calls belong to the span of the read
        threading.Thread(
            target=holder.run, args=(hold,), name="storesvc-read-hold", daemon=True
        ).start()
        try:
            yield
        finally:
            self._holds.remove(held)
            has_read.set()
            self._end(holding)

    def _hold_name(self) -> str:
        """Returns the name of a hold that protects a read in progress; waits until it
        is created."""
        if self._held_by is not None and self._held_by.is_held:
            return self._held_by.name
        if not self._holds:
            raise PreconditionError(
                f"{self.name}: the hold of this read has ended; read again"
            )
        return self._holds[-1].result(timeout=self._connection.timeout).name

    def _end(self, holding: "Future[None]") -> None:
        """Waits for the end of a hold. A storage that accepts no hold is not an error:
        the data read is verified and does not need the hold any more."""
        try:
            holding.result(timeout=HOLD_SECONDS)
        except TimeoutError:
            _log.warning("%s: no response about its hold, which will expire", self.name)
        except (LimitError, PreconditionError, UnavailableError) as e:
            if e.reason not in _UNWRITABLE:
                raise
            why = "its store is read-only" if "read_only" in e.metadata else e
            _log.warning("%s is read without a hold: %s", self.name, why)

    def _shared_source(
        self,
        view: TreeReader,
        source: ChunkSource,
        target: "Target",
        joint: JointRestore,
    ) -> ChunkSource:
        """Returns the source of a joint restore, once all processes have the same
        plan."""
        from storesvc_client._pytree.jax_job import all_gather

        needed = list(target.iterate_needed(joint.job.count))
        plan = SpreadPlan(view.manifest, needed, count=joint.job.count)
        # a file on a local disk is as fast to reach as the other processes
        is_far = not isinstance(self._session.data_root, Path)
        spread = self._spread
        is_worth_it = is_far and plan.saved_bytes >= SPREAD_BYTES and may_spread()
        rules = ""
        if isinstance(view, MappedReader):
            rules, is_worth_it = view.mapped.digest, False
        # only some processes may reach the disk, so process 0's choice applies to all
        choice = joint.check(
            f"{self.info.uid} {spread} {plan.digest} {rules}",
            _SPREAD if spread or (spread is None and is_worth_it) else _APART,
        )
        if choice == _APART:
            return source
        return PeerSource(
            source,
            plan,
            self.manifest,
            job=joint.job,
            gather=all_gather,
            failure=joint.failure,
            name=self.name,
        )

    @cached_property
    def _lent_root(self) -> BucketRoot:
        """Root of the store, reached with credentials for the data files of the run,
        which all reads of this checkpoint share."""
        lent = self._session.data_root
        assert isinstance(lent, LentBucket)
        return lent.to_read(self._name.run, self._hold_name)

    def open_source(self) -> ChunkSource:
        """Returns the source of stored chunks: server, files or bucket."""
        pool = RunPaths(self._name.run).pool
        match self._session.data_root:
            case None:
                return ServerSource(
                    self._connection, name=self._name.resource, uid=self.info.uid
                )
            case Path() as root:
                return FileSource(root, pool, self.manifest, name=self.name)
            case LentBucket():
                return BucketSource(
                    self._lent_root, pool, self.manifest, name=self.name
                )
            case bucket:
                return BucketSource(bucket, pool, self.manifest, name=self.name)


class OpenCheckpoint(OpenTree):
    """One checkpoint whose manifest was read; returned by ``Run.open``.

    All its methods read the same checkpoint, even if "latest" or a tag moves in the
    meantime. Threads may share it.

    >>> opened = run.open("best")
    >>> opened.leaves["params/kernel"].shape
    (512, 512)
    >>> state = opened.restore(like=state)
    """

    _reader: CheckpointReader

    def __init__(self, reader: CheckpointReader) -> None:
        super().__init__(reader)
        self.info = reader.info
        """The checkpoint as the catalog had it when it was opened."""

    def export(
        self,
        url: "str | Path",
        *,
        select: Patterns | None = None,
        cast: "DTypeLike | None" = None,
        mapping: MappingRules | None = None,
        layout: "OrbaxLayout | None" = None,
        item: str | None = None,
        max_shard_bytes: int | None = None,
        config: str | Path | None = None,
        drop_items: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: ProgressCallback | None = None,
    ) -> "ExportReport":
        """Writes leaves in the format of another project. Needs no jax.

        ``orbax:URL`` writes a step below a root of Orbax, ``safetensors:URL`` a folder
        that Hugging Face's libraries open, or a file if it ends in ".safetensors",
        ``npz:FILE`` one file of NumPy. A URL is a local path, or one that the package
        ``fsspec`` writes to. The target appears when it is complete, and nothing is
        replaced; calling this again continues after a failure. Every chunk is verified,
        except where its file is linked: Orbax verifies it then. At most a few
        hundred MiB are in memory.

        >>> run.open("best").export("safetensors:/models/llama", cast="bfloat16")

        Args:
            url: Format and place.
            select: As for ``Run.restore``: globs or compiled expressions of keys. Items
                are exported with all leaves only.
            cast: A floating-point dtype for floating-point arrays.
            mapping: As for ``Run.restore``: rules that make another tree; all other
                arguments are of its leaves.
            layout: "v0" or "v1", for Orbax; None: "v0".
            item: Name of the item of the tree, for Orbax.
            max_shard_bytes: Maximum bytes of a safetensors file; None: 5 GB.
            config: Directory whose config, tokenizer and settings of generation are
                copied next to the safetensors; None writes items of JSON, texts and
                bytes there, as ``storectl hub`` names them.
            drop_items: Whether to leave out items that the format cannot hold.
            storage_options: Options of ``fsspec`` for the target.
            progress: Called with the progress.

        Raises:
            InvalidRequestError: An argument is of another type, or belongs to another
                format; or a cast exceeds the range of its dtype.
            PreconditionError: The format would lose a leaf or an item, two leaves have
                one name, or the target exists.
            MismatchError: The rules of the mapping do not fit the checkpoint.
            NotFoundError: No leaf matches ``select``.
            DataLossError: Stored bytes are damaged.
            LimitError: The target is full.
        """
        from storesvc_client._export.elements import ExportRequest

        return self._reader.export(url, collect_arguments(ExportRequest, locals()))


MAX_MANIFEST_BYTES: Final = 2 << 30
"""Maximum size of a manifest: ten times that of 4 million chunks, the server's
limit."""


def read_checkpoint(
    session: Session,
    name: CheckpointName,
    *,
    uid: str = "",
    held_by: Lease | None = None,
    job: Job | None = None,
    spread: bool | None = None,
    deadline: Deadline = NEVER,
    damaged: Mapping[int, str] = MappingProxyType({}),
    with_migrations: bool = False,
) -> CheckpointReader:
    """Reads the manifest of a checkpoint, and returns a reader of its chunks.

    Args:
        session: Connection and data root.
        uid: Uid of exactly the checkpoint to open, even if it is deleted; "" opens the
            current one.
        held_by: A lease on it; None if each read takes its own hold.
        job: Job whose processes read it together; None if this process reads alone.
        spread: As for ``Distributed``.
        deadline: Deadline for the manifest.
        damaged: Newer checkpoints that were skipped because of damage, for reports.
        with_migrations: Whether it is restored as the migrations of its run show it.

    Raises:
        NotFoundError: There is no such checkpoint.
        DataLossError: Its manifest is corrupt.
        PreconditionError: The migrations of its run are.
        UnavailableError: The manifest could not be read before the deadline.
    """
    request = api.ReadManifestRequest(
        name=name.resource, uid=uid, with_migrations=with_migrations
    )
    try:
        first, manifest = _read_manifest(session.connection, name, request, deadline)
    except DataLossError as e:
        if "migrations_of" in e.metadata:  # the checkpoint is whole
            raise PreconditionError(str(e), reason=e.reason, metadata=e.metadata) from e
        raise
    except UnavailableError as e:
        if deadline.left > 0:
            raise
        raise UnavailableError(
            f"{name}: expected its manifest within {deadline.seconds:g} s, but it is "
            f"missing ({e}); check the storage, or pass a longer deadline="
        ) from e
    return CheckpointReader(
        session,
        name.run,
        Checkpoint.from_message(first.checkpoint),
        manifest,
        held_by=held_by,
        job=job,
        spread=spread,
        damaged=damaged,
        migrations=first.migrations,
    )


def _read_manifest(
    connection: Connection,
    name: CheckpointName,
    request: api.ReadManifestRequest,
    deadline: Deadline,
) -> tuple[api.ReadManifestResponse, Manifest]:
    """Returns the first response and the manifest; reads a corrupt manifest a second
    time, because the first read may have been corrupted in transit."""
    for is_last in (False, True):
        first, data = connection.retry(
            "ReadManifest",
            lambda: _manifest_bytes(
                connection, request, timeout=connection.seconds(deadline)
            ),
            deadline=deadline,
        )
        message = first.checkpoint
        try:
            with collector_paused():
                manifest = unpack_manifest(
                    data,
                    size_bytes=message.manifest_bytes,
                    expected=message.manifest_digest,
                )
        except CorruptManifestError as e:
            if is_last:
                raise DataLossError(
                    f"{name.run}@{message.step}: {e}; use another checkpoint",
                    reason="CORRUPT_DATA",
                ) from None
            continue
        if is_last:
            _log.warning(
                "the manifest of %s was corrupted in transit; the second read is "
                "correct",
                name,
            )
        return first, manifest
    raise AssertionError


def _manifest_bytes(
    connection: Connection, request: api.ReadManifestRequest, *, timeout: float
) -> tuple[api.ReadManifestResponse, bytes]:
    stub = connection.checkpoints
    first, parts, size = api.ReadManifestResponse(), [], 0
    with translate_rpc_errors(connection.address):
        stream = stub.ReadManifest(request, timeout=timeout)
        for response in stream:
            message = first.checkpoint
            if response.HasField("checkpoint"):
                first, message = response, response.checkpoint
                if not 0 <= message.manifest_bytes <= MAX_MANIFEST_BYTES:
                    raise DataLossError(
                        f"store {connection.address} announced a manifest of "
                        f"{message.manifest_bytes} bytes, expected 0 to "
                        f"{MAX_MANIFEST_BYTES}; use another checkpoint",
                        reason="CORRUPT_DATA",
                    )
            size += len(response.part)
            if size > message.manifest_bytes:  # keep no more in memory
                stream.cancel()
                break
            parts.append(response.part)
    if size > first.checkpoint.manifest_bytes:
        raise DataLossError(
            f"store {connection.address} sent a manifest of more than the "
            f"{first.checkpoint.manifest_bytes} bytes that it announced; use another "
            "checkpoint",
            reason="CORRUPT_DATA",
        )
    return first, b"".join(parts)
