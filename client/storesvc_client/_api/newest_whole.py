"""The newest checkpoint that is whole, for ``on_damage="older"``.

A checkpoint is damaged if its record, its manifest or a chunk that is read is. Process
0 of a job chooses the checkpoint for all. A damaged record is found by it alone, in the
list of the run; a damaged manifest or chunk may be found by any process, so all of them
agree after a failed attempt whether damage was the cause, and then all step back.
"""

import json
import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from storesvc.format.names import CheckpointName
from storesvc_client._api.lifecycle import update_checkpoint
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._values.arguments import MAX_TEXT_BYTES, Deadline, received
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import DataLossError, StoreError
from storesvc_proto.v1 import checkpoint_service_pb2 as api

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
            try:
                self._mark(step, damage)
            except StoreError as e:
                _log.info("%s@%d was not labelled: %s", self.stub.name, step, e)

    def _mark(self, step: int, damage: str) -> None:
        name = self.stub.checkpoint_name(step).resource
        request = api.GetCheckpointRequest(name=name)
        found = self.stub.ask(self.stub.service.GetCheckpoint, request).checkpoint
        checkpoint = Checkpoint.from_message(found)
        if DAMAGE_LABEL in checkpoint.labels:
            return
        text = damage.encode()[:MAX_TEXT_BYTES].decode(errors="ignore")
        update_checkpoint(
            self.stub,
            step,
            labels={**checkpoint.labels, DAMAGE_LABEL: text},
            metrics=None,
            pinned=None,
            etag=checkpoint.etag,
        )

    def _note_record(self, error: DataLossError) -> None:
        name = received(CheckpointName.from_resource, error.metadata["name"])
        assert isinstance(name.which, int)
        self.note(name.which, str(error))
