"""A model of a store: its expected content, without any storage."""

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
"""Chunks of every tree; each has one of a few versions."""

Refusal: TypeAlias = type[StoreError] | None


@dataclass(eq=False)
class Checkpoint:
    """A committed checkpoint that is not purged."""

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
    """An upload of a step."""

    uid: str
    step: int
    epoch: int
    base: Checkpoint | None
    predecessor: "Upload | None"
    last_sign: float
    """Time of its last renewal, by the monotonic clock."""
    state: str = "live"
    """live, superseded, aborted or committed."""
    sent: dict[int, set[int]] = field(default_factory=dict)
    """Versions that it sent, by chunk."""
    servers: dict[int, int] = field(default_factory=dict)
    """The server that received each chunk last."""
    receipt: dict[int, int] | None = None
    """Last accepted receipt; chunks sent after it change nothing."""

    def can_claim(self, chunk: int, version: int) -> bool:
        """Returns whether a chunk need not be sent."""
        if self.base and not self.base.is_gone and self.base.content[chunk] == version:
            return True
        return bool(self.predecessor and self.predecessor.has_sent(chunk, version))

    def has_sent(self, chunk: int, version: int) -> bool:
        """Whether it sent that, whatever else it sent of the chunk."""
        return version in self.sent.get(chunk, ())

    def iterate_needed(self, content: Mapping[int, int]) -> dict[int, int]:
        """Returns the chunks of a content that must be sent."""
        return {
            chunk: version
            for chunk, version in content.items()
            if not self.has_sent(chunk, version) and not self.can_claim(chunk, version)
        }

    def send(self, versions: Mapping[int, int], server: int) -> None:
        """Sends chunks to a server."""
        for chunk, version in versions.items():
            self.sent.setdefault(chunk, set()).add(version)
            self.servers[chunk] = server

    def may_omit(self, receipt: Mapping[int, int], server: int) -> bool:
        """Returns whether a server may accept a receipt that omits chunks: it need not
        look for those that another server received, see ``FinishWriter``."""
        omitted = self.sent.keys() - receipt.keys()
        elsewhere = all(self.servers[chunk] != server for chunk in omitted)
        return bool(omitted) and elsewhere and not self.iterate_needed(receipt)

    def finish_refusal(self, receipt: Mapping[int, int]) -> Refusal:
        """Returns the expected response to a receipt."""
        if not self.sent.keys() <= receipt.keys():
            return InvalidChunkError
        needed = self.iterate_needed(receipt)
        if needed.keys() & self.sent.keys():
            return InvalidChunkError
        return ChunksIncompleteError if needed else None

    def commit_refusal(self) -> Refusal:
        """Returns the expected response to a commit of a live upload."""
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
    """Content of a run."""

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
        """Yields the uploads that own their step."""
        return (u for u in self.owners.values() if u.state == "live")

    def users(self, checkpoint: Checkpoint) -> bool:
        """Returns whether something needs a checkpoint."""
        return (
            checkpoint in self.tags.values()
            or any(hold.checkpoint is checkpoint for hold in self.holds.values())
            or any(upload.base is checkpoint for upload in self.live())
        )

    def begun(self, upload: Upload) -> None:
        """Records that an upload has taken its step."""
        before = self.owners.get(upload.step)
        if before is not None and before.state == "live":
            before.state = "superseded"
        self.owners[upload.step] = upload

    def refusal(self, upload: Upload) -> Refusal:
        """Returns the expected error of calls of an upload that is not live."""
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
        """Records that a checkpoint is committed."""
        assert upload.receipt is not None
        content = tuple(upload.receipt[chunk] for chunk in range(CHUNKS))
        upload.state = "committed"
        made = Checkpoint(upload.uid, upload.step, content)
        self.checkpoints[upload.step] = made
        self.events.append(("committed", upload.uid))
        return made

    def purge(self, checkpoint: Checkpoint) -> None:
        """Records that a checkpoint is purged."""
        checkpoint.is_gone = True
        del self.checkpoints[checkpoint.step]
        self.owners[checkpoint.step].state = "aborted"
