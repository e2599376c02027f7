"""EasyDeL's trainers, with their checkpoints in a run of a store.

The mixin replaces the three places where EasyDeL's ``BaseTrainer`` handles checkpoints;
the trainer's arguments keep their meaning:

1. *Save*: ``save_steps``, ``save_interval_minutes``, ``do_last_save`` and
   ``save_tpu_preemption_checkpoints`` decide when, as in EasyDeL's own checkpointer:
   the first step policy that reaches a step decides about it, and an interval of time
   adds saves between these steps. The state is saved in the background as it is
   trained. A save that fails raises at the next save, or at the end of ``train``.
2. *Cleanup*: the trainer deletes nothing. ``save_total_limit`` becomes the retention
   policy ``KeepLatest`` of the run, unless the run has a policy.
3. *Resume*: with ``resume_if_possible``, the trainer continues from the newest
   checkpoint of the run, on the mesh and shardings of its model. What prevents that is
   raised; EasyDeL logs a warning, and trains from scratch.

Example:
    class Trainer(StoreCheckpoints, ed.Trainer):
        pass

    with store.connect("ckpt.example:7070") as client:
        run = client.run("prod/llama-8b")
        trainer = Trainer(store_run=run, arguments=arguments, model=model, ...)
        trainer.train()

>>> schedule = SaveSchedule(policies=[CheckpointInterval(every=100)], interval=None)
>>> [step for step in range(301) if schedule.is_due_at(step)]
[100, 200, 300]
"""

import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, SupportsFloat

from storesvc_client._api.run import Run
from storesvc_client._pytree.jax_job import decided_by_first
from storesvc_client._values.policies import KeepLatest, format_policy
from storesvc_client.errors import (
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    StoreError,
)
from storesvc_client.trees.easydel import restore_state
from storesvc_client.trees.nnx.saved_models import save_state


class StepPolicy(Protocol):
    """A ``CheckpointInterval`` of EasyDeL's arguments."""

    @property
    def every(self) -> int:
        """Saves at the multiples of this number of steps."""

    @property
    def until(self) -> int | None:
        """Last step to which the policy applies; None: to all that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSchedule:
    """The steps and times at which a trainer saves."""

    policies: Sequence[StepPolicy]
    """Step policies, in ascending order of ``until``."""
    interval: timedelta | None
    """Longest time between two saves; None: time decides nothing."""

    @classmethod
    def from_arguments(cls, arguments: Any) -> Self:
        """Returns the schedule of EasyDeL's ``TrainingArguments``."""
        return cls(
            policies=arguments.get_checkpoint_policies(),
            interval=arguments.get_save_interval_timedelta(),
        )

    def is_due_at(self, step: int) -> bool:
        """Returns whether a step policy saves at a step; none does at step 0."""
        for policy in self.policies:
            if policy.until is None or policy.until >= step:
                return step > 0 and step % policy.every == 0
        return False

    def is_due_after(self, seconds: float) -> bool:
        """Returns whether the last save is longer ago than the interval."""
        return self.interval is not None and seconds >= self.interval.total_seconds()


if TYPE_CHECKING:
    from storesvc_client._save.saver import Save

    class _Trainer:
        """Members of EasyDeL's ``BaseTrainer`` that the mixin uses."""

        arguments: Any
        model_state: Any
        is_process_zero: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def _apply_step_start_point(self) -> None: ...
        def log_metrics(
            self, metrics: Any, pbar: Any, step: int, mode: str, **options: Any
        ) -> None: ...
        def train(self) -> Any: ...
else:
    _Trainer = object

__all__ = ["StoreCheckpoints"]

MAX_METRICS: Final = 64
"""Maximum number of metrics of a checkpoint."""

_log = logging.getLogger("storesvc_client")


class StoreCheckpoints(_Trainer):
    """Mixin for EasyDeL's trainers: they save to a run, and resume from it.

    Name it before the trainer among the bases. ``train`` returns once the last save is
    committed, and ``TrainerOutput.checkpoint_path`` is ``namespace/run@step``.

    A checkpoint has the training metrics of its step, such as "loss", as far as they
    are numbers, the first 64. LoRA adapters are saved apart from their layers, as they
    are trained, so ``merge_lora_before_save`` changes nothing. With
    ``save_optimizer_state=False`` a resumed trainer initialises its optimizer.

    >>> class Trainer(StoreCheckpoints, ed.Trainer):
    ...     pass
    >>> trainer = Trainer(store_run=run, arguments=arguments, model=model, ...)
    >>> trainer.train().checkpoint_path
    'prod/llama-8b@10000'
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__:
            if base is StoreCheckpoints:
                return
            is_trainer = "_save_checkpoint_for_step" in vars(base)
            if is_trainer and not issubclass(base, StoreCheckpoints):
                raise InvalidRequestError(
                    f"class {cls.__name__}: expected StoreCheckpoints before "
                    f"{base.__name__} among its bases, got it after; the trainer would "
                    "save to its own directory"
                )

    def __init__(
        self,
        *args: Any,
        store_run: Run,
        store_resume: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        """Creates the trainer; with ``resume_if_possible``, restores its state.

        Args:
            store_run: Run to save to and to resume from.
            store_resume: ``opt_state``, ``missing``, ``select`` and ``on_mismatch`` of
                ``restore_state``; used, with a warning, only if the newest checkpoint
                does not fit without them, so not after the next save.
            *args: Arguments of the trainer.
            **kwargs: Arguments of the trainer.

        Raises:
            InvalidRequestError: ``store_run`` is no run, or the trainer's arguments
                request what a run cannot do.
            StoreError: The newest checkpoint of the run cannot be restored into the
                trainer's state; see ``restore_state``.
        """
        if not isinstance(store_run, Run):
            raise InvalidRequestError(
                "store_run: expected a Run, such as client.run('prod/llama'), got "
                f"{store_run!r}"
            )
        arguments = kwargs.get("arguments", args[0] if args else None)
        self.store_run = store_run
        self._store_options = store_resume
        self._store_resumes = getattr(arguments, "resume_if_possible", False)
        self._store_is_prepared = False
        self._store_save: Save | None = None
        self._store_step: int | None = None
        """Step that was saved or resumed last."""
        self._store_metrics: tuple[int, Mapping[str, Any]] = (-1, {})
        """Step that was logged last, and its metrics."""
        if self._store_resumes and getattr(arguments, "remove_ckpt_after_load", False):
            raise InvalidRequestError(
                f"trainer of {store_run.name}: expected remove_ckpt_after_load=False, "
                "got True; the retention policy of a run deletes its checkpoints"
            )
        with _without_own_resume(arguments):
            super().__init__(*args, **kwargs)
        if not self._store_is_prepared:
            raise InvalidRequestError(
                f"trainer of {store_run.name}: expected a trainer whose constructor "
                "calls _apply_step_start_point of StoreCheckpoints, as EasyDeL 0.3 "
                f"does, got {type(self).__name__}, whose does not; it would not resume"
            )
        self._store_schedule = SaveSchedule.from_arguments(self.arguments)
        self._store_saved_at = time.monotonic()

    # EasyDeL calls this in its constructor, right after its own resume.
    def _apply_step_start_point(self) -> None:
        if self._store_resumes:
            self._resume()
        self._store_is_prepared = True
        super()._apply_step_start_point()

    def _resume(self) -> None:
        """Replaces the trainer's state by the newest checkpoint, if there is one."""
        run, state = self.store_run, self.model_state
        if run.latest_step() is None:
            _log.warning(
                "%s has no checkpoint: training starts with the given model", run.name
            )
            return
        # A state with its own optimizer keeps it; others get the one of the arguments.
        own_tx = state.tx if state.opt_state is not None else None
        skips = not self.arguments.save_optimizer_state
        tx = self.arguments.get_tx_template() if own_tx is None else own_tx

        def restore(**options: Any) -> Any:
            options |= {"opt_state": "skip"} if skips else {"tx": tx}
            return restore_state(run, model=state, state_class=type(state), **options)

        try:
            try:
                restored = restore()
            except (MismatchError, InvalidRequestError) as e:
                if not self._store_options:
                    raise
                _log.warning("%s; it is restored with store_resume=", e)
                restored = restore(**self._store_options)
        except StoreError as e:
            e.add_note(
                f"EasyDeL's trainer cannot resume from {run.name}; give such options "
                "in store_resume=dict(...), or, to train from scratch, another run"
            )
            raise
        # Without tx, the trainer sets the one that knows the number of steps.
        self.model_state = restored.replace(tx=own_tx)
        self._store_step = int(restored.step)
        _log.info("training resumes from %s@%d", run.name, self._store_step)
        if skips:
            _log.warning(
                "%s@%d: the optimizer state is initialised, as save_optimizer_state "
                "is False",
                run.name,
                self._store_step,
            )

    def train(self) -> Any:
        """Trains as EasyDeL does, then waits for the last save.

        Raises:
            InvalidRequestError: The run has a checkpoint of a later step than the
                trainer's state.
            StoreError: A save failed.
        """
        self._check_start()
        self._limit_checkpoints()
        self._store_saved_at = time.monotonic()
        output = super().train()
        self.store_run.wait()
        if self._store_save is not None:  # it may not have begun; see Run.save
            self._store_save.result()
        return output

    def _check_start(self) -> None:
        """Rejects a run that another training has filled already."""
        name, latest = self.store_run.name, self.store_run.latest_step()
        start = int(self.model_state.step)
        if latest is not None and latest > start:
            raise InvalidRequestError(
                f"trainer of {name}: expected a state of step {latest}, its newest "
                f"checkpoint, or later, got step {start}; resume with "
                "resume_if_possible=True and without force_step_start_point, or use "
                "another run"
            )

    def _limit_checkpoints(self) -> None:
        """Turns ``save_total_limit`` into the retention policy of the run."""
        run, limit = self.store_run, self.arguments.save_total_limit
        if limit is None or not self.is_process_zero:
            return
        wanted = KeepLatest(limit)
        try:
            policy = run.retention.get()
        except NotFoundError:
            policy = None
        if policy is None:
            run.retention.set(wanted)
        elif policy != wanted:
            _log.warning(
                "%s keeps its retention policy, %s: save_total_limit=%d is not applied",
                run.name,
                format_policy(policy),
                limit,
            )

    def log_metrics(
        self, metrics: Any, pbar: Any, step: int, mode: str = "train", **options: Any
    ) -> None:
        """Logs metrics as EasyDeL does, and keeps the metrics of a training step for
        its checkpoint."""
        if mode == "train":
            self._store_metrics = step, metrics
        super().log_metrics(metrics, pbar, step, mode, **options)

    def _save_checkpoint_for_step(
        self,
        state: Any,
        *,
        step: int,
        force: bool = False,
        merge_lora_before_save: bool = False,  # noqa: ARG002 - EasyDeL passes it
    ) -> str | None:
        """Saves the state of a step if it is due; with ``force`` in any case, and then
        waits for the commit.

        Returns the name of the checkpoint; None if none is due.
        """
        name = f"{self.store_run.name}@{step}"
        if step == self._store_step and (not force or self._is_saved()):
            return name
        if not force and not self._is_due(step):
            return None
        self._store_saved_at = time.monotonic()
        self._store_save = self._begin_save(state, step, is_last=force)
        self._store_step = step
        if force:
            self._store_save.result()
        return name

    def _is_saved(self) -> bool:
        """Returns whether the last checkpoint is committed; waits until then."""
        if self._store_save is None:  # it was resumed
            return True
        error = self._store_save.exception()
        if error is not None:
            _log.warning("the checkpoint is saved again: %s", error)
        return error is None

    def _is_due(self, step: int) -> bool:
        schedule = self._store_schedule
        is_late = schedule.is_due_after(time.monotonic() - self._store_saved_at)
        if schedule.interval is not None:  # the clocks of processes differ
            is_late = decided_by_first(is_late)
        return step > 0 and (schedule.is_due_at(step) or is_late)

    def _begin_save(self, state: Any, step: int, *, is_last: bool) -> "Save":
        if not self.arguments.save_optimizer_state:
            state = state.replace(opt_state=None)
        logged, metrics = self._store_metrics
        try:
            return save_state(
                self.store_run,
                state,
                metrics=_numbers(metrics) if logged == step else None,
                # nothing trains during the last save, so it needs no copy
                snapshot="none" if is_last else None,
                if_busy="wait" if is_last else None,
            )
        except TypeError as e:  # EasyDeL's loop takes it for the end of the training
            raise StoreError(f"save of {self.store_run.name}@{step}: {e}") from e

    def _cleanup_old_checkpoints(self) -> None:
        """Deletes nothing: the retention policy of the run does."""


@contextmanager
def _without_own_resume(arguments: Any) -> Generator[None]:
    """Keeps EasyDeL's constructor from resuming from a directory."""
    if not getattr(arguments, "resume_if_possible", False):
        yield
        return
    arguments.resume_if_possible = False
    try:
        yield
    finally:
        arguments.resume_if_possible = True


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a training step that are numbers, without EasyDeL's
    prefix; the norms of single layers and the measures of speed have others."""
    found = {
        key.removeprefix("train/"): float(value)
        for key, value in metrics.items()
        if key.startswith("train/")
        if isinstance(value, SupportsFloat) and getattr(value, "ndim", 0) == 0
    }
    return dict(islice(found.items(), MAX_METRICS))
