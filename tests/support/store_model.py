"""The plain model of a store: what it should hold, without any storage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TypeAlias

from storesvc.errors import (
    CheckpointExistsError,
    ChunksIncompleteError,
    InvalidChunkError,
    StoreError,
    UploadNotFoundError,
    UploadSupersededError,
    WriterUnfinishedError,
)

CHUNKS = 3
"""Chunks of every tree; each holds one of a few versions."""

Refusal: TypeAlias = type[StoreError] | None


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint that was committed, and is not purged."""

    uid: str
    step: int
    content: tuple[int, ...]
    """The version of each chunk."""
    deleted: bool = False
    purge_time: datetime | None = None
    pinned: bool = False
    is_gone: bool = False
    """Purged; only bases still point to it."""


@dataclass(eq=False)
class Upload:
    """An upload."""

    uid: str
    step: int
    epoch: int
    base: Checkpoint | None
    predecessor: "Upload | None"
    last_sign: float
    """By the clock that never goes back."""
    state: str = "live"
    """live, superseded, aborted or committed."""
    sent: dict[int, set[int]] = field(default_factory=dict)
    """The versions of each chunk that it sent."""
    receipt: dict[int, int] | None = None
    """The last one that was taken; what is sent after it changes nothing."""

    def can_claim(self, chunk: int, version: int) -> bool:
        """Whether a chunk need not be sent."""
        if self.base and not self.base.is_gone and self.base.content[chunk] == version:
            return True
        return bool(self.predecessor and self.predecessor.has_sent(chunk, version))

    def has_sent(self, chunk: int, version: int) -> bool:
        """Whether it sent that, whatever else it sent of the chunk."""
        return version in self.sent.get(chunk, ())

    def needed(self, content: Mapping[int, int]) -> dict[int, int]:
        """What must be sent of a content."""
        return {
            chunk: version
            for chunk, version in content.items()
            if not self.has_sent(chunk, version) and not self.can_claim(chunk, version)
        }

    def send(self, versions: Mapping[int, int]) -> None:
        """Sends chunks."""
        for chunk, version in versions.items():
            self.sent.setdefault(chunk, set()).add(version)

    def finish_refusal(self, receipt: Mapping[int, int]) -> Refusal:
        """What a receipt is answered with."""
        if not self.sent.keys() <= receipt.keys():
            return InvalidChunkError
        needed = self.needed(receipt)
        if needed.keys() & self.sent.keys():
            return InvalidChunkError
        return ChunksIncompleteError if needed else None

    def commit_refusal(self) -> Refusal:
        """What a commit is answered with, while the upload is live."""
        if self.receipt is None:
            return WriterUnfinishedError
        return ChunksIncompleteError if len(self.receipt) < CHUNKS else None


@dataclass(eq=False)
class Hold:
    """A hold on a checkpoint."""

    id: str
    checkpoint: Checkpoint
    ttl: timedelta
    last_sign: float


class Model:
    """What a run holds."""

    def __init__(self) -> None:
        self.owners: dict[int, Upload] = {}
        """The upload that began last, by step."""
        self.checkpoints: dict[int, Checkpoint] = {}
        """Checkpoints that are not purged, by step."""
        self.tags: dict[str, Checkpoint] = {}
        self.holds: dict[str, Hold] = {}
        self.events: list[tuple[str, str]] = []
        """Events that a watch should report: kind and uid."""

    @property
    def committed(self) -> list[Checkpoint]:
        """Checkpoints that lists show, newest first."""
        found = [c for c in self.checkpoints.values() if not c.deleted]
        return sorted(found, key=lambda c: c.step, reverse=True)

    def live(self) -> Iterator[Upload]:
        """Uploads that hold their step."""
        return (u for u in self.owners.values() if u.state == "live")

    def users(self, checkpoint: Checkpoint) -> bool:
        """Whether something needs a checkpoint."""
        return (
            checkpoint in self.tags.values()
            or any(hold.checkpoint is checkpoint for hold in self.holds.values())
            or any(upload.base is checkpoint for upload in self.live())
        )

    def begun(self, upload: Upload) -> None:
        """An upload has taken its step."""
        before = self.owners.get(upload.step)
        if before is not None and before.state == "live":
            before.state = "superseded"
        self.owners[upload.step] = upload

    def refusal(self, upload: Upload) -> Refusal:
        """What any call of an upload that is not live is answered with."""
        if upload.state == "live":
            return None
        if self.owners[upload.step] is upload:
            if upload.state == "aborted":
                return UploadNotFoundError
            return CheckpointExistsError
        if upload.step in self.checkpoints:
            return CheckpointExistsError
        return UploadSupersededError

    def commit(self, upload: Upload) -> Checkpoint:
        """A checkpoint is there."""
        assert upload.receipt is not None
        content = tuple(upload.receipt[chunk] for chunk in range(CHUNKS))
        upload.state = "committed"
        made = Checkpoint(upload.uid, upload.step, content)
        self.checkpoints[upload.step] = made
        self.events.append(("committed", upload.uid))
        return made

    def purge(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is gone."""
        checkpoint.is_gone = True
        del self.checkpoints[checkpoint.step]
        self.owners[checkpoint.step].state = "aborted"
