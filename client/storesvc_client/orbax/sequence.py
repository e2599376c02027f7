"""The steps of a run as a manager of Orbax sees them: decides, saves, keeps the list.

One save is in the background at a time, and its step is listed, as in Orbax; what reads
that step waits for its commit. The list of steps is read from the server when the
manager is created, after each save, and by ``reload``; the calls between, such as
``should_save`` in every step of a loop, ask no server. An error of a save in the
background is raised once, by the next call that waits for it or saves.

A manager is created with a ``Run``, or with a text of a config. The text, or a path
that has it, is the target of ``connect``, "#", and the name of the run, such as
``/ckpts#prod/llama-8b``; or the target alone, with ``run=``. Programs join more parts
to their directory, which become parts of the name: ``llama-8b/checkpoints/`` is
``llama-8b.checkpoints``.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Self

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from storesvc.storage.threads import Threads
from storesvc_client._api.client import connect
from storesvc_client._api.groups import APPLY_SECONDS
from storesvc_client._api.run import Run
from storesvc_client._job.job import Job, ordinal
from storesvc_client._pytree.jax_job import find_job
from storesvc_client._rpc.process_exit import await_at_exit, forget
from storesvc_client._save.saver import Save
from storesvc_client._telemetry.events import StepLogger
from storesvc_client._values.models import Checkpoint
from storesvc_client._values.options import ALL_PROCESSES
from storesvc_client._values.policies import RetentionPolicy, check_rule, format_policy
from storesvc_client.errors import (
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    StoreError,
    UnavailableError,
)
from storesvc_client.orbax.items import (
    RECORD,
    Part,
    StepPath,
    StepRecord,
    read_record,
)
from storesvc_client.orbax.step_errors import (
    ItemMissingError,
    StepExistsError,
    StepMissingError,
)
from storesvc_client.orbax.trees import has_tree

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint

_LABEL: Final = "orbax/metadata"
"""Label of a run with the metadata that its first manager was created with."""


def timestamps(found: "Checkpoint") -> dict[str, int]:
    """Returns the start and the commit of a save in nanoseconds."""
    return {
        "init_timestamp_nsecs": int(found.create_time.timestamp() * 1e9),
        "commit_timestamp_nsecs": int(found.commit_time.timestamp() * 1e9),
    }


def rank_numbers(place: str, metrics: Any, best: str | None) -> dict[str, float]:
    """Returns the metrics that retention policies can rank by: numbers at the top."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidRequestError(
            f"{place}: metrics=: expected a dict, got {type(metrics).__name__}"
        )
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if best is not None and best not in numbers:
        raise InvalidRequestError(
            f"{place}: metrics=: expected a number {best!r}, which best_fn returns, "
            f"got {', '.join(map(repr, metrics)) or 'none'}"
        )
    return numbers


def root_metadata(run: Run) -> Any:
    """Returns the metadata of a run; {} if it has none."""
    try:
        text = run.info().labels.get(_LABEL)
    except NotFoundError:
        return {}
    return {} if text is None else json.loads(text)


def set_root_metadata(run: Run, metadata: Any) -> None:
    """Keeps the metadata of a run, unless it has some; as in Orbax the first stays."""
    try:
        text = json.dumps(dict(metadata), sort_keys=True)
    except (TypeError, ValueError) as e:
        raise InvalidRequestError(
            f"metadata= of {run.name}: expected a dict that JSON can hold, got {e}"
        ) from e
    try:
        labels = run.info().labels
    except NotFoundError:
        labels = {}
    if _LABEL not in labels:
        run.configure(labels={**labels, _LABEL: text})


_EXAMPLE: Final = "file:///ckpts#prod/llama-8b"


def open_run(
    place: Any, run: str | None, logger: StepLogger | None = None
) -> tuple[Run, Callable[[], object] | None]:
    """Returns a run, and what closes its connection; None if the caller owns it.

    Args:
        place: A run, or the target of a store.
        run: Name of the run, if ``place`` is a target without one.
        logger: Receives the statistics of each save and restore; None: none does.
    """
    if isinstance(place, Run):
        if run is not None:
            raise InvalidRequestError(
                f"run=: expected none with {place!r}, got {run!r}"
            )
        if logger is not None:
            raise InvalidRequestError(
                f"logger=: expected none with {place!r}, whose client has one, got "
                f"{type(logger).__name__}; pass it as connect(step_logger=)"
            )
        return place, None
    target, name = split_target(str(place), run)
    client = connect(target, step_logger=logger)
    try:
        return client.run(name), client.close
    except BaseException:
        client.close()
        raise


def split_target(place: str, run: str | None) -> tuple[str, str]:
    """Returns the target of a store and the name of a run.

    >>> split_target("file:///ckpts#prod/llama-8b/checkpoints/", None)
    ('file:///ckpts', 'prod/llama-8b.checkpoints')
    """
    place = re.sub(r"\Afile:/(?!/)", "file:///", place)  # pathlib removes slashes
    place = re.sub(r"\A(gs|s3|memory):/(?!/)", r"\1://", place)
    target, mark, name = place.rpartition("#")
    if run is not None and not mark:
        return place, run
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if run is not None or not mark or len(parts) < 2 or ".." in parts:
        above, *given = place.rstrip("/").rsplit("/", 2)
        like = f"{above}#{'/'.join(given)}" if above and len(given) == 2 else _EXAMPLE
        raise InvalidRequestError(
            f"directory: expected a Run, or a store and a run such as {like!r}, got "
            f"{place!r} and run={run!r}; a directory of Orbax is imported with "
            "storectl import"
        )
    return target, "/".join((parts[0], ".".join(parts[1:])))


_log = logging.getLogger("storesvc_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A step as Orbax's policies take it."""

    step: int
    time: datetime
    """Time of its commit; of its start while it is being saved."""
    metrics: Mapping[str, float] | None
    """Its metrics; None if it has none."""


class StepSequence:
    """The steps of one run. For one thread, as Orbax's managers are."""

    def __init__(
        self,
        place: Any,
        run: str | None,
        logger: StepLogger | None,
        *,
        metadata: Any,
        save_policy: Any,
        keep: RetentionPolicy | None,
        multiprocessing_options: Any,
        is_read_only: bool,
        reports_saving: bool,
    ) -> None:
        """Opens a run, reads its steps, and sets its retention policy if it has none.

        Args:
            place: As for ``open_run``; so are `run` and `logger`.
            run: See `place`.
            logger: See `place`.
            metadata: Metadata of the run, kept unless it has some.
            save_policy: Orbax's policy that decides when to save.
            keep: Retention policy; None leaves that of the run unchanged.
            multiprocessing_options: Orbax's options, for its policies.
            is_read_only: Whether nothing is saved, deleted or set.
            reports_saving: Whether policies see that a save is running.

        Raises:
            PreconditionError: The run has another retention policy.
        """
        self.run, self._on_close = open_run(place, run, logger)
        self._save_policy = save_policy
        self._keep = None if is_read_only else keep
        self._options = multiprocessing_options
        self._is_read_only = is_read_only
        self._reports_saving = reports_saving
        self._finisher = Threads(1, "storesvc-orbax")
        self._pending: tuple[StepInfo, Future[None]] | None = None
        self._ending: int | None = None
        self._is_kept = self._keep is None
        self._committed: list[StepInfo] | None = None
        self._deleted: set[int] = set()
        try:
            self.reload()
            self._set_policy()
            self.infos()  # as in Orbax: what others save later is seen after reload
            if metadata and not is_read_only and self.is_leader:
                set_root_metadata(self.run, metadata)
        except BaseException:
            self.close()
            raise

    @property
    def is_leader(self) -> bool:
        """True in process 0 of a job, and in a process alone."""
        job = find_job()
        return job is None or job.index == 0

    def reload(self) -> None:
        """Reads the steps from the server when they are needed next."""
        self._committed = None
        self._deleted = set(self._deleted_steps())

    def infos(self) -> list[StepInfo]:
        """Returns the committed steps and the one that is being saved, ascending."""
        self._note_commit()
        if self._committed is None:
            try:
                found = [
                    StepInfo(
                        step=each.step,
                        time=each.commit_time,
                        metrics=dict(each.metrics) or None,
                    )
                    for each in self.run.checkpoints()
                ]
            except NotFoundError:
                found = []
            self._committed = found
        steps = {info.step: info for info in self._committed}
        if self._pending is not None:
            info, future = self._pending
            if not future.done() or future.exception() is None:
                steps.setdefault(info.step, info)
        return [steps[step] for step in sorted(steps)]

    def steps(self) -> list[int]:
        """Returns the committed steps and the one that is being saved, ascending."""
        return [info.step for info in self.infos()]

    def latest(self) -> int | None:
        """Returns the highest of ``steps``; None if there is none."""
        return max(self.steps(), default=None)

    def open(self, step: int | None) -> "OpenCheckpoint":
        """Opens a step; waits for its commit if it is being saved.

        Args:
            step: The step; None: the newest.

        Raises:
            StepMissingError: There is no such step.
            StoreError: Its save failed, and its error was not raised yet.
        """
        if self._pending is not None and step in (None, self._pending[0].step):
            self.wait()
        wanted = self.latest() if step is None else step
        if wanted is None:
            raise StepMissingError(f"{self.run.name} has no steps")
        try:
            return self.run.open(wanted, distributed=ALL_PROCESSES)
        except NotFoundError as e:
            raise self.missing(wanted) from e

    def should_save(self, step: int) -> bool:
        """Returns whether Orbax's policy saves a step; never one that is not newer."""
        if self._is_read_only:
            return False
        before = self.infos()
        if before and max(info.step for info in before) >= step:
            return False
        context = managers.DecisionContext(
            is_saving_in_progress=self._reports_saving and self.is_saving,
            reached_preemption=bool(ocp.utils.reached_preemption(step)),
            multiprocessing_options=self._options,
        )
        now = StepInfo(step=step, time=datetime.now(tz=UTC), metrics=None)
        return bool(self._save_policy.should_save(now, before, context=context))

    def check_free(self, step: int) -> None:
        """Rejects a step that was saved or deleted."""
        if step in self.steps():
            raise StepExistsError(
                f"save of {self.run.name}@{step}: expected a new step, got one that is "
                "committed; a step is written once"
            )
        if step in self._deleted and step in self._deleted_steps():
            raise StepExistsError(
                f"save of {self.run.name}@{step}: expected a new step, got one that "
                "was deleted and can be undeleted; run.purge frees it"
            )

    def begin(
        self,
        step: int,
        tree: Any,
        *,
        after_commit: Callable[[], object] | None,
        **options: Any,
    ) -> Future[None]:
        """Starts a save, whose commit is followed by the retention policy.

        Args:
            step: The step.
            tree: Its tree.
            after_commit: Called in the background after the policy; its exception is
                raised where the error of the save would be.
            **options: As for ``Run.save``.

        Raises:
            StoreError: As for ``Run.save``, or the save before failed.
        """
        self.wait()
        save = self.run.save(step, tree, **options)
        metrics = options.get("metrics") or None
        info = StepInfo(step=step, time=datetime.now(tz=UTC), metrics=metrics)
        job = find_job()
        key = ""
        if job is not None and self._keep is not None:
            what = f"orbax/{self.run.name}"
            key = f"storesvc/{what}/{ordinal(job, what)}"
        self._pending = info, self._finisher.submit(self._end, save, key, after_commit)
        await_at_exit(self._pending[1], f"the save of {self.run.name}@{step}")
        return self._pending[1]

    def settle(self, ended: Future[None]) -> None:
        """Reads the list of steps again if a save is the last one, which has ended."""
        if self._pending is not None and self._pending[1] is ended:
            self.wait()

    def cancel(self, step: int | None) -> None:
        """Waits for the save in the background, and deletes its step and another one,
        so that both can be saved again."""
        unwanted = set() if step is None else {step}
        if self._pending is not None:
            unwanted.add(self._pending[0].step)
            try:
                self.wait()
            except StoreError as e:
                _log.warning("the save that was cancelled has failed: %s", e)
        for each in unwanted.intersection(self.steps()):
            self.delete(each)
            if self.is_leader:
                self.run.purge(each)

    def wait(self) -> None:
        """Waits for the save in the background.

        Raises:
            StoreError: It failed, and its error was not raised yet.
        """
        if self._pending is not None and threading.get_ident() != self._ending:
            future = self._pending[1]
            future.exception()  # waits; Ctrl-C leaves the save pending
            self._pending, self._committed = None, None
            forget(future)
            future.result()

    def check_errors(self) -> None:
        """Raises the error of a save in the background that has failed."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    @property
    def is_saving(self) -> bool:
        """True while a save is in the background."""
        return self._pending is not None and not self._pending[1].done()

    def delete(self, step: int) -> None:
        """Deletes a step.

        Raises:
            StepMissingError: There is no such step.
            PreconditionError: It is pinned or has a tag.
        """
        if self._is_read_only:
            _log.warning("%s is read only: step %d stays", self.run.name, step)
            return
        if step not in self.steps():
            raise self.missing(step)
        if self._pending is not None and self._pending[0].step == step:
            self.wait()
        self.infos()  # reads the list, if it is not known, before the step is deleted
        if self.is_leader:
            self.run.delete(step)
        self._committed = [each for each in self._committed or () if each.step != step]
        self._deleted.add(step)

    def missing(self, step: int) -> StepMissingError:
        """Returns the error about a step that is not there."""
        steps = ", ".join(map(str, self.steps()[-5:])) or "none"
        return StepMissingError(
            f"{self.run.name} has no step {step}; its newest are: {steps}"
        )

    def close(self) -> None:
        """Waits for the save in the background, and ends its thread.

        Raises:
            StoreError: It failed.
        """
        try:
            self.wait()
        finally:
            self._finisher.shutdown()
            if self._on_close is not None:
                self._on_close()

    def _end(
        self, save: Save, key: str, after_commit: Callable[[], object] | None
    ) -> None:
        """Ends a save in the background."""
        self._ending = threading.get_ident()  # a callback does not wait for itself
        self._finish(save, key)
        if after_commit is not None:
            after_commit()

    def _finish(self, save: Save, key: str) -> None:
        """Waits for a commit, and for the retention policy, which process 0 applies.

        Args:
            save: The save.
            key: Where process 0 posts that it has applied the policy, so that all
                processes list the same steps; "" in a process alone.
        """
        job = find_job() if key else None
        if job is not None and not self.is_leader:
            save.result()
            self._await_leader(job, key)
            self._set_policy()
            return
        failed = "process 0 failed before"
        try:
            save.result()
            self._set_policy()
            if self._keep is not None:
                self.run.retention.apply()
            failed = ""
        except StoreError as e:
            failed = str(e)
            raise
        finally:
            if job is not None:
                job.post(key, failed)

    def _await_leader(self, job: Job, key: str) -> None:
        """Waits until process 0 has applied the retention policy."""
        failed = job.read(key, seconds=APPLY_SECONDS)
        if failed:
            raise UnavailableError(
                f"retention of {self.run.name}: expected process 0 to apply it, got "
                f"its error: {failed}"
            )
        if failed is None:
            raise UnavailableError(
                f"retention of {self.run.name}: expected process 0 to apply it in "
                f"{APPLY_SECONDS:g} s, got no answer; see its log"
            )

    def _note_commit(self) -> None:
        """Reads the list again once the save in the background has ended; its error
        stays for the call that raises it."""
        pending = self._pending
        if pending and pending[1].done() and pending[1].exception() is None:
            self._pending, self._committed = None, None

    def _set_policy(self) -> None:
        """Sets the retention policy of a run that exists and has none."""
        if self._is_kept or self._keep is None:
            return
        try:
            found = self.run.retention.get()
        except NotFoundError:
            return  # the first save creates the run
        wanted = check_rule(self._keep)
        if found is None and self.is_leader:
            self.run.retention.set(wanted)
        elif found not in (None, wanted):
            assert found is not None
            raise PreconditionError(
                f"options for {self.run.name}: expected the retention policy of the "
                f"run, {format_policy(found)}, got {format_policy(wanted)}; change it "
                "by run.retention.set or storectl retain, or leave max_to_keep= and "
                "the like out"
            )
        self._is_kept = True

    def _deleted_steps(self) -> list[int]:
        try:
            return [found.step for found in self.run.checkpoints(deleted=True)]
        except NotFoundError:
            return []


class ManagedRun:
    """A run with its steps: the methods that the managers of both versions share."""

    _steps: StepSequence

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.directory}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> StepPath:
        """The run as a path: ``directory / str(step) / item`` has ``exists``."""
        return StepPath(self._steps.run)

    def should_save(self, step: int) -> bool:
        """Returns whether ``save`` would save a step without ``force``."""
        return self._steps.should_save(step)

    def is_saving_in_progress(self) -> bool:
        """Returns whether a save is in the background."""
        return self._steps.is_saving

    def reload(self) -> None:
        """Reads the steps from the server again."""
        self._steps.reload()

    def close(self) -> None:
        """Waits for the save in the background, and closes what this class opened.

        Raises:
            StoreError: The save failed.
        """
        self._steps.close()

    def _open(self, step: int | None) -> "tuple[OpenCheckpoint, StepRecord]":
        opened = self._steps.open(step)
        return opened, read_record(opened)

    def _part(self, opened: "OpenCheckpoint", record: StepRecord, name: str) -> Part:
        part = record.parts.get(name)
        if part is None:
            # a step without a record has an item for each first key of its tree
            if RECORD not in opened.items and has_tree(opened, name):
                return Part(kind="tree", place=name)
            raise ItemMissingError(
                f"{opened.name} has no item {name!r}; it has: {', '.join(record.parts)}"
            )
        return part
