"""Opens checkpoints, by this process alone or by all processes of a job together."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from storesvc.format.names import CheckpointName, Which
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._session import Session
from storesvc_client._values.durations import (
    Deadline,
    DurationLike,
    checked_duration,
)
from storesvc_client._values.options import Distributed, checked_distributed

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._restore.joint_restore import JointRestore

    Opened: TypeAlias = tuple[OpenCheckpoint, JointRestore | None, Deadline]


@contextmanager
def opening(
    session: Session, stub: RunStub, distributed: Distributed
) -> "Generator[Callable[[Which, DurationLike], Opened]]":
    """Yields a function that opens a checkpoint within a duration.

    In a job it opens the checkpoint that process 0 resolves, and returns the restore of
    all processes, which an error within the context ends in all of them.
    """
    place = str(stub.name)
    takes_all = checked_distributed(place, distributed).processes == "all"
    # Late, as these import jax and NumPy: lists of checkpoints must not wait for them.
    from storesvc_client._restore.joint_restore import together
    from storesvc_client._restore.open import open_checkpoint

    job = None
    # Without jax, this process is of no job; reading items must not import it.
    if takes_all and "jax" in sys.modules:
        from storesvc_client._pytree.jax_job import job_of_process

        job = job_of_process()
    with together(job, place) as joint:

        def open_in_time(which: Which, duration: DurationLike) -> "Opened":
            length = checked_duration(f"{place}: deadline=", duration)
            ends = Deadline.after(length.total_seconds())
            name = stub.checkpoint_name(which)
            if joint is not None:
                found = joint.begin(
                    str(name), lambda: stub.step_name(which, ends).resource, ends
                )
                name = CheckpointName.from_resource(found)
            opened = open_checkpoint(
                session, name, job=job, spread=distributed.spread, deadline=ends
            )
            return opened, joint, ends

        yield open_in_time
