"""Checkpoints whose manifests were read, kept for the next page.

The tree of a checkpoint never changes, so it is kept by the checkpoint's uid; its
record (labels, pin, deletion) is read for each page.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from storesvc.format.names import Which
from storesvc_client import Checkpoint, LeafInfo, NotFoundError, OpenCheckpoint, Run
from storesvc_client._documents.checkpoints import deleted_checkpoint
from storesvc_client._values.texts import Node, grow
from storesvc_client.console.leaf_values import LeafValues, read_values

_KEPT: Final = 6
"""Checkpoints that are kept; one of 100,000 leaves takes some 100 MB."""

_KEPT_LEAVES: Final = 32
"""Leaves of a checkpoint whose first values and statistics are kept."""


class Content:
    """The tree of one checkpoint."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened = opened
        self._lock = threading.Lock()
        self._values: OrderedDict[str, LeafValues] = OrderedDict()

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Top nodes of the tree."""
        return grow(self.opened.leaves.values())

    def values(self, leaf: LeafInfo) -> LeafValues:
        """Returns the values of a leaf; reads one leaf at a time, and keeps the last
        ones.

        Raises:
            StoreError: As for ``OpenCheckpoint.read``.
        """
        with self._lock:
            if leaf.key not in self._values:
                self._values[leaf.key] = read_values(self.opened, leaf)
            self._values.move_to_end(leaf.key)
            while len(self._values) > _KEPT_LEAVES:
                self._values.popitem(last=False)
            return self._values[leaf.key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint; a deleted one has a record only."""

    checkpoint: Checkpoint
    content: Content | None
    is_deferred: bool = False
    """True if its tree is too large to wait for, and was not read."""


class OpenedCheckpoints:
    """Opens checkpoints, and keeps the last ones; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Content] = OrderedDict()

    def find(self, run: Run, which: Which, *, most: int | None = None) -> Found:
        """Returns a checkpoint, deleted ones included.

        Args:
            run: Run of the checkpoint.
            which: Step, "latest" or tag.
            most: Leaves above which a tree is not read, unless it is kept; None reads
                any.

        Raises:
            StoreError: As for ``Run.open``.
        """
        try:
            checkpoint = run.checkpoint(which)
        except NotFoundError as e:
            return Found(checkpoint=deleted_checkpoint(run, e), content=None)
        content = self._kept_content(_key(checkpoint))
        if content is None and most is not None and checkpoint.leaf_count > most:
            return Found(checkpoint=checkpoint, content=None, is_deferred=True)
        content = content or self._read(run, checkpoint)
        return Found(checkpoint=checkpoint, content=content)

    def _kept_content(self, key: str) -> Content | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _read(self, run: Run, checkpoint: Checkpoint) -> Content:
        content = Content(run.open(checkpoint.step))
        with self._lock:
            self._kept[_key(checkpoint)] = content
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return content


def _key(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.run}:{checkpoint.uid}"
