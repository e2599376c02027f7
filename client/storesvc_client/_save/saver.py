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
from storesvc_client._save.handle import Save
from storesvc_client._session import Session, SessionRun
from storesvc_client._values.arguments import (
    checked_choice,
    checked_labels,
    checked_metrics,
)
from storesvc_client._values.durations import checked_length
from storesvc_client._values.options import IfBusy, Processes, SnapshotMode
from storesvc_client._values.progress import Meter, OnProgress
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

DEFAULT_LEASE: Final = timedelta(minutes=10)
"""How long an upload is kept after its last sign of life."""

MAX_LEASE: Final = timedelta(days=30)
"""The longest that the contract allows."""

_LOOK_SECONDS: Final = 0.1
"""How often, while one save waits for another, it is looked whether that one waits for
its server."""

_AWAITED: Final = 32
"""Saves that wait for other processes, at a time."""

_log = logging.getLogger(__name__)


class RunSaving(SessionRun):
    """Saves, and keeps the saves apart."""

    def __init__(self, session: Session, name: RunName) -> None:
        super().__init__(session, name)
        self._lock = Lock()
        self._saver: ThreadPoolExecutor | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._waiter: ThreadPoolExecutor | None = None
        self._under_way: deque[Save] = deque()
        """Saves whose errors may not have been seen, the oldest first."""
        self._planners: dict[bool, Planner] = {}
        """Of saves by this process alone, and by all."""
        self._last_saved: tuple[Plan, Saved] | None = None

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        document: bytes = b"",
        base: Which | None = "latest",
        snapshot: SnapshotMode = "auto",
        if_busy: IfBusy = "wait",
        processes: Processes = "all",
        lease: timedelta = DEFAULT_LEASE,
        progress: OnProgress | None = None,
    ) -> Save:
        """Begins to save a tree, and returns once the tree may change again.

        The bytes are copied before this returns, so the caller may donate or overwrite
        every array. The save goes on in the background: wait for it with ``result()``,
        or close the client, before the process ends.

        To the host they are copied within ``connect(staging_bytes=)``: where the tree
        is larger, or other saves hold that memory, this waits until enough of it is
        written.

        In a ``jax.distributed`` job every process calls this, with the same tree: each
        writes a part of what its devices hold, every byte once, and the checkpoint is
        there when the last one is done. Labels, metrics and base are those of process
        0. What every process holds for itself, as NumPy arrays, Python numbers and
        arrays on its own devices, must be the same in all of them, and so must
        replicated arrays: a value that differs from that of process 0 is refused by
        leaf and processes. Replicated arrays of more than 1 MiB are not compared, nor
        are those that are replicated over some axes of a mesh and sharded over others.

        Args:
            step: The training step, >= 0; written once.
            tree: Any pytree of ``jax.Array``, typed PRNG keys, ``numpy.ndarray``,
                NumPy scalars, and Python ``bool``, ``int``, ``float``, ``complex``.
            metrics: Numbers to find the checkpoint by.
            labels: Texts to find the checkpoint by.
            document: A document about the tree to keep with it, at most 16 MiB;
                ``storesvc_client.easydel`` keeps there what a model was.
            base: A checkpoint of the run, by step, "latest" or tag: chunks that are
                as they were there are neither sent nor stored again. None sends all.
                A save of the same step that was cut off goes on where it stopped
                either way.
            snapshot: Where the bytes are copied to while the caller waits: "host";
                "device", which takes as much of its memory as the tree has there, and
                less time; or "auto": the device where its memory is known to suffice.
                "none" copies nothing that lies on the host as it is stored, the
                rest through 512 MiB at most, and returns once the save has ended: for a
                last save before the process does, or where there is no memory for a
                copy.
            if_busy: What to do while a save of this run is under way: "wait" for it,
                "queue" behind it, or "refuse". While that save waits for a server that
                does not answer, "wait" does not: this one is not begun then, which is
                logged, and its handle raises ``UnavailableError``.
            processes: Whether "all" processes of the job save this, or "this" one does,
                alone, what its own devices hold. Of no matter outside of a job.
            lease: How long a save is kept after its last sign of life: a process that
                waits for others gives up then, and the same step, saved again, goes
                on where this one stopped.
            progress: Called with a ``Progress`` at most ten times a second, from any
                thread but by one at a time, and once at the end. If it raises, the
                save goes on and commits without it; the handle raises that then.

        Returns:
            A handle; ``result()`` waits for the commit.

        Raises:
            UnsupportedLeafError: The tree holds something else, or two paths that
                would share a key; names them all.
            InvalidRequestError: The step, a metric or a label breaks the rules, or
                the document is no bytes.
            ConflictError: A save is under way, and this was to be refused then.
            UnavailableError: The coordination service of the job is.
            StoreError: What the save before failed with, if nobody has seen it; where
                another process of the job failed it, that is only logged.
        """
        return self.begin_save(
            step,
            tree,
            document=document,
            check=None,
            metrics=metrics,
            labels=labels,
            base=base,
            snapshot=snapshot,
            if_busy=if_busy,
            processes=processes,
            lease=lease,
            progress=progress,
        )

    def begin_save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        document: bytes,
        check: "Callable[[Plan], None] | None",
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        base: Which | None = "latest",
        snapshot: SnapshotMode = "auto",
        if_busy: IfBusy = "wait",
        processes: Processes = "all",
        lease: timedelta = DEFAULT_LEASE,
        progress: OnProgress | None = None,
    ) -> Save:
        """Begins a save as ``save`` does, once its plan has passed a check: what that
        raises is raised here, and nothing is saved."""
        checked_choice(f"save to {self.name}: processes=", processes, Processes)
        number = self._checked_step(step)
        joint = _joint_save(self.name, number) if processes == "all" else None
        try:
            self._connection.check_open()
            checked_choice(f"save to {self.name}: snapshot=", snapshot, SnapshotMode)
            checked_choice(f"save to {self.name}: if_busy=", if_busy, IfBusy)
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
        """Waits for a save in the background.

        Raises:
            StoreError: What it failed with, if nobody has seen it.
        """
        with self._lock:
            self._wait()

    def _forget(self) -> list[str]:
        """Forgets the saves that are under way, as their connection ends; returns of
        what checkpoints they are."""
        forgotten = [save for save in self._under_way if not save.done()]
        for save in forgotten:
            save.forget()
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
            if first.done():
                self._under_way.popleft()

    def _end_done(self) -> None:
        """Ends with the first saves that are done already; raises what this process
        failed with."""
        while self._under_way and self._under_way[0].done():
            try:
                self._end_first()
            except PeerFailedError as e:
                # Raised here, it would fail the save that begins, for the others, who
                # would raise that at their next one, and so on for ever.
                _log.warning("%s", e)

    def _not_begun(self, step: int, stalled: "_StalledError") -> Save:
        """The handle of a save for which the one before made no way: its owner, who
        decides what to do, must not wait for a server."""
        error = UnavailableError(
            f"save of {self.name}@{step} was not begun, as that of step "
            f"{stalled.step} before it waits for its server ({stalled}); save a later "
            "step, or use if_busy='queue', which keeps a copy in memory until then"
        )
        _log.warning("%s", error)
        return Save.failed(step, error)

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
    ) -> "tuple[Save, Outbox]":
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
    ) -> Save:
        """Has a save written behind those before it, and committed; one that waits for
        other processes does so aside."""
        if self._saver is None:
            self._saver = ThreadPoolExecutor(1, f"storesvc-save-{self._name.run}")
        if part.writer_count == 1:
            future = self._saver.submit(self._saved, upload, plan, base, meter)
            return Save(part.described.step, future)
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(_AWAITED, "storesvc-await")
        written = self._saver.submit(self._written, upload, base)
        future = self._waiter.submit(self._awaited, written, upload, plan, meter)
        return Save(part.described.step, future, written)

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
            base=None if base is None else self._checkpoint_name(base),
            lease=checked_length(f"save to {self.name}: lease=", lease, most=MAX_LEASE),
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
