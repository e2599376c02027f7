"""The saves of a run, which run one after another in the background.

When the processes of a job save together, the next save of a process waits for this
process's part of the previous save, but not for the other processes.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
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

from storesvc.format.names import CheckpointName, RunName, Which
from storesvc_client._rpc.connection import Connection
from storesvc_client._save.handle import Save
from storesvc_client._save.save_threads import SaveThreads
from storesvc_client._session import Session, SessionRun
from storesvc_client._values.arguments import (
    checked_choice,
)
from storesvc_client._values.options import IfBusy, Processes, SnapshotMode
from storesvc_client._values.progress import Meter, OnProgress
from storesvc_client.errors import (
    ConflictError,
    GivenUpError,
    InvalidRequestError,
    UnavailableError,
)

if TYPE_CHECKING:
    from storesvc_client._job.job import Job, JointSave
    from storesvc_client._pytree.save_plan import Plan, Planner
    from storesvc_client._save.slab_queue import SlabQueue
    from storesvc_client._save.snapshot import BaseSums
    from storesvc_client._save.upload import SaveResult, Upload
    from storesvc_client._save.writer import Description, Writer

DEFAULT_LEASE: Final = timedelta(minutes=10)
"""Default lease of an upload, renewed while the save runs."""

_POLL_SECONDS: Final = 0.1
"""Interval at which a save that waits for an earlier one checks whether the server of
that one is unavailable."""

_log = logging.getLogger(__name__)


class RunSaving(SessionRun):
    """Starts the saves of one run and runs them in order."""

    def __init__(self, session: Session, name: RunName) -> None:
        super().__init__(session, name)
        self._lock = Lock()
        self._threads = SaveThreads(name.run)
        self._under_way: deque[Save] = deque()
        """Saves whose errors may not have been observed, oldest first."""
        self._planners: dict[bool, Planner] = {}
        """One planner for saves by this process alone, one for joint saves."""
        self._last_saved: tuple[Plan, SaveResult] | None = None

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        structure: bytes = b"",
        base: Which | None = "latest",
        snapshot: SnapshotMode = "auto",
        if_busy: IfBusy = "wait",
        processes: Processes = "all",
        lease: timedelta = DEFAULT_LEASE,
        progress: OnProgress | None = None,
    ) -> Save:
        """Starts a save and returns once the caller may change the tree again.

        The bytes are copied before this returns, so the caller may donate or overwrite
        every array. The save continues in the background: call ``result()``, or close
        the client, before the process ends.

        Copies to the host use at most ``connect(staging_bytes=)`` of memory: if the
        tree is larger, or other saves use that memory, this waits until enough of it
        is written.

        In a ``jax.distributed`` job every process calls this with the same tree. Each
        process writes a part of the bytes on its devices, every byte once, and the
        checkpoint exists when the last process has finished. Labels, metrics and base
        of process 0 take effect. Values that every process holds itself (NumPy arrays,
        Python numbers, arrays on its own devices) must be equal in all processes, and
        so must replicated arrays: a value that differs from process 0's is rejected
        with its leaf and processes. Replicated arrays of more than 1 MiB are not
        compared, nor are arrays that are replicated over some axes of a mesh and
        sharded over others.

        Args:
            step: The training step, >= 0; can be saved once.
            tree: Any pytree of ``jax.Array``, typed PRNG keys, ``numpy.ndarray``,
                NumPy scalars, and Python ``bool``, ``int``, ``float``, ``complex``.
            metrics: Numbers to filter checkpoints by.
            labels: Texts to filter checkpoints by.
            structure: A document about the tree, stored with it, at most 16 MiB;
                ``storesvc_client.easydel`` stores the definition of a model in it.
            base: A checkpoint of the run, by step, "latest" or tag: chunks equal to
                the base's are neither sent nor stored again. None sends all chunks.
                An interrupted save of the same step is resumed in both cases.
            snapshot: Where the bytes are copied while the caller waits: "host";
                "device", which is faster and needs as much free device memory as the
                tree occupies there; or "auto", the device if its free memory is known
                to suffice. "none" copies only what cannot be read from host memory in
                its stored form, through at most 512 MiB, and returns after the commit:
                for the last save of a process, or if there is no memory for a copy.
            if_busy: What to do while a save of this run is in progress: "wait" for it,
                "queue" this one behind it, or "refuse" this one. If the earlier save
                waits for a server that does not answer, "wait" does not start this
                save: it logs a warning, and the handle raises ``UnavailableError``.
            processes: "all" processes of the job save together, or "this" process
                alone saves what its own devices hold. Ignored outside a job.
            lease: How long the store keeps the upload after the last renewal. A
                process that waits for others stops waiting after one lease without
                progress; saving the same step again resumes the upload.
            progress: Called with a ``Progress`` at most ten times a second, from
                changing threads but never concurrently, and once at the end. If it
                raises, the save continues and commits without it; then the handle
                raises that error.

        Returns:
            A handle; ``result()`` waits for the commit.

        Raises:
            UnsupportedLeafError: The tree holds unsupported values, or paths that
                map to the same key; the message names all of them.
            InvalidRequestError: The step, a metric or a label is invalid, or
                `structure` is not bytes.
            ConflictError: Another save is in progress and ``if_busy`` is "refuse".
            UnavailableError: The coordination service of the job is unavailable.
            StoreError: The previous save failed and its error was not observed; if
                another process of the job failed it, that is only logged.
        """
        return self.begin_save(
            step,
            tree,
            structure=structure,
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
        structure: bytes,
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
        """Starts a save as ``save`` does, after `check` has accepted its plan; errors
        of `check` are raised here, and nothing is saved."""
        from storesvc_client._save.save_arguments import (
            checked_description,
            checked_step,
        )

        checked_choice(f"save to {self.name}: processes=", processes, Processes)
        number = checked_step(self.name, step)
        joint = _joint_save(self.name, number) if processes == "all" else None
        try:
            self._connection.check_open()
            checked_choice(f"save to {self.name}: snapshot=", snapshot, SnapshotMode)
            checked_choice(f"save to {self.name}: if_busy=", if_busy, IfBusy)
            description = checked_description(
                self._name,
                number,
                metrics=metrics,
                labels=labels,
                base=None if base is None else self._checkpoint_name(base),
                lease=lease,
            )
            if not isinstance(structure, bytes):
                raise InvalidRequestError(
                    f"save to {self.name}: expected bytes in structure=, got "
                    f"{type(structure).__name__}"
                )
            meter = Meter("save", str(description), progress)
            with self._lock:
                self._make_way(if_busy, must_end=snapshot == "none")
                planner = self._planner(joint.job if joint else None)
                with meter.phase("plan"):
                    plan, values = planner.plan(tree, structure)
                if check is not None:
                    check(plan)
                save, slab_queue = self._start(
                    _new_writer(self._connection, description, plan, meter, joint),
                    plan,
                    values,
                    snapshot,
                    meter,
                )
                self._under_way.append(save)
        except BaseException as e:
            if joint is not None:  # the other processes are about to begin it
                joint.fail(e)
            if isinstance(e, _StalledError):
                return self._not_begun(number, e)
            raise
        if snapshot == "none":
            try:
                save.wait()
            except BaseException as e:  # Ctrl-C: stop the threads that read the tree
                slab_queue.fail(e)
                save.drop()
                raise
        return save

    def wait(self) -> None:
        """Waits for the saves in the background.

        Raises:
            StoreError: A save failed and its error was not observed.
        """
        with self._lock:
            self._wait()

    def _forget(self) -> list[str]:
        """Marks the unfinished saves as observed, because their connection is closing;
        returns the names of their checkpoints."""
        forgotten = [save for save in self._under_way if not save.done()]
        for save in forgotten:
            save.forget()
        return [f"{self.name}@{save.step}" for save in forgotten]

    def _wait(self) -> None:
        """Waits for all saves; raises the first error that was not observed."""
        try:
            while self._under_way:
                self._end_first()
        finally:
            if not self._under_way:
                self._threads.shutdown()

    def _end_first(self) -> None:
        first = self._under_way[0]
        try:
            first.raise_unseen()
        finally:
            if first.done():
                self._under_way.popleft()

    def _end_done(self) -> None:
        """Removes the oldest saves that are done; raises errors of this process."""
        while self._under_way and self._under_way[0].done():
            try:
                self._end_first()
            except GivenUpError as e:
                # Raising here would fail the save that begins, which the other
                # processes would then raise at their next save, and so on.
                _log.warning("%s", e)

    def _not_begun(self, step: int, stalled: "_StalledError") -> Save:
        """Returns the handle of a save that was not started because the previous one
        waits for its server; the caller must not wait for that, too."""
        error = UnavailableError(
            f"save of {self.name}@{step} was not started: the save of step "
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
                        "still in progress; wait for it, or use if_busy='queue'"
                    )
            case "wait":
                for save in writing:
                    while not save.wait_written(_POLL_SECONDS):
                        trouble = self._connection.waits.trouble
                        if trouble and not must_end:
                            raise _StalledError(save.step, trouble)
                self._end_done()
                if not self._under_way:
                    self._threads.shutdown()
            case "queue":
                pass
            case _:
                assert_never(if_busy)

    def _planner(self, job: "Job | None") -> "Planner":
        """Returns the planner of joint saves, or of saves by this process alone."""
        from storesvc_client._pytree.save_plan import Planner

        return self._planners.setdefault(job is None, Planner(job))

    def _start(
        self,
        writer: "Writer",
        plan: "Plan",
        values: list[Any],
        mode: SnapshotMode,
        meter: Meter,
    ) -> "tuple[Save, SlabQueue]":
        """Starts a save in the background and takes its snapshot."""
        from storesvc_client._chunks.staging_pool import STREAM_BYTES, StagingPool
        from storesvc_client._pytree.device_copies import copied_on_device
        from storesvc_client._pytree.tree_source import TreeSource
        from storesvc_client._save.chunk_streams import STREAMS
        from storesvc_client._save.slab_queue import SlabQueue
        from storesvc_client._save.snapshot import Snapshot
        from storesvc_client._save.upload import Upload

        is_lent = mode == "none"
        staging = self._session.staging
        if is_lent:  # a small pool for what must be copied even so
            staging = StagingPool(min(staging.budget_bytes, STREAMS * STREAM_BYTES))
        slab_queue = SlabQueue(staging, is_open=is_lent)
        upload = Upload(self._session, writer, plan, slab_queue, meter)
        known, known_base = self._known(writer.described, plan, upload)
        with meter.phase("snapshot"):
            copies = copied_on_device(values, mode)
        source = TreeSource(plan, values if copies is None else copies)
        snapshot = Snapshot(
            source, plan.slabs, slab_queue, known, meter, is_lent=is_lent
        )
        if writer.writer_count > 1:  # computed before the caller may change the tree
            writer.leaf_digests = self._threads.copy(source.leaf_digests)
        save = self._submit(upload, writer, plan, known_base, meter)
        # Snapshots run one after another: two that share the staging memory could
        # each wait for memory that only the other's writes would free.
        copying = self._threads.copy(snapshot.take)
        if copies is None:
            try:
                copying.result()
            except BaseException as e:  # Ctrl-C: the caller may change the tree now
                slab_queue.fail(e)
                raise
        return save, slab_queue

    def _submit(
        self, upload: "Upload", writer: "Writer", plan: "Plan", base: str, meter: Meter
    ) -> Save:
        """Queues the writing and the commit of a save behind earlier saves. A joint
        save commits in a separate thread, where it waits for the other processes."""

        def write() -> None:
            self._last_saved = None  # outdated if this save fails
            upload.write(base)

        step = writer.described.step
        if writer.writer_count == 1:
            commit = partial(self._commit, write, upload, plan, meter)
            return Save(step, self._threads.write(commit))
        written = self._threads.write(write)
        commit = partial(self._commit, written.result, upload, plan, meter)
        return Save(step, self._threads.wait(commit), written)

    def _commit(
        self,
        await_written: Callable[[], None],
        upload: "Upload",
        plan: "Plan",
        meter: Meter,
    ) -> "SaveResult":
        """Commits a save once it is written."""
        with meter, upload.named():
            await_written()
            saved = upload.commit()
            self._last_saved = plan, saved
        return saved

    def _known(
        self, description: "Description", plan: "Plan", upload: "Upload"
    ) -> "tuple[BaseSums | None, str]":
        """Returns the checksums of the last save that may still apply to this tree, and
        the name of its checkpoint."""
        from storesvc_client._save.snapshot import BaseSums

        last = self._last_saved  # a save that begins in the meantime clears it
        if last is None or description.base is None:
            return None, ""
        last_plan, saved = last
        step = saved.checkpoint.step
        if description.base.which not in ("latest", step):
            return None, ""
        # the outputs of a step may be sharded differently from its inputs
        if last_plan is not plan and not last_plan.tree.is_cut_as(plan.tree):
            return None, ""
        known = BaseSums(
            sums=saved.sums,
            claimable=partial(upload.claimable, saved.sums),
            ask=upload.ask,
        )
        return known, CheckpointName(self._name, step).resource


class _StalledError(Exception):
    """The previous save waits for its server; the message is the server's problem."""

    def __init__(self, step: int, trouble: str) -> None:
        super().__init__(trouble)
        self.step = step
        """Step of the previous save."""


def _joint_save(run: str, step: int) -> "JointSave | None":
    """Returns the joint save of a job's processes; None outside a job."""
    from storesvc_client._job.job import JointSave
    from storesvc_client._pytree.jax_job import job_of_process

    job = job_of_process()
    return None if job is None else JointSave(job, run, step)


def _new_writer(
    connection: Connection,
    description: "Description",
    plan: "Plan",
    meter: Meter,
    joint: "JointSave | None",
) -> "Writer":
    """Returns this process's writer in a save."""
    from storesvc_client._save.joint_writer import JointWriter
    from storesvc_client._save.writer import Writer

    if joint is None:
        return Writer(connection, description, plan.tree, meter)
    return JointWriter(connection, description, plan.tree, meter, joint)
