"""The checkpoint that a revision of a repository names, with its files.

A repository is a run. A revision is "main" or "latest", a tag, a step, or a commit id:
40 hexadecimal digits, computed from the uid of the checkpoint and from what makes its
files: the rules of the mapping, the selected leaves and the size of the shards.

The record of the checkpoint is read for each request, so that a deletion, or a role
that was taken away, is seen by the next one. The tree never changes, and is kept.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Final

from storesvc.format.names import InvalidNameError, Which, parse_which
from storesvc_client import (
    Checkpoint,
    Client,
    InvalidRequestError,
    NotFoundError,
    Run,
)
from storesvc_client._export.elements import Source
from storesvc_client._export.safetensors import MAX_SHARD_BYTES
from storesvc_client._hub.served_files import ServedFile, make_files, read_range
from storesvc_client._mapping.planning import plan_mapping
from storesvc_client._mapping.rules import Rules
from storesvc_client._restore.checkpoint import CheckpointReader
from storesvc_client._restore.open_tree import get_reader
from storesvc_client._values.arguments import shown

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")

_KEPT: Final = 4
"""Checkpoints whose trees are kept; one of 100,000 leaves takes some 100 MB."""

_KEPT_COMMITS: Final = 1000
"""Commit ids that are kept with their steps."""

_SEARCHED: Final = 200
"""Newest checkpoints among which a commit id is looked for that was not given out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Options that make files of checkpoints; the same for all of them."""

    rules: Rules | None = None
    """Rules of the mapping; None serves the stored tree."""
    select: Sequence[str] = ()
    """Globs of the keys that are served; none serves all."""
    shard_bytes: int = MAX_SHARD_BYTES
    """Maximum bytes of the elements of a safetensors file."""

    def commit(self, checkpoint: Checkpoint) -> str:
        """Returns the commit id of a checkpoint."""
        rules = self.rules.digest if self.rules else ""
        parts = [checkpoint.uid, rules, str(self.shard_bytes), *self.select]
        return sha256("\n".join(parts).encode()).hexdigest()[:40]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Snapshot:
    """One checkpoint as files."""

    checkpoint: Checkpoint
    commit: str
    files: Mapping[str, ServedFile]
    source: Source
    reader: CheckpointReader

    def read(self, file: ServedFile, start: int, stop: int) -> Generator[memoryview]:
        """Yields bytes of a file; the checkpoint is held while elements are read.

        The header needs none: it is sent at once, and not after the write of a hold.

        Raises:
            StoreError: The bytes cannot be read, or are damaged.
        """
        if start < min(stop, len(file.header)):
            yield memoryview(file.header)[start:stop]
        if stop <= len(file.header):
            return
        with self.reader.hold():
            yield from read_range(self.source, file, start, stop)


class Snapshots:
    """Finds checkpoints, and keeps the last ones; threads may share it."""

    def __init__(self, client: Client, view: View) -> None:
        self._client = client
        self._view = view
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Snapshot] = OrderedDict()
        self._opening: dict[tuple[str, str], threading.Lock] = {}
        self._steps: OrderedDict[tuple[str, str], int] = OrderedDict()

    def find(self, repository: str, revision: str) -> Snapshot:
        """Returns the checkpoint of a revision.

        Raises:
            NotFoundError: There is no such run, or it has no such revision.
            PreconditionError: Safetensors cannot hold a leaf.
            MismatchError: The rules of the mapping do not fit.
        """
        run = self._find_run(repository)
        checkpoint = self._find_checkpoint(run, revision)
        # by run, too: a copy of a checkpoint may be in a run that another may not read
        key = run.name, self._view.commit(checkpoint)
        with self._lock:
            self._steps[key] = checkpoint.step
            self._steps.move_to_end(key)
            while len(self._steps) > _KEPT_COMMITS:
                self._steps.popitem(last=False)
            opening = self._opening.setdefault(key, threading.Lock())
        with opening:  # requests for the same one wait, and read its manifest once
            try:
                return self._open(run, checkpoint, key)
            finally:
                with self._lock:
                    self._opening.pop(key, None)

    def _open(self, run: Run, checkpoint: Checkpoint, key: tuple[str, str]) -> Snapshot:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        reader = get_reader(run.open(checkpoint.step))
        assert isinstance(reader, CheckpointReader)
        if reader.info.uid != checkpoint.uid:
            raise NotFoundError(
                f"{reader.name} was deleted, and saved again, in the meantime; try "
                "again",
                reason="CHECKPOINT_NOT_FOUND",
            )
        view = self._view
        mapping = None
        if view.rules is not None:
            mapping = plan_mapping(view.rules, reader.tree, name=reader.name)
        source = reader.make_export_source([*view.select] or None, mapping)
        found = Snapshot(
            checkpoint=checkpoint,
            commit=key[1],
            files=make_files(source, commit=key[1], shard_bytes=view.shard_bytes),
            source=source,
            reader=reader,
        )
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _find_run(self, name: str) -> Run:
        try:
            return self._client.run(name)
        except InvalidRequestError as e:
            raise NotFoundError(
                f"no run can have the name {shown(name)}", reason="RUN_NOT_FOUND"
            ) from e

    def _find_checkpoint(self, run: Run, revision: str) -> Checkpoint:
        if _COMMIT.fullmatch(revision):
            return self._find_commit(run, revision)
        which: Which = "latest"
        if revision != "main":
            try:
                which = parse_which(revision)
            except InvalidNameError as e:
                raise _make_unknown(run, revision) from e
        return run.checkpoint(which)

    def _find_commit(self, run: Run, commit: str) -> Checkpoint:
        with self._lock:
            step = self._steps.get((run.name, commit))
        for checkpoint in (
            islice(run.checkpoints(), _SEARCHED)
            if step is None
            else [run.checkpoint(step)]
        ):
            if self._view.commit(checkpoint) == commit:
                return checkpoint
        raise _make_unknown(run, commit)


def _make_unknown(run: Run, revision: str) -> NotFoundError:
    return NotFoundError(
        f"{run.name} has no revision {shown(revision)}; expected main, a tag, a step "
        "or a commit id of this hub",
        reason="TAG_NOT_FOUND",
    )
