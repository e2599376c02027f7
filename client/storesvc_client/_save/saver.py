"""The saves of a run, which run one after another in the background.

When the processes of a job save together, the next save of a process waits for this
process's part of the previous save, but not for the other processes.

A save has two handles: ``Save`` for callers, ``PendingSave`` inside.
"""

import logging
import operator
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex, assert_never

from storesvc.format.names import MAX_STEP, CheckpointName, RunName
from storesvc.storage.threads import Threads
from storesvc_client._rpc.connection import Connection, RunStub
from storesvc_client._rpc.process_exit import await_at_exit, check_not_over, forget
from storesvc_client._rpc.retry import clear_variables, trim
from storesvc_client._session import Session
from storesvc_client._telemetry.events import Unfinished
from storesvc_client._telemetry.progress import Meter
from storesvc_client._telemetry.reports import Rehearsal, SaveReport
from storesvc_client._values.arguments import DurationLike, seconds_or_none
from storesvc_client._values.models import Checkpoint
from storesvc_client._values.options import (
    IfBusy,
    SaveRequest,
    SnapshotMode,
    checked_distributed,
)
from storesvc_client.errors import (
    ConflictError,
    InvalidRequestError,
    PeerFailedError,
    StoreError,
    UnavailableError,
)

if TYPE_CHECKING:
    from storesvc_client._items.values import PlannedItem
    from storesvc_client._job.job import Departures, JointSave
    from storesvc_client._pytree.save_plan import Plan, Planner
    from storesvc_client._save.items import ItemExchange
    from storesvc_client._save.snapshot import BaseSums, SlabQueue
    from storesvc_client._save.upload import SaveResult, Upload
    from storesvc_client._save.writers import Description, Writer

_log = logging.getLogger("storesvc_client")


class PendingSave:
    """A save that was started; records whether its error has been raised."""

    def __init__(
        self,
        checkpoint: str,
        step: int,
        future: "Future[SaveResult]",
        written: "Future[None] | None" = None,
    ) -> None:
        """Creates the handle of a save, for which the exit of the interpreter waits;
        `written` is done when this process has written its part, and None if that is
        the whole save."""
        self.name = f"the save of {checkpoint}"
        self.step = step
        self._future = future
        self._written: Future[Any] = written or future
        self._observed = False
        await_at_exit(future, self.name)

    @classmethod
    def failed(cls, checkpoint: str, step: int, error: Exception) -> Self:
        """Returns the handle of a save that was not started because of an error, which
        was logged."""
        future: Future[SaveResult] = Future()
        future.set_exception(error)
        made = cls(checkpoint, step, future)
        made.ignore_error()
        return made

    @property
    def is_done(self) -> bool:
        """True once the save has succeeded or failed."""
        return self._future.done()

    @property
    def is_written(self) -> bool:
        """True once the part of this process has succeeded or failed."""
        return self._written.done()

    def result(self, seconds: float | None = None) -> "SaveResult":
        """Waits for the save, without limit if `seconds` is None, and returns its
        result.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running; it continues.
        """
        try:
            return self._future.result(seconds)
        except BaseException as e:
            # an interrupted or timed-out wait has not observed the save's error
            if self._future.done():
                self.ignore_error()
            trim(e)
            raise

    def error(self, seconds: float | None) -> BaseException | None:
        """Waits for the save, without limit if `seconds` is None, and returns its
        error, or None; marks it as observed.

        Raises:
            TimeoutError: The save is still running; it continues.
        """
        found = self._future.exception(seconds)
        self.ignore_error()
        if found is not None:
            trim(found)  # the caller may raise it
        return found

    def wait(self) -> None:
        """Waits for the end of the save; raises nothing."""
        wait([self._future])

    def wait_written(self, seconds: float) -> bool:
        """Waits until this process has finished its part, with or without an error;
        returns False after `seconds`."""
        return bool(wait([self._written], seconds).done)

    def ignore_error(self) -> None:
        """Marks the error as observed: neither later saves nor the exit raise it."""
        self.leave_error()
        forget(self._future)

    def leave_error(self) -> None:
        """Leaves the error to the caller, and to the exit if it does not ask for it."""
        self._observed = True

    def drop(self) -> None:
        """Marks the error as observed and waits for the end of the save."""
        self.ignore_error()
        self.wait()

    def raise_unseen(self) -> None:
        """Waits for the end of the save and raises its error, unless it was
        observed."""
        self.wait()
        if not self._observed:
            self.result()


class Save:
    """A save in the background; returned by ``Run.save``. Threads may share it.

    >>> save = run.save(100, state)
    >>> save.result().step  # waits for the commit
    100
    """

    def __init__(self, pending: PendingSave) -> None:
        self.step = pending.step
        """Step of the checkpoint."""
        self.rehearsal: Future[Rehearsal] | None = None
        """Result of the restore rehearsal that ``easydel.save_state`` and
        ``save_model`` start; None if this save is not rehearsed."""
        self._pending = pending

    def __repr__(self) -> str:
        return f"<Save of step {self.step}, {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        """Returns whether the save has succeeded or failed; does not wait."""
        return self._pending.is_done

    def result(self, timeout: DurationLike | None = None) -> Checkpoint:
        """Waits for the commit, and returns the committed checkpoint.

        Args:
            timeout: How long to wait, a ``timedelta`` or seconds; None has no limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running; it continues.
        """
        return self._result(timeout).checkpoint

    def report(self, timeout: DurationLike | None = None) -> SaveReport:
        """Waits for the commit, and returns bytes sent, bytes reused and timings.

        Args:
            timeout: How long to wait, a ``timedelta`` or seconds; None has no limit.

        Raises:
            StoreError: The save failed.
            TimeoutError: The save is still running; it continues.
        """
        return self._result(timeout).report

    def exception(self, timeout: DurationLike | None = None) -> BaseException | None:
        """Waits for the end of the save, and returns its error; None if it succeeded.

        The error then counts as seen: the next save and ``Client.close`` do not raise
        it again.

        Args:
            timeout: How long to wait, a ``timedelta`` or seconds; None has no limit.

        Returns:
            A ``StoreError``, the exception of a ``progress=`` callback, or None.

        Raises:
            TimeoutError: The save is still running; it continues.
        """
        return self._pending.error(seconds_or_none("timeout= of a save", timeout))

    def _result(self, timeout: DurationLike | None) -> "SaveResult":
        return self._pending.result(seconds_or_none("timeout= of a save", timeout))


def checked_step(run: str, step: SupportsIndex) -> int:
    """Returns the step of a save as an int."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise InvalidRequestError(
            f"save to {run}: expected a step in [0, 2^63 - 1], got {step!r}"
        )
    return number


_MAX_WAITING: Final = 32
"""Joint saves that wait for other processes at a time."""

_POLL_SECONDS: Final = 0.1
"""Interval at which a save that waits for an earlier one checks whether the server of
that one is unavailable."""


class RunSaver:
    """Starts the saves of one run and runs them in order.

    All ``Run`` objects of a client for that run share it.
    """

    def __init__(self, session: Session, name: RunName) -> None:
        self.name = str(name)
        """``namespace/run``."""
        self._name = name
        self._session = session
        self._connection = session.connection
        self._stub = RunStub(session.connection, name)
        self._lock = Lock()
        # Each for one save after another; joint saves wait for the other processes.
        self._copying = Threads(1, f"storesvc-copy-{name.run}")
        self._writing = Threads(1, f"storesvc-save-{name.run}")
        self._awaiting = Threads(_MAX_WAITING, "storesvc-await")
        self._under_way: deque[PendingSave] = deque()
        """Saves whose errors may not have been observed, oldest first."""
        self._planners: dict[bool, Planner] = {}
        self._last_saved: tuple[Plan, SaveResult] | None = None
        self._reused: frozenset[str] = frozenset()
        """Keys of the leaves of which the last save reused chunks."""

    def begin(
        self,
        request: SaveRequest,
        check: "Callable[[Plan], None] | None" = None,
        loop: "Departures | None" = None,
    ) -> PendingSave:
        """Starts a save, and returns once the caller may change the tree again.

        Errors of ``check``, which is called with the plan of the save before anything
        is sent, are raised here, and nothing is saved. Once another process has left
        the training loop of ``loop`` before it, the save fails.
        """
        place = f"save to {self.name}"
        checked_distributed(place, request.distributed)
        number = checked_step(self.name, request.step)
        takes_all = request.distributed.processes == "all"
        joint = _joint_save(self.name, number, loop) if takes_all else None
        try:
            check_not_over(f"save of {self.name}@{number}")
            self._connection.check_open()
            request.check(place)
            started = self._plan_and_start(request, number, joint, check)
        except BaseException as e:
            if joint is not None:  # the other processes are about to begin it
                joint.fail(e)
            if isinstance(e, _StalledError):
                return self._not_begun(number, e)
            if isinstance(e, _OthersError):
                _log.warning("%s", e.error)
                assert joint is not None
                self._send_unbegun(number, e.error, process=joint.job.index)
                return PendingSave.failed(f"{self.name}@{number}", number, e.error)
            raise
        save, slab_queue, meter = started
        if request.snapshot == "none":
            try:
                save.wait()
            except BaseException as e:  # Ctrl-C: stop the threads that read the tree
                slab_queue.fail(e)
                save.drop()
                raise
        meter.release()
        return save

    def _plan_and_start(
        self,
        request: SaveRequest,
        step: int,
        joint: "JointSave | None",
        check: "Callable[[Plan], None] | None",
    ) -> "tuple[PendingSave, SlabQueue, Meter]":
        """Waits for its turn, plans a save and starts it; see ``begin``."""
        from storesvc_client._pytree.save_plan import Planner, with_items
        from storesvc_client._save.items import ItemExchange, checked_items, items_alone
        from storesvc_client._save.writers import checked_description

        snapshot, if_busy, base = request.snapshot, request.if_busy, request.base
        assert snapshot is not None  # as checked
        assert if_busy is not None
        description = checked_description(
            self._name,
            step,
            metrics=request.metrics,
            labels=request.labels,
            base=None if base is None else self._stub.checkpoint_name(base),
            lease=request.distributed.lease,
        )
        own_items = checked_items(f"save to {self.name}", request.items)
        exchange = None
        if joint is not None:
            exchange = ItemExchange(joint, f"save of {description}", own_items)
        meter = Meter("save", str(description), request.progress)
        with self._lock:
            with meter.phase("await previous"):
                self._make_way(if_busy, must_end=snapshot == "none")
            # one for saves by this process alone, and one for joint saves
            planner = self._planners.setdefault(
                joint is None, Planner(joint.job if joint else None)
            )
            with meter.phase("plan"):
                plan, values = planner.plan(request.tree, request.document)
            if check is not None:
                check(plan)
            rows = items_alone(own_items)
            if exchange is not None:
                rows = _agree_items(exchange, description, meter)
            whole, values = with_items(plan, values, rows)
            writer = _new_writer(self._connection, description, whole, meter, joint)
            save, slab_queue = self._start(writer, plan, whole, values, snapshot, meter)
            self._under_way.append(save)
        return save, slab_queue, meter

    def wait(self) -> None:
        """Waits for the saves in the background.

        Raises:
            StoreError: A save failed and its error was not observed; the first one.
        """
        with self._lock:
            try:
                while self._under_way:
                    self._end_first()
            finally:
                if not self._under_way:
                    self._end_threads()

    def forget(self) -> list[str]:
        """Marks the unfinished saves as observed, because their connection is closing.

        Returns:
            What they are, such as "the save of namespace/run@step".
        """
        forgotten = [save for save in self._under_way if not save.is_done]
        for save in forgotten:
            save.ignore_error()
        return [save.name for save in forgotten]

    def _end_threads(self) -> None:
        """Waits for the threads, as a failed save may still be ending."""
        for threads in (self._awaiting, self._writing, self._copying):
            threads.shutdown()

    def _end_first(self) -> None:
        first = self._under_way[0]
        try:
            first.raise_unseen()
        finally:
            if first.is_done:
                self._under_way.popleft()

    def _end_done(self) -> None:
        """Removes the oldest saves that are done; raises errors of this process."""
        while self._under_way and self._under_way[0].is_done:
            try:
                self._end_first()
            except PeerFailedError as e:
                # Raising here would fail the save that begins, which the other
                # processes would then raise at their next save, and so on.
                _log.warning("%s", e)

    def _not_begun(self, step: int, stalled: "_StalledError") -> PendingSave:
        """Returns the handle of a save that was not started because the previous one
        waits for its server; the caller must not wait for that, too."""
        error = UnavailableError(
            f"save of {self.name}@{step} was not started: the save of step "
            f"{stalled.step} before it waits for its server ({stalled}); save a later "
            "step, or use if_busy='queue', which keeps a copy in memory until then"
        )
        _log.warning("%s", error)
        self._send_unbegun(step, error, process=0)
        return PendingSave.failed(f"{self.name}@{step}", step, error)

    def _send_unbegun(self, step: int, error: StoreError, *, process: int) -> None:
        """Sends the start and the failure of a save whose handle has its error."""
        telemetry = self._session.telemetry
        telemetry.save_began()
        failed = Unfinished(
            run=self.name,
            step=step,
            start_time=datetime.now(UTC),
            seconds=0.0,
            process=process,
        )
        telemetry.save_failed(error, failed)

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
                    self._end_threads()
            case "queue":
                pass
            case _:
                assert_never(if_busy)

    def _start(
        self,
        writer: "Writer",
        plan: "Plan",
        whole: "Plan",
        values: list[Any],
        mode: SnapshotMode,
        meter: Meter,
    ) -> "tuple[PendingSave, SlabQueue]":
        """Starts a save and takes its snapshot; `whole` is `plan` with the items."""
        from storesvc_client._chunks.memory import STREAM_BYTES, StagingPool
        from storesvc_client._pytree.save_plan import TreeSource, copy_on_devices
        from storesvc_client._save.chunk_streams import STREAMS
        from storesvc_client._save.small import SmallUpload, is_small
        from storesvc_client._save.snapshot import SlabQueue, Snapshot
        from storesvc_client._save.upload import Upload

        is_lent = mode == "none"
        staging = self._session.staging
        if is_lent:  # a small pool for what must be copied even so
            staging = StagingPool(min(staging.budget_bytes, STREAMS * STREAM_BYTES))
        with meter.phase("snapshot"):
            copies = copy_on_devices(values, mode)
        is_awaited = not is_lent and copies is None  # by the caller
        slab_queue = SlabQueue(staging, is_open=not is_awaited)
        source = TreeSource(whole, values if copies is None else copies)
        if is_small(self._connection, writer, whole):
            small = SmallUpload(self._session, writer, whole, slab_queue, meter, source)
            try:
                if copies is None:
                    small.take()
            except BaseException:
                self._submit(small, writer, plan, "", meter).ignore_error()
                raise
            return self._submit(small, writer, plan, "", meter), slab_queue
        upload = Upload(self._session, writer, whole, slab_queue, meter)
        known, known_base = self._known(writer.described, plan, upload)
        snapshot = Snapshot(
            source,
            whole.slabs,
            slab_queue,
            known,
            meter,
            probes=upload.probes,
            is_lent=is_lent,
        )
        if writer.writer_count > 1:  # computed before the caller may change the tree
            writer.leaf_digests = self._copying.submit(source.leaf_digests)
        save = None
        try:
            save = self._submit(upload, writer, plan, known_base, meter)
            # Snapshots run one after another: two that share the staging memory could
            # each wait for memory that only the other's writes would free.
            copying = self._copying.submit(snapshot.take)
            if copies is None:
                copying.result()
        except BaseException as e:  # Ctrl-C: the caller may change the tree now
            slab_queue.fail(e)  # or a save that was queued would wait for its copies
            if save is not None:
                save.ignore_error()  # the caller gets it here
            raise
        return save, slab_queue

    def _submit(
        self, upload: "Upload", writer: "Writer", plan: "Plan", base: str, meter: Meter
    ) -> PendingSave:
        """Queues the writing and the commit of a save behind earlier saves. A joint
        save commits in a separate thread, where it waits for the other processes."""

        def write() -> None:
            self._last_saved = None  # outdated if this save fails
            upload.write(base, self._reused)

        name, step = str(writer.described), writer.described.step

        def measured() -> Unfinished:
            return Unfinished(
                run=self.name,
                step=step,
                start_time=meter.start_time,
                seconds=meter.seconds,
                timeline=meter.timeline,
                process=writer.index,
                upload=upload.id,
            )

        telemetry = self._session.telemetry
        telemetry.save_began()
        try:
            if writer.writer_count == 1:
                commit = partial(self._commit, write, upload, plan, meter, measured)
                return PendingSave(name, step, self._writing.submit(commit))
            written = self._writing.submit(write)
            commit = partial(
                self._commit, written.result, upload, plan, meter, measured
            )
            return PendingSave(name, step, self._awaiting.submit(commit), written)
        except BaseException as e:  # the interpreter ends, and starts no thread
            telemetry.save_failed(e, measured())
            raise

    def _commit(
        self,
        await_written: Callable[[], None],
        upload: "Upload",
        plan: "Plan",
        meter: Meter,
        measured: Callable[[], Unfinished],
    ) -> "SaveResult":
        """Commits a save once it is written, and sends its report or its error to
        monitoring."""
        telemetry = self._session.telemetry
        try:
            with meter, upload.named():
                await_written()
                saved = upload.commit()
                self._last_saved, self._reused = (plan, saved), saved.reused
        except BaseException as e:
            telemetry.save_failed(e, measured())
            clear_variables(e)
            raise
        telemetry.saved(saved.report, saved.checkpoint, process=measured().process)
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
        if description.base.which not in ("latest", saved.checkpoint.step):
            return None, ""
        # the outputs of a step may be sharded differently from its inputs
        if not (last_plan is plan or last_plan.tree.is_cut_as(plan.tree)):
            return None, ""
        known = BaseSums(
            sums=saved.sums,
            probes=saved.probes,
            count=plan.tree.chunk_count,
            reusable=partial(upload.reusable, saved.sums),
            ask=upload.ask,
        )
        return known, CheckpointName(self._name, saved.checkpoint.step).resource


class _StalledError(Exception):
    """The previous save waits for its server; its text says why."""

    def __init__(self, step: int, trouble: str) -> None:
        super().__init__(trouble)
        self.step = step
        """Step of the previous save."""


class _OthersError(Exception):
    """Another process of the job failed, or does not save the step, so that the items
    of all are not known."""

    def __init__(self, error: StoreError) -> None:
        super().__init__(str(error))
        self.error = error
        """Error that the handle of the save raises."""


def _agree_items(
    exchange: "ItemExchange", description: "Description", meter: Meter
) -> "list[PlannedItem]":
    """Returns the items of all processes.

    Raises:
        _OthersError: They are not known, because of another process.
        InvalidRequestError: The processes pass items that do not go together.
    """
    try:
        with meter.phase("await others"):
            return exchange.agree_items(seconds=description.lease.total_seconds())
    except (PeerFailedError, UnavailableError) as e:
        raise _OthersError(e) from e


def _joint_save(run: str, step: int, loop: "Departures | None") -> "JointSave | None":
    """Returns the joint save of a job's processes; None outside a job."""
    from storesvc_client._job.job import JointSave
    from storesvc_client._pytree.jax_job import find_job

    job = find_job()
    return None if job is None else JointSave(job, run, step, loop)


def _new_writer(
    connection: Connection,
    description: "Description",
    plan: "Plan",
    meter: Meter,
    joint: "JointSave | None",
) -> "Writer":
    from storesvc_client._save.writers import JointWriter, Writer

    if joint is None:
        return Writer(connection, description, plan.tree, meter)
    return JointWriter(connection, description, plan.tree, meter, joint)
