"""Opens checkpoints, by this process alone or by all processes of a job together.

Process 0 of a job chooses the checkpoint for all. With ``on_damage="older"`` it is the
newest one that is whole. A checkpoint is damaged if its record, its manifest or a chunk
that is read is. A damaged record is found by process 0 alone, in the list of the run; a
damaged manifest or chunk may be found by any process, so all of them agree after a
failed attempt whether damage was the cause, and then all step back.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from storesvc.format.names import LATEST, CheckpointName, Which
from storesvc_client._api.groups import update_checkpoint
from storesvc_client._rpc.connection import RunStub
from storesvc_client._session import Session
from storesvc_client._values.arguments import (
    MAX_TEXT_BYTES,
    NEVER,
    Deadline,
    DurationLike,
    checked_choice,
    checked_duration,
    parse_received,
)
from storesvc_client._values.models import Checkpoint
from storesvc_client._values.options import (
    DEFAULT_DEADLINE,
    THIS_PROCESS,
    Distributed,
    OnDamaged,
    RestoreRequest,
    checked_distributed,
)
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    MismatchError,
    StoreError,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from storesvc_client._job.job import Job
    from storesvc_client._mapping.rules import Rules
    from storesvc_client._restore.checkpoint import CheckpointReader, OpenCheckpoint
    from storesvc_client._restore.joint import JointRestore
    from storesvc_client._restore.open_tree import TreeReader

DAMAGE_LABEL: Final = "damage"
"""Label that a damaged checkpoint gets, with the damage as its text."""

_SHOWN: Final = 3
"""Damaged checkpoints that an error describes."""

_log = logging.getLogger("storesvc_client")


@dataclass(slots=True)
class NewestWhole:
    """Chooses checkpoints of a run, the newest first, and skips damaged ones."""

    stub: RunStub
    damaged: dict[int, str] = field(default_factory=dict)
    """Damage that was found, by step."""
    tried: int | None = None
    """Step of the last choice; None if there was none to choose."""

    def choose(self, deadline: Deadline) -> CheckpointName:
        """Returns the newest checkpoint that is not known to be damaged.

        Raises:
            NotFoundError: There is no such run, or it has no checkpoint.
            DataLossError: All its checkpoints are damaged; lists them.
        """
        self.tried = None
        request = api.ListCheckpointsRequest(parent=self.stub.name.resource)
        rows = self.stub.rows(
            self.stub.service.ListCheckpoints,
            request,
            lambda page: page.checkpoints,
            self._note_record,
        )
        for message in rows:
            step = Checkpoint.from_message(message).step
            if step not in self.damaged and not message.HasField("delete_time"):
                self.tried = step
                return CheckpointName(self.stub.name, step)
        if not self.damaged:
            return self.stub.step_name("latest", deadline)  # raises the exact error
        shown = islice(self.damaged.items(), _SHOWN)
        found = "; ".join(f"step {step}: {why}" for step, why in shown)
        rest = len(self.damaged) - _SHOWN
        more = f"; and {rest:,} more, which the log names" if rest > 0 else ""
        raise DataLossError(
            f"{self.stub.name} has no whole checkpoint: {found}{more}",
            reason="CORRUPT_DATA",
        )

    def note(self, step: int, damage: str) -> None:
        """Notes the damage of a checkpoint, and logs it once."""
        if step not in self.damaged:
            self.damaged[step] = damage
            _log.warning(
                "%s@%d is damaged; the next older checkpoint is tried: %s",
                *(self.stub.name, step, damage),
            )

    def to_text(self, name: CheckpointName) -> str:
        """Returns a choice, with the damage so far, as text for other processes."""
        return json.dumps({"name": name.resource, "damaged": self.damaged})

    def take(self, text: str) -> CheckpointName:
        """Takes over the choice and the damage that process 0 has published."""
        chosen = json.loads(text)
        for step, damage in chosen["damaged"].items():
            self.note(int(step), damage)
        name = CheckpointName.from_resource(chosen["name"])
        assert isinstance(name.which, int)
        self.tried = name.which
        return name

    def mark(self) -> None:
        """Labels the damaged checkpoints, so that lists show the damage, and watches
        report it: an update of labels is in the journal. A damaged record cannot be
        changed, nor can a store that is read-only; this is logged."""
        for step, damage in self.damaged.items():
            name = self.stub.checkpoint_name(step).resource
            request = api.GetCheckpointRequest(name=name)
            try:
                found = self.stub.ask(self.stub.service.GetCheckpoint, request)
                checkpoint = Checkpoint.from_message(found.checkpoint)
                if DAMAGE_LABEL in checkpoint.labels:
                    continue
                text = damage.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
                update_checkpoint(
                    self.stub,
                    step,
                    labels={**checkpoint.labels, DAMAGE_LABEL: text},
                    etag=checkpoint.etag,
                )
            except StoreError as e:
                _log.info("%s@%d was not labelled: %s", self.stub.name, step, e)

    def _note_record(self, error: DataLossError) -> None:
        name = parse_received(CheckpointName.from_resource, error.metadata["name"])
        assert isinstance(name.which, int)
        self.note(name.which, str(error))


T = TypeVar("T")

Prepare: TypeAlias = (
    "Callable[[TreeReader], tuple[RestoreRequest, Callable[[Any], None]]]"
)
"""Returns the request for a checkpoint, and a function that gets what is
restored."""


class Opening:
    """Opens a checkpoint; if it is damaged, an older one, where that is asked for."""

    def __init__(
        self,
        session: Session,
        stub: RunStub,
        which: Which,
        *,
        distributed: Distributed = THIS_PROCESS,
        deadline: DurationLike = DEFAULT_DEADLINE,
        on_damage: OnDamaged = "raise",
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
        self._migrates = False
        self._newest: NewestWhole | None = None

    def _use(
        self, act: "Callable[[CheckpointReader, JointRestore | None, Deadline], T]"
    ) -> T:
        """Returns what ``act`` makes of the checkpoint.

        In a job, the checkpoint is the one that process 0 chooses; ``act`` gets the
        restore of all processes, which an error within it ends in all of them.
        """
        # Late, as it imports NumPy: lists of checkpoints must not wait for it.
        from storesvc_client._restore.joint import join_restore

        job: Job | None = None
        # Without jax, this process is of no job; reading items must not import it.
        if self._takes_all and "jax" in sys.modules:
            from storesvc_client._pytree.jax_job import find_job

            job = find_job()
        while True:
            joint = None
            try:
                with join_restore(job, self._place) as joint:
                    result = act(self._read_checkpoint(job, joint), joint, self._ends)
                break
            except StoreError as e:
                if not self._steps_back(joint, e):
                    raise
        if self._newest is not None and (job is None or job.index == 0):
            self._newest.mark()
        return result

    def open(self) -> "OpenCheckpoint":
        """Opens as ``Run.open``: in a job, once all processes have the same one."""
        from storesvc_client._restore.checkpoint import OpenCheckpoint

        return OpenCheckpoint(self.read(migrates=False))

    def read(self, *, migrates: bool) -> "CheckpointReader":
        """Returns the reader of the checkpoint; see ``open``.

        Args:
            migrates: Whether restores apply the migrations of the run.
        """
        self._migrates = migrates

        def act(
            reader: "CheckpointReader", joint: "JointRestore | None", _: Deadline
        ) -> "CheckpointReader":
            if joint is not None:
                joint.check(reader.info.uid, "")
            return reader

        return self._use(act)

    def restore(
        self,
        request: RestoreRequest | None = None,
        *,
        prepare: "Prepare | None" = None,
        data: "tuple[str, Any] | None" = None,
        older: "Rules | None" = None,
    ) -> "tuple[OpenCheckpoint, Any]":
        """Restores as ``Run.restore``; returns the checkpoint, which has the report,
        and the state.

        Args:
            request: What to restore.
            prepare: Returns what to restore, instead of ``request``.
            data: Name of an item, and the object that gets it; see
                ``Items.restore_into``. Its damage counts, too.
            older: Rules that apply in place of migrations, to the checkpoints that they
                fit.
        """
        from storesvc_client._restore.checkpoint import OpenCheckpoint

        def act(
            reader: "CheckpointReader", joint: "JointRestore | None", ends: Deadline
        ) -> "tuple[OpenCheckpoint, Any]":
            # The item is read first, so that its damage, or another number of
            # processes, is known before the tree is read, and in a job by all
            # processes.
            give = reader.items.prepare_restore(*data) if data else lambda: None
            wanted, put = request, None
            reader.older = older
            try:
                if prepare is not None:
                    wanted, put = prepare(reader.map_or_migrate(None))
                state = reader.restore_within(joint, ends, wanted or RestoreRequest())
            except MismatchError as e:
                if reader.unfit is not None:
                    e.add_note(f"mapping= does not apply to it: {reader.unfit}")
                raise
            if put is not None:
                put(state)
            give()
            # an open checkpoint is as it is stored
            reader.migrations, reader.older = (), None
            return OpenCheckpoint(reader), state

        has_mapping = request is not None and request.mapping is not None
        self._migrates = not has_mapping and older is None
        # The manifest is read in the same trace, which has all attempts.
        run = str(self._stub.name)
        with self._session.telemetry.tracing("storesvc.run.restore", run=run):
            return self._use(act)

    def _read_checkpoint(
        self, job: "Job | None", joint: "JointRestore | None"
    ) -> "CheckpointReader":
        from storesvc_client._restore.checkpoint import read_checkpoint

        if self._ends is NEVER:  # here, where all processes learn of a wrong argument
            self._check()
        name = self._stub.checkpoint_name(self._which)
        newest, ends = self._newest, self._ends
        if newest is not None and joint is None:
            name = newest.choose(ends)
        elif newest is not None and joint is not None:  # process 0 chooses for all
            text = joint.begin(
                f"{name} or an older one",
                lambda: newest.to_text(newest.choose(ends)),
                ends,
            )
            name = newest.take(text)
        elif joint is not None:
            found = joint.begin(
                str(name),
                lambda: self._stub.step_name(self._which, ends).resource,
                ends,
            )
            name = CheckpointName.from_resource(found)
        return read_checkpoint(
            self._session,
            name,
            job=job,
            spread=self._spread,
            deadline=ends,
            damaged={} if newest is None else newest.damaged,
            with_migrations=self._migrates,
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

    def _steps_back(self, joint: "JointRestore | None", error: StoreError) -> bool:
        """Returns whether an older checkpoint is to be tried after an error."""
        newest = self._newest
        if newest is None:
            return False
        if joint is None:
            damage = str(error) if isinstance(error, DataLossError) else ""
        else:
            damage = joint.agree_on_damage(error, is_final=newest.tried is None)
        if not damage or newest.tried is None:
            return False
        newest.note(newest.tried, damage)
        return True
