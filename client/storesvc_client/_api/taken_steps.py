"""Steps that a training loop comes to, and that other checkpoints have.

A run is rewound by deleting its newest checkpoints. Until they are purged they can be
undeleted, and no other checkpoint can be saved at their steps. Nor can one at the step
of a damaged checkpoint, from which a restore has stepped back.
"""

import logging
from collections.abc import Callable, Iterable

from storesvc_client._job.job import Decision, Decisions
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client.errors import NotFoundError
from storesvc_proto.v1 import checkpoint_service_pb2 as api

_log = logging.getLogger("storesvc_client")


class TakenSteps:
    """The taken steps of one loop, the same in all processes of a job."""

    def __init__(
        self, run: str, deleted_steps: Callable[[int], tuple[int, ...]]
    ) -> None:
        """Begins without any.

        Args:
            run: Name of the run.
            deleted_steps: Lists the steps of deleted checkpoints, from a step on.
        """
        self._run = run
        self._deleted_steps = deleted_steps
        self._why = dict[int, str]()
        """State of the checkpoint that has a step: "deleted" or "damaged"."""

    def note(
        self, start: int, decisions: Decisions | None, damaged: Iterable[int] = ()
    ) -> None:
        """Notes the steps from ``start`` on; logs which ones deleted checkpoints have.

        Args:
            start: First step of the loop.
            decisions: Carries what process 0 of a job finds to the others.
            damaged: Steps of damaged checkpoints.

        Raises:
            PeerFailedError: Process 0 has left.
            UnavailableError: The store does not answer.
        """
        if decisions is None or decisions.is_leader:
            deleted = self._deleted_steps(start)
            if decisions is not None:
                decisions.publish(Decision(step=start, taken=deleted))
        else:
            deleted = decisions.await_next(start).taken
        self._why = dict.fromkeys(deleted, "deleted") | dict.fromkeys(
            damaged, "damaged"
        )
        if deleted:
            _log.warning(
                "%s has deleted checkpoints from step %d to %d, which are not purged: "
                "where one of these steps is due, the next step is saved instead",
                *(self._run, deleted[-1], deleted[0]),
            )

    def has(self, step: int) -> bool:
        """Returns whether another checkpoint has this step; logs it."""
        why = self._why.get(step)
        if why is None:
            return False
        _log.warning(
            "%s@%d is not saved: a %s checkpoint has this step; the next step is saved "
            "instead",
            *(self._run, step, why),
        )
        return True


def deleted_steps(stub: RunStub, start: int) -> tuple[int, ...]:
    """Returns the steps from ``start`` on of deleted checkpoints, the highest first.

    Raises:
        UnavailableError: The store does not answer.
    """
    request = api.ListCheckpointsRequest(parent=stub.name.resource, show_deleted=True)
    rows = stub.rows(
        stub.service.ListCheckpoints,
        request,
        lambda page: page.checkpoints,
        lambda _: None,  # the restore reports damaged records
    )
    found = list[int]()
    try:
        for row in rows:
            if row.step < start:
                break
            if row.HasField("delete_time"):
                found.append(row.step)
    except NotFoundError:
        pass  # there is no such run yet
    return tuple(found)
