"""The saves of a run: one after another, in the background.

Where several processes of a job save together, the next save of a process waits for its
own part of the one before, and not for the other processes.
"""

import logging
import operator
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    SupportsFloat,
    SupportsIndex,
    assert_never,
)

from storesvc.format.names import MAX_STEP, CheckpointName, RunName, Which
from storesvc_client._rpc.connection import Connection
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._save.handle import PendingSave
from storesvc_client._session import Session
from storesvc_client._values.arguments import (
    checked_choice,
    checked_labels,
    checked_metrics,
)
from storesvc_client._values.durations import as_timedelta
from storesvc_client._values.options import (
    ALL_PROCESSES,
    Distributed,
    IfBusy,
    SnapshotMode,
    checked_distributed,
)
from storesvc_client._values.progress import Meter, ProgressCallback
from storesvc_client.errors import (
    ConflictError,
    InvalidRequestError,
    PeerFailedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from storesvc_client._job.job import Job, JointSave
    from storesvc_client._pytree.save_plan import Plan, Planner
    from storesvc_client._save.slab_queue import Outbox
    from storesvc_client._save.snapshot import Known
    from storesvc_client._save.upload import Saved, Upload
    from storesvc_client._save.writer import Description, Part

_LOOK_SECONDS: Final = 0.1
"""How often, while one save waits for another, it is looked whether that one waits for
its server."""

_AWAITED: Final = 32
"""Saves that wait for other processes, at a time."""

_log = logging.getLogger(__name__)


class RunSaver:
    """The saves of one run; all ``Run`` objects of a client for that run share it."""

    def __init__(self, session: Session, name: RunName) -> None:
        self.name = str(name)
        """``namespace/run``."""
        self._name = name
        self._session = session
        self._connection = session.connection
        self._stub = RunStub(session.connection, name)
        self._lock = Lock()
        self._saver: ThreadPoolExecutor | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._waiter: ThreadPoolExecutor | None = None
        self._under_way: deque[PendingSave] = deque()
        """Saves whose errors may not have been raised yet, the oldest first."""
        self._planners: dict[bool, Planner] = {}
        """Planners of saves by this process alone, and by all processes."""
        self._last_saved: tuple[Plan, Saved] | None = None

    def begin(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        check: "Callable[[Plan], None] | None" = None,
        document: bytes = b"",
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        base: Which | None = "latest",
        snapshot: SnapshotMode = "auto",
        if_busy: IfBusy = "wait",
        distributed: Distributed = ALL_PROCESSES,
        progress: ProgressCallback | None = None,
    ) -> PendingSave:
        """Starts a save, with the options of ``Run.save``.

        ``check`` is called with the plan of the save before anything is sent; what it
        raises is raised here, and nothing is saved.
        """
        checked_distributed(f"save to {self.name}", distributed)
        number = self._checked_step(step)
        takes_all = distributed.processes == "all"
        joint = _joint_save(self.name, number) if takes_all else None
        try:
            self._connection.check_open()
            checked_choice(f"save to {self.name}: snapshot=", snapshot, SnapshotMode)
            checked_choice(f"save to {self.name}: if_busy=", if_busy, IfBusy)
            lease = as_timedelta("Distributed: lease=", distributed.lease)
            description = self._describe(number, metrics, labels, base, lease)
            if not isinstance(document, bytes):
                raise InvalidRequestError(
                    f"save to {self.name}: expected bytes in document=, got "
                    f"{type(document).__name__}"
                )
            meter = Meter("save", str(description), progress)
            with self._lock:
                self._make_way(if_busy, must_end=snapshot == "none")
                planner = self._planner(joint.job if joint else None)
                with meter.phase("plan"):
                    plan, values = planner.plan(tree, document)
                if check is not None:
                    check(plan)
                save, outbox = self._start(
                    _part(self._connection, description, plan, meter, joint),
                    plan,
                    values,
                    snapshot,
                    meter,
                )
                self._under_way.append(save)
        except BaseException as e:
            if joint is not None:  # which the other processes are about to begin
                joint.fail(e)
            if isinstance(e, _StalledError):
                return self._not_begun(number, e)
            raise
        if snapshot == "none":
            try:
                save.wait()
            except BaseException as e:  # Ctrl-C: what reads the tree must stop first
                outbox.fail(e)
                save.drop()
                raise
        return save

    def wait(self) -> None:
        """Waits for the saves in the background.

        Raises:
            StoreError: A save failed, and its error was not raised yet.
        """
        with self._lock:
            self._wait()

    def forget(self) -> list[str]:
        """Ignores the errors of the running saves, because their connection is closed.

        Returns:
            The names of their checkpoints, ``namespace/run@step``.
        """
        forgotten = [save for save in self._under_way if not save.is_done]
        for save in forgotten:
            save.ignore_error()
        return [f"{self.name}@{save.step}" for save in forgotten]

    def _wait(self) -> None:
        """Waits for all saves; raises the first error that nobody has seen."""
        try:
            while self._under_way:
                self._end_first()
        finally:
            if not self._under_way:
                self._end_threads()

    def _end_threads(self) -> None:
        """Ends the threads of saves; the next one starts its own."""
        for threads in (self._saver, self._copier, self._waiter):
            if threads is not None:
                threads.shutdown()  # a save that failed at once may be ending still
        self._saver = self._copier = self._waiter = None

    def _end_first(self) -> None:
        first = self._under_way[0]
        try:
            first.raise_unseen()
        finally:
            if first.is_done:
                self._under_way.popleft()

    def _end_done(self) -> None:
        """Ends with the first saves that are done already; raises what this process
        failed with."""
        while self._under_way and self._under_way[0].is_done:
            try:
                self._end_first()
            except PeerFailedError as e:
                # Raised here, it would fail the save that begins, for the others, who
                # would raise that at their next one, and so on for ever.
                _log.warning("%s", e)

    def _not_begun(self, step: int, stalled: "_StalledError") -> PendingSave:
        """The handle of a save for which the one before made no way: its owner, who
        decides what to do, must not wait for a server."""
        error = UnavailableError(
            f"save of {self.name}@{step} was not begun, as that of step "
            f"{stalled.step} before it waits for its server ({stalled}); save a later "
            "step, or use if_busy='queue', which keeps a copy in memory until then"
        )
        _log.warning("%s", error)
        return PendingSave.failed(step, error)

    def _make_way(self, if_busy: IfBusy, *, must_end: bool) -> None:
        self._end_done()
        writing = [save for save in self._under_way if not save.is_written]
        match if_busy:
            case "refuse":
                if writing:
                    raise ConflictError(
                        f"save to {self.name}: the save of step {writing[-1].step} is "
                        "still under way; wait for it, or queue this one"
                    )
            case "wait":
                for save in writing:
                    while not save.wait_written(_LOOK_SECONDS):
                        trouble = self._connection.waits.trouble
                        if trouble and not must_end:
                            raise _StalledError(save.step, trouble)
                self._end_done()
                if not self._under_way:
                    self._end_threads()
            case "queue":
                pass
            case _:
                assert_never(if_busy)

    def _planner(self, job: "Job | None") -> "Planner":
        """The planner of saves by this process alone, or by all of a job."""
        from storesvc_client._pytree.save_plan import Planner

        return self._planners.setdefault(job is None, Planner(job))

    def _start(
        self,
        part: "Part",
        plan: "Plan",
        values: list[Any],
        mode: SnapshotMode,
        meter: Meter,
    ) -> "tuple[PendingSave, Outbox]":
        """Begins a save in the background, and takes the snapshot for it."""
        from storesvc_client._chunks.staging_pool import STREAM_BYTES, Staging
        from storesvc_client._pytree.device_copies import copied_on_device
        from storesvc_client._pytree.tree_source import TreeSource
        from storesvc_client._save.slab_queue import Outbox
        from storesvc_client._save.snapshot import Snapshot
        from storesvc_client._save.upload import STREAMS, Upload

        is_lent = mode == "none"
        staging = self._session.staging
        if is_lent:  # what must be copied all the same waits for what is written
            staging = Staging(min(staging.budget_bytes, STREAMS * STREAM_BYTES))
        outbox = Outbox(staging, is_open=is_lent)
        upload = Upload(self._session, part, plan, outbox, meter)
        known, known_base = self._known(part.described, plan, upload)
        with meter.phase("snapshot"):
            copies = copied_on_device(values, mode)
        source = TreeSource(plan, values if copies is None else copies)
        snapshot = Snapshot(source, plan.slabs, outbox, known, meter, is_lent=is_lent)
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, f"storesvc-copy-{self._name.run}")
        if part.writer_count > 1:  # before the caller may change the tree, too
            part.leaf_digests = self._copier.submit(source.leaf_digests)
        save = self._submit(upload, part, plan, known_base, meter)
        # One after another: one that takes memory before a save is written that waits
        # for some would wait for ever.
        copying = self._copier.submit(snapshot.take)
        if copies is None:
            try:
                copying.result()
            except BaseException as e:  # Ctrl-C: the caller may change the tree now
                outbox.fail(e)
                raise
        return save, outbox

    def _submit(
        self, upload: "Upload", part: "Part", plan: "Plan", base: str, meter: Meter
    ) -> PendingSave:
        """Has a save written behind those before it, and committed; one that waits for
        other processes does so aside."""
        if self._saver is None:
            self._saver = ThreadPoolExecutor(1, f"storesvc-save-{self._name.run}")
        if part.writer_count == 1:
            future = self._saver.submit(self._saved, upload, plan, base, meter)
            return PendingSave(part.described.step, future)
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(_AWAITED, "storesvc-await")
        written = self._saver.submit(self._written, upload, base)
        future = self._waiter.submit(self._awaited, written, upload, plan, meter)
        return PendingSave(part.described.step, future, written)

    def _saved(
        self, upload: "Upload", plan: "Plan", base: str, meter: Meter
    ) -> "Saved":
        with meter, upload.named():
            self._written(upload, base)
            saved = upload.commit()
            self._last_saved = plan, saved
        return saved

    def _written(self, upload: "Upload", base: str) -> None:
        self._last_saved = None  # where this fails, what it told is of no use
        upload.write(base)

    def _awaited(
        self, written: "Future[None]", upload: "Upload", plan: "Plan", meter: Meter
    ) -> "Saved":
        with meter, upload.named():
            written.result()
            saved = upload.commit()
            self._last_saved = plan, saved
        return saved

    def _known(
        self, description: "Description", plan: "Plan", upload: "Upload"
    ) -> "tuple[Known | None, str]":
        """What the last save leaves to be known of the chunks of this one, and the
        name of the checkpoint that it made."""
        from storesvc_client._save.snapshot import Known

        last = self._last_saved  # a save that begins meanwhile empties it
        if last is None or description.base is None:
            return None, ""
        last_plan, saved = last
        step = saved.checkpoint.step
        if description.base.which not in ("latest", step):
            return None, ""
        # arrays that came out of a step may lie otherwise than those that went in
        if last_plan is not plan and not last_plan.tree.is_cut_as(plan.tree):
            return None, ""
        known = Known(
            sums=saved.sums,
            claimable=partial(upload.claimable, saved.sums),
            ask=upload.ask,
        )
        return known, CheckpointName(self._name, step).resource

    def _checked_step(self, step: SupportsIndex) -> int:
        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= MAX_STEP:
            raise InvalidRequestError(
                f"save to {self.name}: expected a step of 0 to 2^63 - 1, got {step!r}"
            )
        return number

    def _describe(
        self,
        step: int,
        metrics: Mapping[str, SupportsFloat] | None,
        labels: Mapping[str, str] | None,
        base: Which | None,
        lease: timedelta,
    ) -> "Description":
        from storesvc_client._save.writer import Description

        return Description(
            run=self._name,
            step=step,
            labels=checked_labels(f"save to {self.name}", labels),
            metrics=checked_metrics(f"save to {self.name}", metrics),
            base=None if base is None else self._stub.checkpoint_name(base),
            lease=lease,
        )


class _StalledError(Exception):
    """The save before waits for its server; says how."""

    def __init__(self, step: int, trouble: str) -> None:
        super().__init__(trouble)
        self.step = step
        """Of that save."""


def _joint_save(run: str, step: int) -> "JointSave | None":
    """The save of all processes of a job; None: this process is alone."""
    from storesvc_client._job.job import JointSave
    from storesvc_client._pytree.jax_job import job_of_process

    job = job_of_process()
    return None if job is None else JointSave(job, run, step)


def _part(
    connection: Connection,
    description: "Description",
    plan: "Plan",
    meter: Meter,
    joint: "JointSave | None",
) -> "Part":
    """The part of this process in a save."""
    from storesvc_client._save.joint_writer import JointPart
    from storesvc_client._save.writer import Part

    if joint is None:
        return Part(connection, description, plan.tree, meter)
    return JointPart(connection, description, plan.tree, meter, joint)
