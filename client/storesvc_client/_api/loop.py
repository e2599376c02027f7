"""The training loop: decides when to save, survives failed saves, ends on SIGTERM.

The order within ``Loop.after``:

1. Count the save before, if it has ended. Nothing waits for it.
2. Ask whether SIGTERM was received. In a job, jax answers at the same step in all
   processes.
3. The last step, or the step at SIGTERM, is saved in any case.
4. Else decide by the schedule. In a job, process 0 decides at the steps that the
   schedule names, or at which it looks at its clock, and publishes the decision; at all
   other steps nothing is exchanged.

At most steps nothing of this is to be done but 2. in a job, and that is known before:
``_quiet_until`` is the step up to which it holds. Whatever changes it, such as SIGTERM,
sets it back. Such a step touches few objects, which a training step has evicted from
the processor's caches.

A step whose save is due waits, as in ``Run.save``, until the save before is written, if
that makes progress. If that one waits for a server that does not answer, the step is
skipped, which is logged and counted; training is not delayed.

With ``keep=``, a retention policy that the run has already is compared, and never
overwritten.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Self,
    SupportsFloat,
    SupportsIndex,
    TypeVar,
    overload,
)

from storesvc_client._api.due_steps import (
    DueSteps,
    LoopSaves,
    NoTermination,
    TakenSteps,
    Termination,
    is_argument_error,
    make_termination,
)
from storesvc_client._items.iterators import has_state
from storesvc_client._job.job import Decisions
from storesvc_client._save.saver import Save
from storesvc_client._values.arguments import (
    DurationLike,
    as_timedelta,
    checked_choice,
    checked_flag,
    shown,
)
from storesvc_client._values.options import (
    Distributed,
    IfBusy,
    OnDamaged,
    RestoreRequest,
    SaveRequest,
    checked_distributed,
)
from storesvc_client._values.policies import (
    RetentionPolicy,
    Rule,
    check_rule,
    format_policy,
)
from storesvc_client._values.triggers import (
    OnFailure,
    checked_on_failure,
    make_schedule,
    whole_number,
)
from storesvc_client._views.texts import purge_text, size_text
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    PeerFailedError,
    PreconditionError,
    StoreError,
    without_advice,
)

if TYPE_CHECKING:
    from storesvc_client._api.run import Run, RunParts
    from storesvc_client._mapping.rules import Rules
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._values.options import MappingRules

T = TypeVar("T")

_log = logging.getLogger("storesvc_client")


class LoopPolicy:
    """The policy of one loop, which the run gets if it has none."""

    def __init__(
        self, run: "Run", keep: Rule | None, purge_delay: timedelta | None
    ) -> None:
        """Prepares to set a policy with its purge delay; None sets none."""
        self._run = run
        self._keep = keep
        self._purge_delay = purge_delay
        self.is_settled = keep is None
        """True if nothing is to be set any more."""
        self._tried_step: int | None = None

    def set(self, *, creates: bool, writes: bool) -> None:
        """Sets the policy of the run, if it has none.

        Args:
            creates: Whether a run that does not exist is created by that.
            writes: False in a process that leaves it to process 0.

        Raises:
            PreconditionError: The run has another policy.
            UnavailableError: The store does not answer.
        """
        if self._keep is None:
            return
        retention = self._run.retention
        try:
            found = retention.get()
        except NotFoundError:
            if not creates:
                return
            found = None
        except DataLossError as e:  # of the newest checkpoint, which restore_or reports
            _log.warning("keep= of %s is compared later: %s", self._run.name, e)
            return
        if found is None:
            if writes:
                info = retention.set(self._keep, purge_delay=self._purge_delay)
                if info.purge_delay != timedelta(0):
                    freed = sum(d.own_bytes for d in retention.preview() if not d.kept)
                    cost = purge_text(freed, info.purge_delay, "purge_delay=")
                    _log.info("keep= of %s: %s", self._run.name, cost)
        elif found != self._keep:
            raise PreconditionError(
                f"loop of {self._run.name}: keep=: expected the retention policy of "
                f"the run, {format_policy(found)}, got {format_policy(self._keep)}; "
                "change it with run.retention.set or storectl retain, or leave keep= "
                "out"
            )
        elif self._purge_delay not in (None, delay := self._run.info().purge_delay):
            raise PreconditionError(
                f"loop of {self._run.name}: purge_delay=: expected that of the run, "
                f"{'3 days, 0:00:00' if delay is None else delay}, got "
                f"{self._purge_delay}; change it with run.configure(purge_delay=...), "
                "or leave purge_delay= out"
            )
        # of a metric, it is known only after the first commit whether there is one
        self.is_settled = "best(" not in format_policy(self._keep)

    def set_late(self, saved_step: int | None, *, writes: bool) -> None:
        """Sets the policy of a run that the first commit created, and checks that its
        metrics are saved; logs errors, once after each commit.

        Args:
            saved_step: Step of the newest commit; None if there is none yet.
            writes: False in a process that leaves it to process 0.
        """
        if self.is_settled or saved_step in (None, self._tried_step):
            return
        self._tried_step = saved_step
        try:
            self.set(creates=False, writes=writes)
            if writes:
                self._run.retention.preview()  # rejects a metric that is not saved
            self.is_settled = True
        except StoreError as e:
            _log.error("keep= of %s is not applied: %s", self._run.name, e)
            self.is_settled = isinstance(e, PreconditionError)


_DATA: Final = "data"
"""Name of the item with the state of the data iterator."""

_SHOWN: Final = 200
"""Maximum characters of an error in the outcome."""


class Loop:
    """A training loop that saves to a run; returned by ``Run.loop``.

    Use it in a ``with`` block, in one thread; in a job, in each process, with the same
    arguments and steps.

    >>> with run.loop(every=Steps(1000) | Minutes(15), create=True) as loop:
    ...     state, start = loop.restore_or(init_state)
    ...     for step in loop.steps(start, total):
    ...         state, loss = train_step(state, next(batches))
    ...         loop.after(step, state, metrics={"loss": loss})
    >>> print(loop.outcome)
    finished at step 99999; saved step 99999
    """

    def __init__(
        self,
        run: "Run",
        parts: "RunParts",
        *,
        every: object,
        keep: RetentionPolicy | None,
        purge_delay: DurationLike | None,
        on_failure: OnFailure,
        create: bool,
        distributed: Distributed,
    ) -> None:
        place = f"loop of {run.name}"
        self._run = run
        self._parts = parts
        schedule = make_schedule(every)
        rule = None if keep is None else check_rule(keep, place=f"{place}: keep=")
        if purge_delay is not None:
            purge_delay = as_timedelta(f"{place}: purge_delay=", purge_delay)
            if keep is None:
                raise InvalidRequestError(
                    f"{place}: purge_delay=: expected it together with keep=; without "
                    "a policy, run.configure(purge_delay=...) sets it"
                )
        self._policy = LoopPolicy(run, rule, purge_delay)
        self._creates = bool(checked_flag(f"{place}: create=", create))
        self._distributed = checked_distributed(place, distributed)
        self._saves = LoopSaves(run.name, checked_on_failure(place, on_failure))
        self.outcome = ""
        """Words on how the loop ended; "" before that."""
        self.is_stopping = False
        """True once SIGTERM was received and the state was saved; ``steps`` then ends.
        A loop that does not use ``steps`` ends when it sees this."""
        self.restored: OpenCheckpoint | None = None
        """The checkpoint that ``restore_or`` restored, as it is stored, with the report
        of that; None if there was none."""
        self._decisions: Decisions | None = None
        self._termination: Termination = NoTermination()
        self._agrees: Callable[[], bool] | None = None
        """Asks jax at each step, in a job, whether SIGTERM was received."""
        self._is_open = False
        self._least_step = 0
        """Lowest step of the next call of ``after``: one above that of the last."""
        self._quiet_until = -1
        """Step before which a call of ``after`` has nothing to do."""
        self._last_step: int | None = None
        """Last step of ``steps``."""
        self._is_complete = False
        """True if ``steps`` had no step left."""
        self._sigterm_step: int | None = None
        self._initial: Any = None
        """The initial state without its arrays, until ``after`` was called."""
        self._has_data = False
        """True if ``restore_or`` got a data iterator."""
        self._taken = TakenSteps(parts.stub)
        self._due = DueSteps(
            run.name,
            schedule,
            parts.defaults.if_busy,
            lambda: parts.session.connection.waits.trouble,
            self._saves,
            self._taken,
        )

    def __repr__(self) -> str:
        begun = "not at a step yet" if self._step is None else f"at step {self._step}"
        how = self.outcome or begun
        return f"<Loop of {self._run.name}, {how}>"

    @property
    def saved_step(self) -> int | None:
        """Newest step that this loop saved and that is committed; None if there is
        none."""
        return self._saves.saved_step

    @property
    def skipped(self) -> int:
        """Steps that were due and not saved, because of the save before."""
        return self._due.skipped

    @property
    def failures(self) -> int:
        """Saves that failed, in all."""
        return self._saves.failures

    def __enter__(self) -> Self:
        """Begins the loop: sets the retention policy, and notes SIGTERM from now on.

        Raises:
            PreconditionError: The run has another retention policy.
            UnavailableError: The store does not answer.
        """
        if self._is_open or self.outcome:
            raise InvalidRequestError(
                f"loop of {self._run.name}: expected one with block for each loop; "
                "call run.loop again"
            )
        job = None
        if self._distributed.processes == "all":
            from storesvc_client._pytree.jax_job import find_job

            job = find_job()
        if job is not None:
            self._decisions = Decisions(job, self._run.name)
        self._policy.set(creates=self._creates, writes=self._is_leader)
        self._termination = make_termination(
            is_shared=job is not None, on_signal=self._end_quiet
        )
        if self._termination.agrees_at_each_step:
            self._agrees = self._termination.is_due
        self._is_open = True
        self._due.begin(self._decisions)
        return self

    @overload
    def restore_or(
        self,
        init: Callable[[], T],
        *,
        data: object = ...,
        mapping: "MappingRules | None" = ...,
        on_damage: OnDamaged = ...,
    ) -> tuple[T, int]: ...

    @overload
    def restore_or(
        self,
        init: T,
        *,
        data: object = ...,
        mapping: "MappingRules | None" = ...,
        on_damage: OnDamaged = ...,
    ) -> tuple[T, int]: ...

    def restore_or(
        self,
        init: Any,
        *,
        data: object = None,
        mapping: "MappingRules | None" = None,
        on_damage: OnDamaged = "raise",
    ) -> tuple[Any, int]:
        """Returns the newest state of the run, or the initial one, and the first step.

        What it did is logged. If the run has no checkpoint, the result is the initial
        state and 0; else it is the restored state, on the shardings of the initial one,
        and the step after it.

        Args:
            init: The initial state, or a function that makes it. An NNX module, or one
                with its ``nnx.Optimizer`` as a tuple, is restored in place, and
                returned. With a function there
                is never more than one state in memory: if there is a checkpoint, a
                function compiled with ``jax.jit(..., out_shardings=...)`` is not run,
                and the result of another one is dropped before the first byte is read.
                A state that is given is in memory until the caller drops it.
            data: The data iterator, as ``Items.restore_into`` takes it. If there is a
                checkpoint, it gets the state that was saved as the item "data"; each
                save of this loop must then have ``items={"data": ...}``.
            mapping: Rules that make the tree of the initial state of an older one, as
                for ``Run.restore``, in place of the migrations of the run. They apply
                if they fit the checkpoint; one that this loop saved is restored
                unchanged. So they must not fit the tree that they make.
            on_damage: As for ``Run.restore``: "raise" the error of a damaged newest
                checkpoint, or restore an "older" one. A step is not saved again while
                its damaged checkpoint exists, or a deleted one that is not purged; the
                step after it is.

        Raises:
            InvalidRequestError: ``init`` is None, or returns it; or the rules are none,
                or would fit what they make.
            NotFoundError: There is no such run, and ``create`` is not set; names
                similar runs. Or the checkpoint has no item "data".
            MismatchError: As for ``Run.restore`` and ``Items.restore_into``.
            StoreError: As for ``Run.restore``.
        """
        self._check_open("restore_or")
        self._end_quiet()
        checked_choice(f"loop of {self._run.name}: on_damage=", on_damage, OnDamaged)
        if data is not None and not has_state(data):
            raise InvalidRequestError(
                f"loop of {self._run.name}: data=: expected an iterator with get_state "
                "and set_state, or with state_dict and load_state_dict, got "
                f"{shown(data)}"
            )
        self._has_data = data is not None
        from storesvc_client._pytree.restore_target import is_function, make_target

        if init is None:
            raise self._no_state("None")
        older = None
        if mapping is not None:
            from storesvc_client._restore.mapped import load_rules

            older = load_rules(mapping)
        try:
            # Before the target is made, which takes time and memory.
            self._run.open(distributed=self._distributed)
        except (DataLossError, PeerFailedError):
            if on_damage == "raise":
                raise
        except NotFoundError as e:
            if e.reason == "RUN_NOT_FOUND" and not self._creates:
                raise NotFoundError(
                    f"{e}; or pass create=True to run.loop if it is a new run",
                    reason=e.reason,
                    metadata=e.metadata,
                ) from None
            return self._start_new(init), 0
        like = make_target(init) if is_function(init) else init
        if like is None:  # which would restore any tree
            raise self._no_state("a function that returns None")
        return self._resume(like, data, older, on_damage)

    def _start_new(self, init: Any) -> Any:
        """Returns the initial state of a run without a checkpoint."""
        from storesvc_client._pytree.restore_target import is_function, without_values

        self._announce("no checkpoint yet; starts from the initial state at step 0")
        self._due.note_save()
        self._taken.note(0, self._decisions)
        state = init() if is_function(init) else init
        if state is None:
            raise self._no_state("a function that returns None") from None
        self._initial = without_values(state)
        return state

    def _resume(
        self, like: Any, data: object, older: "Rules | None", on_damage: OnDamaged
    ) -> tuple[Any, int]:
        """Restores the newest checkpoint; returns its state and the step after it."""
        modules = _find_modules(like)
        request, prepare = RestoreRequest(like=like), None
        if modules is not None:
            from storesvc_client.trees.nnx.saved_models import planner

            prepare = planner(self._run, *modules)
        opening = self._parts.opening(
            "latest", distributed=self._distributed, on_damage=on_damage
        )
        with without_advice():
            self.restored, state = opening.restore(
                request,
                prepare=prepare,
                data=None if data is None else (_DATA, data),
                older=older,
            )
        if modules is not None:
            state = like
        step = self.restored.info.step
        report = self.restored.report
        damaged = () if report is None else report.damaged
        self._taken.note(step + 1, self._decisions, damaged)
        read = (
            ""
            if report is None
            else (f" ({size_text(report.returned_bytes)} in {report.seconds:.1f} s)")
        )
        self._announce(f"resumed step {step}{read}; continues at step {step + 1}")
        self._due.note_save()
        return state, step + 1

    def steps(self, start: SupportsIndex, total: SupportsIndex) -> Iterator[int]:
        """Yields the steps from ``start`` to ``total - 1``; ends early on SIGTERM.

        The last step is saved whatever the schedule says, unless the block is left
        before it.

        Args:
            start: First step.
            total: Number of steps of the whole training.

        Raises:
            InvalidRequestError: ``after`` was not called for the first step.
        """
        self._check_open("steps")
        self._end_quiet()
        place = f"loop of {self._run.name}: steps"
        first, end = whole_number(place, start), whole_number(place, total)
        if first < end:
            self._last_step = end - 1
        else:
            self._is_complete = True
            self._announce(f"no step is left from {first} to {end - 1}")
        return self._steps(range(first, end))

    def after(
        self,
        step: SupportsIndex,
        state: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        items: Mapping[str, Any] | None = None,
    ) -> Save | None:
        """Saves the state after a step, if a save is due; call it at the end of each.

        If it saves nothing it takes microseconds, and does not wait for the devices.

        Args:
            step: The step, higher than that of the call before.
            state: The state after it; any pytree that ``Run.save`` takes. An NNX
                module, or one with its ``nnx.Optimizer`` as a tuple, is saved as by
                ``storesvc_client.nnx.save``, so that ``restore_model`` reads it.
            metrics: Numbers to keep with the checkpoint. Arrays of jax are converted,
                which waits for them, only if this step is saved.
            items: Values to keep next to the tree, such as ``{"data": iterator}``, as
                for ``Run.save``. The state of an iterator is taken only if this step is
                saved, and within this call.

        Returns:
            The save that was started, or None.

        Raises:
            InvalidRequestError: The step is not higher, or an argument of the save is
                out of range.
            UnsupportedLeafError: The state has leaves that cannot be stored.
            MismatchError: At the first step of a run: a checkpoint of the state could
                not be restored like the initial state.
            StoreError: More saves failed in a row than are tolerated; the last error.
                Or the save on SIGTERM failed.
            PeerFailedError: Process 0 of the job has ended its loop.
        """
        if type(step) is int and self._least_step <= step < self._quiet_until:
            if self._agrees is None or not self._agrees():
                self._least_step = step + 1
                return None
            self._note_sigterm(step)
        self._check_open("after")
        if type(step) is not int or step < self._least_step:
            place = f"loop of {self._run.name}: after"
            step = whole_number(place, step, least=self._least_step)
        self._least_step = step + 1
        if self._initial is not None:
            from storesvc_client._pytree.matching import check_restorable

            check_restorable(f"{self._run.name}@{step}", state, self._initial)
            self._initial = None
        if self._saves.pending or not self._policy.is_settled:  # 1.
            self._saves.settle()
            lost = self._saves.lost(counts=self._is_leader)
            if lost is not None and (self._decisions is None or not self._is_leader):
                raise lost
            self._policy.set_late(self.saved_step, writes=self._is_leader)
        if self._sigterm_step is None and self._termination.is_due():  # 2.
            self._note_sigterm(step)
        if self._sigterm_step is not None or step == self._last_step:  # 3.
            request = SaveRequest(step=step, tree=state, metrics=metrics, items=items)
            return self._save_last(step, request)
        if step >= self._due.asks_at and self._due.has(step):  # 4.
            request = SaveRequest(step=step, tree=state, metrics=metrics, items=items)
            return self._save(step, request)
        self._begin_quiet()
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Waits for the running save, and leaves nothing behind.

        A block that raised an error saves nothing: its state may be broken.

        Raises:
            StoreError: The save of the last step failed, or more in a row than are
                tolerated. An error that ended the block has precedence.
        """
        self._is_open = False
        self._end_quiet()
        try:
            if self._decisions is not None:
                self._decisions.end(_short(error) if error else "its steps have ended")
            self._saves.wait()
            self._policy.set_late(self.saved_step, writes=self._is_leader)
        finally:
            is_late = self._termination.close() and self._sigterm_step is None
            self.outcome = self._describe_error(error)
            if is_late:
                self.outcome += "; received SIGTERM after it"
        if error is None:
            _log.info("loop of %s: %s", self._run.name, self.outcome)
        else:
            self._announce(self.outcome)
        if self._saves.is_over or self._saves.is_hopeless:
            assert self._saves.error is not None
            if error is None:
                raise self._saves.error
            if self._saves.error is not error:
                error.add_note(f"the last save failed too: {self._saves.error}")

    @property
    def _step(self) -> int | None:
        """Step of the last call of ``after``; None if there was none."""
        return self._least_step - 1 if self._least_step else None

    def _begin_quiet(self) -> None:
        """Finds the step up to which ``after`` has nothing to do."""
        if self._saves.pending or not self._policy.is_settled:
            return
        asks_at = self._due.asks_at
        last = asks_at if self._last_step is None else self._last_step
        # In this order: a signal that arrives in between is seen by one of the two.
        self._quiet_until = min(asks_at, last)
        if self._agrees is None and self._termination.is_due():
            self._end_quiet()

    def _end_quiet(self) -> None:
        self._quiet_until = -1

    def _steps(self, steps: range) -> Iterator[int]:
        for step in steps:
            yield step
            if self._least_step != step + 1:
                if self._step is None:
                    raise InvalidRequestError(
                        f"loop of {self._run.name}: after was not called for step "
                        f"{step}; call it at the end of each step, or nothing is saved"
                    )
                # In a job, all processes must ask equally often.
                if self._termination.is_due():
                    self._note_sigterm(step)
            if self.is_stopping:
                return

    def _save_last(self, step: int, request: SaveRequest) -> Save | None:
        """Saves the last step of the loop, once the save before has ended."""
        saves, ends = self._saves, self._sigterm_step is not None
        if ends and self._taken.has(step):
            return None  # the next step is the last one
        saves.wait()
        saves.tolerate_none()
        save = self._save(step, request)
        if not ends:
            return save
        saves.wait()  # the process may be killed soon: return only when it is committed
        if saves.error is not None:
            raise saves.error
        self.is_stopping = True
        return save

    def _save(self, step: int, request: SaveRequest) -> Save | None:
        self._due.note_save()
        if self._has_data and (request.items is None or _DATA not in request.items):
            raise InvalidRequestError(
                f"loop of {self._run.name}: after: expected the data iterator of "
                "restore_or in items=, or no checkpoint could restore it; pass "
                f'items={{"{_DATA}": ...}}'
            )
        modules = _find_modules(request.tree)
        if modules is not None:
            from storesvc_client.trees.nnx.saved_models import tree_to_save

            tree, document = tree_to_save(self._run, *modules)
            request = replace(request, tree=tree, document=document)
        if_busy: IfBusy = "queue" if self._parts.defaults.if_busy == "queue" else "wait"
        request = replace(request, if_busy=if_busy, distributed=self._distributed)
        try:
            loop = None if self._decisions is None else self._decisions.departures
            pending = self._parts.begin(request, loop=loop)
        except StoreError as e:
            if is_argument_error(e):
                raise
            self._saves.fail(step, e)
            return None
        pending.leave_error()  # or the next save raises it in its own place
        self._saves.pending.append(pending)
        return Save(pending)

    def _note_sigterm(self, step: int) -> None:
        if self._sigterm_step is None:
            self._sigterm_step = step
            _log.warning(
                "loop of %s: received SIGTERM; saving and ending at step %d",
                *(self._run.name, step),
            )

    def _announce(self, event: str) -> None:
        """Logs an event that a user waits to see at INFO; prints it once for the job if
        the program has set no level, with which logging would drop it."""
        _log.info("%s: %s", self._run.name, event)
        levels = _log.level, logging.getLogger().level
        if self._is_leader and levels == (logging.NOTSET, logging.WARNING):
            print(f"{self._run.name}: {event}", file=sys.stderr)

    def _no_state(self, got: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"loop of {self._run.name}: restore_or: expected the initial state, or a "
            f"function that returns it, got {got}"
        )

    def _check_open(self, method: str) -> None:
        if not self._is_open:
            raise InvalidRequestError(
                f"loop of {self._run.name}: expected {method} within its with block"
            )

    @property
    def _is_leader(self) -> bool:
        """True in process 0 of a job, and in a process alone."""
        return self._decisions is None or self._decisions.is_leader

    def _describe_error(self, error: BaseException | None) -> str:
        saves = self._saves
        if self._step is None:
            ended = "no step was left" if self._is_complete else "ended before a step"
        elif self._sigterm_step is not None:
            ended = f"received SIGTERM at step {self._sigterm_step}"
        elif error is not None:
            ended = f"failed at step {self._step}"
        elif self._step == self._last_step:
            ended = f"finished at step {self._step}"
        else:
            ended = f"ended at step {self._step}"
        if error is not None:
            ended += f" ({_short(error)})"
        saved = "no step" if saves.saved_step is None else f"step {saves.saved_step}"
        failed = "" if saves.error is None else f"; the last save failed: {saves.error}"
        return f"{ended}; saved {saved}{failed}"


def _find_modules(state: Any) -> tuple[Any, Any] | None:
    """Returns an NNX module and its optimizer, or None, if the state is these."""
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return None
    is_pair = type(state) in (tuple, list) and len(state) == 2
    model, optimizer = state if is_pair else (state, None)
    is_trained = optimizer is None or isinstance(optimizer, nnx.Optimizer)
    return (model, optimizer) if isinstance(model, nnx.Module) and is_trained else None


def _short(error: BaseException) -> str:
    text = str(error)  # "" of Ctrl-C
    name = type(error).__name__
    return f"{name}: {text}"[:_SHOWN] if text else name
