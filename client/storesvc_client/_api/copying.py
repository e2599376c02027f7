"""Copies checkpoints of a run into a run of another store; ``Run.copy_to``.

A copy may be interrupted and repeated: a checkpoint that was copied before is skipped,
and the chunks of an interrupted one are used. The order leaves a run that is usable at
any time:

1. Reject what cannot be copied.
2. Create the run with its labels, if it does not exist.
3. Copy checkpoints, in the order of their creation; pin those that are pinned.
4. Set tags, then the retention policy, which might delete what has no tag yet.

Stored chunks are copied as they are. The readers of a restore are used, with their
checks, hedging and retries, on a manifest that describes the same chunks as rows of
bytes: each chunk is then one range, with the elements past the shape of its leaf.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import numpy as np

from storesvc.format.chunks import I64
from storesvc.format.grids import Region
from storesvc.format.manifests import Manifest
from storesvc.format.trees import Leaf, Tree
from storesvc_client._api.groups import (
    Retention,
    Tags,
    get_run,
    update_checkpoint,
    update_run,
)
from storesvc_client._chunks.buffers import Buffer, list_arrays
from storesvc_client._chunks.memory import Bytes, cut_batches
from storesvc_client._chunks.slabs import FilledSlab, Slab, cut_slabs
from storesvc_client._restore.assembly import Assembly
from storesvc_client._restore.checkpoint import CheckpointReader, read_checkpoint
from storesvc_client._save.snapshot import SlabQueue
from storesvc_client._save.transfer import (
    READING_SHARE,
    TransferPlan,
    describe_transfer,
    list_committed,
    transfer,
)
from storesvc_client._telemetry.progress import Meter, ProgressCallback
from storesvc_client._values.models import (
    Checkpoint,
    Transfer,
    with_provenance,
)
from storesvc_client.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from storesvc_client._api.run import RunParts

PREFIX: Final = "copy."
"""Prefix of the labels that record where a checkpoint was copied from."""


def find_origin(checkpoint: Checkpoint) -> str:
    """Returns the uid of the checkpoint that was saved: of the first in a chain of
    copies."""
    return checkpoint.labels.get(f"{PREFIX}uid", checkpoint.uid)


class RunCopy:
    """One copy from a run to another."""

    def __init__(
        self,
        source: "RunParts",
        target: "RunParts",
        progress: ProgressCallback | None = None,
    ) -> None:
        """Creates a copy; nothing is read yet.

        Raises:
            InvalidRequestError: Both are the same run.
        """
        self._from_session, self._from = source.session, source.stub
        self._to_session, self._to = target.session, target.stub
        self._progress = progress
        address = self._from.connection.address.partition("?")[0]
        self._place = f"{address}//{self._from.name}"
        if self._from.connection is self._to.connection and (
            self._from.name == self._to.name
        ):
            raise self._same_run()

    def checkpoints(self, steps: Iterable[int] | None) -> Iterator[Transfer]:
        """Copies checkpoints, and yields each once it is committed or skipped.

        Raises:
            NotFoundError: There is no such run or step.
            AlreadyExistsError: The target has another checkpoint at one of the steps;
                nothing was copied.
            StoreError: A store failed; the checkpoints before are copied.
        """
        # 1. Reject.
        source = get_run(self._from)
        wanted = _find_wanted(self._place, list_committed(self._from), steps)
        present = list_committed(self._to)
        for checkpoint in wanted:
            if checkpoint.step in present:
                if checkpoint.uid == present[checkpoint.step].uid:
                    raise self._same_run()  # by another address of its store
                if find_origin(checkpoint) != find_origin(present[checkpoint.step]):
                    raise AlreadyExistsError(
                        f"{self._to.name}@{checkpoint.step}: expected no checkpoint, "
                        f"or a copy of {self._url(checkpoint)}, got one with another "
                        "origin; copy to another run, or only the other steps",
                        reason="CHECKPOINT_EXISTS",
                    )
        # 2. The run.
        try:
            get_run(self._to)
        except NotFoundError:
            message, paths = api.Run(labels=source.labels), ["labels"]
            if source.HasField("purge_delay"):
                message.purge_delay.CopyFrom(source.purge_delay)
                paths.append("purge_delay")
            if source.migrations:
                message.migrations.extend(source.migrations)
                paths.append("migrations")
            update_run(self._to, message, paths, None)
        # 3. The checkpoints.
        for checkpoint in wanted:
            found = present.get(checkpoint.step)
            if found is not None:
                done = Transfer.skipped(self._url(checkpoint), found)
            else:
                done = self._copy(checkpoint, present)
                present[checkpoint.step] = done.checkpoint
            if checkpoint.pinned and not done.checkpoint.pinned:
                update_checkpoint(self._to, checkpoint.step, pinned=True)
            yield done

    def tags(self, steps: Iterable[int], *, move: bool) -> None:
        """Sets the tags of copied checkpoints.

        Args:
            steps: Steps of the copied checkpoints.
            move: Whether to move tags that name another checkpoint of the target.

        Raises:
            PreconditionError: Such tags were not moved; lists them. The others are set.
        """
        copied = set(steps)
        tags, present = Tags(self._to), {tag.name: tag for tag in Tags(self._to).list()}
        kept = []
        for tag in Tags(self._from).list():
            if tag.step not in copied:
                continue
            other = present.get(tag.name)
            if other is not None and other.step != tag.step and not move:
                kept.append(f"{tag.name} (step {other.step} there, {tag.step} here)")
            elif other is None or other.step != tag.step:
                etag = other.etag if other is not None and other.protected else None
                tags.set(tag.name, tag.step, protected=tag.protected, etag=etag)
        if kept:
            raise PreconditionError(
                f"copy to {self._to.name}: its tags {', '.join(kept)} name other "
                "checkpoints and were not moved; move them with move_tags=, or copy "
                "without tags; all checkpoints are copied"
            )

    def retention(self) -> None:
        """Sets the retention policy of the source in the target."""
        Retention(self._to).set(Retention(self._from).get())

    def _same_run(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"copy of {self._from.name}: expected another run to copy to, got the same "
            f"one; give the run to create, such as {self._from.name}-copy"
        )

    def _url(self, checkpoint: Checkpoint) -> str:
        return f"{self._place}@{checkpoint.step}"

    def _copy(self, checkpoint: Checkpoint, present: Iterable[int]) -> Transfer:
        reader = read_checkpoint(
            self._from_session,
            self._from.checkpoint_name(checkpoint.step),
            uid=checkpoint.uid,
        )
        plan = TransferPlan(tree=reader.tree, slabs=())
        plan = TransferPlan(tree=plan.tree, slabs=cut_slabs(plan.tree, plan.own))
        description = describe_transfer(
            self._to,
            checkpoint.step,
            present,
            labels=self._labels(reader.info),
            metrics=reader.info.metrics,
        )
        result = transfer(
            self._to_session,
            description,
            plan,
            CheckpointFiller(reader, plan.slabs),
            known=reader.manifest.sums,
            progress=self._progress,
        )
        return Transfer(
            source=self._url(checkpoint),
            checkpoint=result.checkpoint,
            is_new=True,
            sent_bytes=result.report.sent_bytes,
            reused_bytes=result.report.reused_bytes,
            seconds=result.report.seconds,
            is_verified=True,
            verified_count=reader.info.leaf_count + reader.info.item_count,
        )

    def _labels(self, source: Checkpoint) -> Mapping[str, str]:
        """Returns the labels of a copy. A copy of a copy keeps the origin."""
        created = source.create_time.isoformat()
        own = {k: v for k, v in source.labels.items() if not k.startswith(PREFIX)}
        return with_provenance(
            f"copy of {self._url(source)}",
            PREFIX,
            own,
            {
                "uid": find_origin(source),
                "url": self._url(source),
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "create_time": source.labels.get(f"{PREFIX}create_time", created),
            },
        )


def _find_wanted(
    place: str, found: Mapping[int, Checkpoint], steps: Iterable[int] | None
) -> list[Checkpoint]:
    """Returns the checkpoints to copy in the order of their creation."""
    if steps is None:
        wanted = set(found)
    else:
        wanted = set(steps)
        missing = sorted(wanted - found.keys())
        if missing:
            raise NotFoundError(
                f"{place} has no checkpoint at step {missing[0]}; list its checkpoints "
                "to see all",
                reason="CHECKPOINT_NOT_FOUND",
            )
    return sorted(
        (found[step] for step in wanted), key=lambda one: (one.create_time, one.step)
    )


class CheckpointFiller:
    """Reads the chunks of a checkpoint; implements ``_save.transfer.Filler``."""

    def __init__(self, reader: CheckpointReader, slabs: Sequence[Slab]) -> None:
        """Creates the filler of slabs of all chunks; nothing is read yet."""
        self._reader = reader
        self._slabs = slabs
        self._bytes = replace(reader.manifest, tree=make_bytes_tree(reader.tree))

    def fill(self, slab_queue: SlabQueue, held: I64, meter: Meter) -> None:
        is_wanted = np.ones(self._bytes.tree.chunk_count, np.bool_)
        is_wanted[held] = False
        # The reader's own buffers are as large as the window.
        limit = slab_queue.budget_bytes // (READING_SHARE - 1)
        with self._reader.hold():
            wanted_slabs = _list_wanted(self._slabs, is_wanted)
            for window in cut_batches(wanted_slabs, lambda one: one[0].size, limit):
                filled: list[FilledSlab] = []
                for slab, wanted in window:
                    with meter.phase("wait"):
                        buffer = slab_queue.memory(slab.size)
                    if buffer is None:
                        return
                    filled.append(FilledSlab(slab, wanted, buffer))
                reading = _Window(self._bytes, filled, slab_queue)
                name = self._reader.name
                assembly = Assembly(
                    self._bytes,
                    reading.regions(),
                    name=name,
                    place=reading.place,
                    meter=Meter("restore", name, within=meter),
                )
                self._reader.open_source().read(assembly.missing, assembly)
                assembly.check_complete()


class _Window:
    """Slabs that are read together. Threads of the reader share it."""

    def __init__(
        self, manifest: Manifest, filled: Sequence[FilledSlab], slab_queue: SlabQueue
    ) -> None:
        self._tree = manifest.tree
        self._slab_queue = slab_queue
        self._lock = threading.Lock()
        self._places: dict[int, tuple[FilledSlab, int]] = {}
        """Slab of each wanted chunk, and the offset of the chunk in it."""
        self._left = {id(one): len(one.wanted) for one in filled}
        """Number of chunks of each slab that are not read yet."""
        for one in filled:
            wanted = set(one.wanted)
            for ordinal, at, _ in one.slab.rows():
                if ordinal in wanted:
                    self._places[ordinal] = one, at

    def regions(self) -> list[tuple[int, list[Region]]]:
        """Returns the rows to read, each with the regions of its chunks."""
        rows: dict[int, list[Region]] = {}
        for ordinal in sorted(self._places):
            row, within = self._tree.locate(ordinal)
            rows.setdefault(row, []).append(self._tree.grids[row].region(within))
        return list(rows.items())

    def place(self, buffers: Iterable[Buffer]) -> None:
        """Copies verified chunks into their slabs; puts complete slabs into the
        queue."""
        for row, ((start, _),), array in list_arrays(buffers):
            size = self._tree.grids[row].chunk_bytes
            first = int(self._tree.first_chunk[row])
            filled, at = self._places[first + start // size]
            memory: Bytes | None = filled.buffer
            assert memory is not None
            np.copyto(memory[at : at + size], array)
            with self._lock:
                self._left[id(filled)] -= 1
                is_complete = not self._left[id(filled)]
            if is_complete:
                self._slab_queue.put(filled)


def make_bytes_tree(tree: Tree) -> Tree:
    """Returns rows of bytes whose chunks are the chunks of a tree, with the same
    ordinals and the same bytes."""
    rows = list[Leaf]()
    for leaf, grid in zip(tree.leaves, tree.grids, strict=True):
        size = max(1, grid.chunk_bytes)
        shape, chunk_shape = (grid.count * size,), (size,)
        rows.append(replace(leaf, dtype="uint8", shape=shape, chunk_shape=chunk_shape))
    return Tree(tuple(rows))


def _list_wanted(
    slabs: Sequence[Slab], is_wanted: "np.ndarray[tuple[int], np.dtype[np.bool_]]"
) -> Iterator[tuple[Slab, list[int]]]:
    """Yields the slabs with wanted chunks, and these chunks."""
    for slab in slabs:
        stop = slab.first + len(slab.sizes)
        wanted = (slab.first + np.flatnonzero(is_wanted[slab.first : stop])).tolist()
        if wanted:
            yield slab, wanted
