"""Opens checkpoints, by this process alone or by all processes of a job together."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, Unpack

from storesvc.format.names import LATEST, CheckpointName, Which
from storesvc_client._api.newest_whole import NewestWhole
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._session import Session
from storesvc_client._values.arguments import (
    NEVER,
    Deadline,
    DurationLike,
    checked_choice,
    checked_duration,
)
from storesvc_client._values.options import (
    Distributed,
    OnDamaged,
    RestoreKeywords,
    checked_distributed,
)
from storesvc_client.errors import DataLossError, InvalidRequestError, StoreError

if TYPE_CHECKING:
    from storesvc_client._job.job import Job
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._restore.joint_restore import JointRestore

T = TypeVar("T")

Prepare: TypeAlias = (
    "Callable[[OpenCheckpoint], tuple[dict[str, Any], Callable[[Any], None]]]"
)


class OpenKeywords(TypedDict):
    """Keyword arguments of ``Run.open`` and ``Run.restore``."""

    distributed: Distributed
    deadline: DurationLike
    on_damage: OnDamaged


def open_checked(
    session: Session, stub: RunStub, which: Which, **how: Unpack[OpenKeywords]
) -> "OpenCheckpoint":
    """Opens a checkpoint as ``Run.open``."""

    def check(
        opened: "OpenCheckpoint", joint: "JointRestore | None", _: Deadline
    ) -> "OpenCheckpoint":
        if joint is not None:
            joint.check(opened.info.uid, "")
        return opened

    return Opening(session, stub, which, **how).use(check)


def restored(
    session: Session,
    stub: RunStub,
    which: Which,
    *,
    distributed: Distributed,
    deadline: DurationLike,
    on_damage: OnDamaged,
    data: "tuple[str, Any] | None" = None,
    prepare: "Prepare | None" = None,
    **options: Unpack[RestoreKeywords],
) -> "tuple[OpenCheckpoint, Any]":
    """Restores as ``Run.restore``; returns the checkpoint, which has the report, and
    the state.

    Args:
        session: Connection to the store.
        stub: The run.
        which: A step, "latest", or a tag.
        distributed: As for ``Run.restore``.
        deadline: As for ``Run.restore``.
        on_damage: As for ``Run.restore``; damage of the item counts, too.
        data: Name of an item, and the object that gets it; see ``Items.restore_into``.
        prepare: Returns the options for an open checkpoint, and a function that gets
            what is restored.
        **options: As for ``Run.restore``, without ``prepare``.
    """

    def restore(
        opened: "OpenCheckpoint", joint: "JointRestore | None", ends: Deadline
    ) -> "tuple[OpenCheckpoint, Any]":
        # The item is read first, so that its damage, or another number of processes, is
        # known before the tree is read, and in a job by all processes.
        give = opened.items.prepare_restore(*data) if data else lambda: None
        wanted, put = (options, None) if prepare is None else prepare(opened)
        state = opened._restored(  # noqa: SLF001 - within the rendezvous of `open`
            joint, ends, **wanted
        )
        if put is not None:
            put(state)
        give()
        return opened, state

    opening = Opening(
        session,
        stub,
        which,
        distributed=distributed,
        deadline=deadline,
        on_damage=on_damage,
    )
    # The manifest is read in the same trace, which has all attempts.
    with session.telemetry.tracing("storesvc.run.restore", run=str(stub.name)):
        return opening.use(restore)


class Opening:
    """Opens a checkpoint; if it is damaged, an older one, where that is asked for."""

    def __init__(
        self,
        session: Session,
        stub: RunStub,
        which: Which,
        *,
        distributed: Distributed,
        deadline: DurationLike,
        on_damage: OnDamaged,
    ) -> None:
        """Prepares to open it, with the arguments of ``Run.open``."""
        self._session = session
        self._stub = stub
        self._which = which
        self._deadline = deadline
        self._on_damage = on_damage
        self._place = str(stub.name)
        self._takes_all = (
            checked_distributed(self._place, distributed).processes == "all"
        )
        self._spread = distributed.spread
        self._ends = NEVER
        self._newest: NewestWhole | None = None

    def use(
        self, act: "Callable[[OpenCheckpoint, JointRestore | None, Deadline], T]"
    ) -> T:
        """Returns what ``act`` makes of the open checkpoint.

        In a job, the checkpoint is the one that process 0 chooses; ``act`` gets the
        restore of all processes, which an error within it ends in all of them.
        """
        # Late, as it imports NumPy: lists of checkpoints must not wait for it.
        from storesvc_client._restore.joint_restore import together

        job = self._job()
        while True:
            joint = None
            try:
                with together(job, self._place) as joint:
                    result = act(self._opened(job, joint), joint, self._ends)
                break
            except StoreError as e:
                if not self._steps_back(joint, e):
                    raise
        if self._newest is not None and (job is None or job.index == 0):
            self._newest.mark()
        return result

    def _job(self) -> "Job | None":
        # Without jax, this process is of no job; reading items must not import it.
        if not self._takes_all or "jax" not in sys.modules:
            return None
        from storesvc_client._pytree.jax_job import job_of_process

        return job_of_process()

    def _opened(
        self, job: "Job | None", joint: "JointRestore | None"
    ) -> "OpenCheckpoint":
        from storesvc_client._restore.checkpoint import open_checkpoint

        if self._ends is NEVER:  # here, where all processes learn of a wrong argument
            self._check()
        name = self._stub.checkpoint_name(self._which)
        newest, ends = self._newest, self._ends
        if newest is not None:
            name = self._chosen(newest, name, joint)
        elif joint is not None:
            found = joint.begin(
                str(name),
                lambda: self._stub.step_name(self._which, ends).resource,
                ends,
            )
            name = CheckpointName.from_resource(found)
        return open_checkpoint(
            self._session,
            name,
            job=job,
            spread=self._spread,
            deadline=ends,
            damaged={} if newest is None else newest.damaged,
        )

    def _check(self) -> None:
        length = checked_duration(f"{self._place}: deadline=", self._deadline)
        checked_choice(f"{self._place}: on_damage=", self._on_damage, OnDamaged)
        if self._on_damage == "older":
            if self._which != LATEST:
                raise InvalidRequestError(
                    f"{self._place}: on_damage='older': expected 'latest', got "
                    f"{self._which!r}; a checkpoint that is named is never replaced by "
                    "another one"
                )
            self._newest = NewestWhole(self._stub)
        self._ends = Deadline.after(length.total_seconds())

    def _chosen(
        self,
        newest: NewestWhole,
        name: CheckpointName,
        joint: "JointRestore | None",
    ) -> CheckpointName:
        """Returns the newest checkpoint not known to be damaged; process 0's choice."""
        if joint is None:
            return newest.choose(self._ends)
        text = joint.begin(
            f"{name} or an older one",
            lambda: newest.to_text(newest.choose(self._ends)),
            self._ends,
        )
        return newest.take(text)

    def _steps_back(self, joint: "JointRestore | None", error: StoreError) -> bool:
        """Returns whether an older checkpoint is to be tried after an error."""
        newest = self._newest
        if newest is None:
            return False
        if joint is None:
            damage = str(error) if isinstance(error, DataLossError) else ""
        else:
            damage = joint.agreed_damage(error, is_final=newest.tried is None)
        if not damage or newest.tried is None:
            return False
        newest.note(newest.tried, damage)
        return True
