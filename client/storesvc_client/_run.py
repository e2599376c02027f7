"""A training run: its checkpoints, and how state goes in and out."""

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, SupportsIndex

from storesvc.format.names import (
    MAX_STEP,
    CheckpointName,
    RunName,
    Which,
)
from storesvc_client._channel import Connection
from storesvc_client._collecting import RunUsage
from storesvc_client._entries import (
    checked_choice,
    checked_labels,
    checked_metrics,
)
from storesvc_client._globs import Patterns
from storesvc_client._inspecting import RunInspection
from storesvc_client._life import RunLife
from storesvc_client._options import IfBusy, SnapshotMode
from storesvc_client._pages import OnDamage, rows
from storesvc_client._progress import Meter, OnProgress
from storesvc_client._retaining import RunRetention
from storesvc_client._run_base import RunBase
from storesvc_client._save import Save
from storesvc_client._uploading import RunUploads
from storesvc_client._values import Checkpoint, LeafInfo
from storesvc_client._watching import RunWatch
from storesvc_client.errors import ConflictError, InvalidRequestError
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike, NDArray

    from storesvc_client._opened import OpenCheckpoint, Rules
    from storesvc_client._outbox import Outbox
    from storesvc_client._sending import Description, Saved, Upload
    from storesvc_client._snapshotting import Known
    from storesvc_client.trees.planning import Plan, Planner


class Run(
    RunInspection, RunLife, RunRetention, RunUploads, RunUsage, RunWatch, RunBase
):
    """One training run of a store; made by ``Client.run``. Threads may share it."""

    def __init__(self, connection: Connection, name: RunName) -> None:
        super().__init__(connection, name)
        self._lock = Lock()
        self._saver: ThreadPoolExecutor | None = None
        self._copier: ThreadPoolExecutor | None = None
        self._under_way: deque[Save] = deque()
        """Saves whose errors may not have been seen, the oldest first."""
        self._planner: Planner | None = None
        self._last_saved: tuple[Plan, Saved] | None = None

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        structure: bytes = b"",
        base: Which | None = "latest",
        snapshot: SnapshotMode = "auto",
        if_busy: IfBusy = "wait",
        progress: OnProgress | None = None,
    ) -> Save:
        """Begins to save a tree, and returns once the tree may change again.

        The bytes are copied before this returns, so the caller may donate or overwrite
        every array. The save goes on in the background: wait for it with ``result()``,
        or close the client, before the process ends.

        To the host they are copied within ``connect(staging_bytes=)``: where the tree
        is larger, or other saves hold that memory, this waits until enough of it is
        written.

        Args:
            step: The training step, >= 0; written once.
            tree: Any pytree of ``jax.Array``, typed PRNG keys, ``numpy.ndarray``,
                NumPy scalars, and Python ``bool``, ``int``, ``float``, ``complex``.
            metrics: Numbers to find the checkpoint by.
            labels: Texts to find the checkpoint by.
            structure: A document about the tree to keep with it, at most 16 MiB;
                ``storesvc_client.easydel`` keeps there what a model was.
            base: A checkpoint of the run, by step, "latest" or tag: chunks that are
                as they were there are neither sent nor stored again. None sends all.
                A save of the same step that was cut off goes on where it stopped
                either way.
            snapshot: Where the bytes are copied to while the caller waits: "host";
                "device", which takes as much of its memory as the tree has there, and
                less time; or "auto": the device where its memory is known to suffice.
                "none" copies nothing that lies on the host as it is stored, the
                rest through 128 MiB, and returns once the save has ended: for a last
                save before the process does, or where there is no memory for a copy.
            if_busy: What to do while a save of this run is under way: "wait" for it,
                "queue" behind it, or "refuse".
            progress: Called with a ``Progress`` at most ten times a second, from any
                thread but by one at a time, and once at the end. If it raises, the
                save goes on and commits without it; the handle raises that then.

        Returns:
            A handle; ``result()`` waits for the commit.

        Raises:
            UnsupportedLeafError: The tree holds something else, or two paths that
                would share a key; names them all.
            InvalidRequestError: The step, a metric or a label breaks the rules, or
                the structure is no bytes.
            ConflictError: A save is under way, and this was to be refused then.
            StoreError: What the save before failed with, if nobody has seen it.
        """
        from storesvc_client.trees.planning import Planner

        self._connection.check_open()
        checked_choice(f"save to {self.name}: snapshot=", snapshot, SnapshotMode)
        checked_choice(f"save to {self.name}: if_busy=", if_busy, IfBusy)
        description = self._describe(step, metrics, labels, base)
        if not isinstance(structure, bytes):
            raise InvalidRequestError(
                f"save to {self.name}: expected bytes in structure=, got "
                f"{type(structure).__name__}"
            )
        with self._lock:
            self._make_way(if_busy)
            self._planner = self._planner or Planner()
            meter = Meter("save", f"{self.name}@{description.step}", progress)
            with meter.phase("plan"):
                plan, values = self._planner.plan(tree, structure)
            save, outbox = self._start(description, plan, values, snapshot, meter)
            self._under_way.append(save)
        if snapshot == "none":
            try:
                save.wait()
            except BaseException as e:  # Ctrl-C: what reads the tree must stop first
                outbox.fail(e)
                save.drop()
                raise
        return save

    def open(self, which: Which = "latest") -> "OpenCheckpoint":
        """Returns a checkpoint, resolved, its manifest read; for several reads of it.

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            DataLossError: Its manifest is damaged.
        """
        # Late, as all that needs NumPy: lists of checkpoints must not wait for it.
        from storesvc_client._opened import open_checkpoint

        return open_checkpoint(self._connection, self._checkpoint_name(which))

    def restore(
        self,
        which: Which = "latest",
        *,
        like: Any = None,
        mesh: "Mesh | None" = None,
        rules: "Rules | None" = None,
        select: Patterns | None = None,
        cast: "DTypeLike | None" = None,
        missing: Literal["error", "init"] = "error",
        progress: OnProgress | None = None,
    ) -> Any:
        """Returns the state of a checkpoint, every bit as it was saved.

        Only jax's mark of a weak type is not kept: there is no public way to set it.

        Shards stream straight into one buffer each, and from there onto their
        devices; nothing that no local device needs is read.

        Args:
            which: A step, "latest", or a tag.
            like: A pytree of the structure to return. ``jax.Array`` and
                ``jax.ShapeDtypeStruct`` become device arrays on their sharding,
                NumPy arrays host arrays. A ``ShapeDtypeStruct`` without a sharding
                goes to the default device, whole. None returns nested dicts and
                lists, with texts for keys that are neither text nor integer.
            mesh: Where to put device arrays, instead of where ``like`` or, without
                it, the saved sharding would put them.
            rules: With ``mesh``: ``(pattern, PartitionSpec)`` pairs; the first
                whose regular expression is found in a leaf's key applies. Axes
                that do not divide a leaf are dropped, and that is logged. Or
                "recorded": each leaf as it lay, as far as the mesh has the axes.
            select: Globs of leaf keys, such as "params/**", or compiled regular
                expressions, found anywhere in a key as those of ``rules`` are, or
                both; the other leaves are not read, and ``like`` has none of them.
                None: all leaves.
            cast: A floating-point dtype. Floating-point leaves come back in it:
                those for which ``like`` has it, without ``like`` all.
            missing: Whether leaves of ``like`` that the checkpoint lacks are an
                error, or keep the value that ``like`` has there, which must be a
                real one: on the mesh given, or else where it lies. How many did so
                is logged. What is there must fit either way.
            progress: Called with a ``Progress`` at most ten times a second, from any
                thread but by one at a time, and once at the end. What it raises ends
                the restore.

        Raises:
            NotFoundError: There is no such run or checkpoint, or no leaf that a
                glob or an expression matches.
            InvalidRequestError: An argument is not usable.
            MismatchError: The checkpoint does not fit; lists every leaf.
            DataLossError: Stored bytes are damaged; names leaf and chunk.
        """
        return self.open(which).restore(
            like=like,
            mesh=mesh,
            rules=rules,
            select=select,
            cast=cast,
            missing=missing,
            progress=progress,
        )

    def checkpoints(self, *, on_damage: OnDamage = None) -> Iterator[Checkpoint]:
        """Yields the checkpoints, newest first.

        Args:
            on_damage: Called, with the error, for each one whose record is damaged;
                None raises it in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next one is damaged.
        """
        found = rows(
            partial(self._connection.call, self._stub.ListCheckpoints),
            api.ListCheckpointsRequest(parent=self._name.resource),
            lambda page: page.checkpoints,
            on_damage,
        )
        yield from map(Checkpoint.from_message, found)

    def latest(self) -> Checkpoint:
        """Returns the newest checkpoint.

        Raises:
            NotFoundError: There is none.
        """
        return self.checkpoint("latest")

    def checkpoint(self, which: Which) -> Checkpoint:
        """Returns a checkpoint.

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is none; the message names the nearest.
        """
        name = self._checkpoint_name(which)
        request = api.GetCheckpointRequest(name=name.resource)
        response = self._connection.call(self._stub.GetCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def leaves(self, which: Which = "latest") -> Mapping[str, LeafInfo]:
        """Returns the leaves of a checkpoint by key, in the order of keys.

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such run or checkpoint.
        """
        return self.open(which).leaves

    def read(
        self, which: Which, keys: Iterable[str]
    ) -> "Iterator[tuple[LeafInfo, NDArray[Any]]]":
        """Returns an iterator over leaves as host arrays, in the order of the keys.

        Needs no jax.

        Holds one leaf at a time in memory, or as many small ones as 64 MiB take.

        Args:
            which: A step, "latest", or a tag; resolved once, for all keys.
            keys: Of the leaves; each is read once.

        Raises:
            NotFoundError: There is no such run, checkpoint or leaf.
            DataLossError: Stored bytes are damaged; names leaf and chunk.
        """
        return self.open(which).read(keys)

    def wait(self) -> None:
        """Waits for a save in the background.

        Raises:
            StoreError: What it failed with, if nobody has seen it.
        """
        with self._lock:
            self._wait()

    def _wait(self) -> None:
        """Waits for all saves; raises the first error that nobody has seen."""
        try:
            while self._under_way:
                self._end_first()
        finally:
            if not self._under_way:
                self._end_threads()

    def _end_threads(self) -> None:
        """Ends the threads of saves; the next one starts its own."""
        for threads in (self._saver, self._copier):
            if threads is not None:
                threads.shutdown()  # a save that failed at once may be ending still
        self._saver = self._copier = None

    def _end_first(self) -> None:
        first = self._under_way[0]
        try:
            first.raise_unseen()
        finally:
            if first.done():
                self._under_way.popleft()

    def _make_way(self, if_busy: IfBusy) -> None:
        while self._under_way and self._under_way[0].done():
            self._end_first()
        if if_busy == "wait":
            self._wait()
        elif if_busy == "refuse" and self._under_way:
            raise ConflictError(
                f"save to {self.name}: the save of step {self._under_way[-1].step} is "
                "still under way; wait for it, or queue this one"
            )

    def _start(
        self,
        description: "Description",
        plan: "Plan",
        values: list[Any],
        mode: SnapshotMode,
        meter: Meter,
    ) -> "tuple[Save, Outbox]":
        """Begins a save in the background, and takes the snapshot for it."""
        from storesvc_client._outbox import Outbox
        from storesvc_client._sending import Upload
        from storesvc_client._snapshotting import Snapshot
        from storesvc_client._staging import MIN_BUDGET_BYTES, Staging
        from storesvc_client.trees.device_copies import copied_on_device
        from storesvc_client.trees.snapshot import TreeSource

        if self._saver is None:
            self._saver = ThreadPoolExecutor(1, f"storesvc-save-{self._name.run}")
        is_lent = mode == "none"
        staging = self._connection.staging
        if is_lent:  # what must be copied all the same waits for what is written
            staging = Staging(MIN_BUDGET_BYTES)
        outbox = Outbox(staging, is_open=is_lent)
        upload = Upload(self._connection, description, plan.tree, outbox, meter)
        known, known_base = self._known(description, plan, upload)
        with meter.phase("snapshot"):
            copies = copied_on_device(values, mode)
        future = self._saver.submit(self._saved, upload, plan, known_base, meter)
        source = TreeSource(plan, values if copies is None else copies)
        snapshot = Snapshot(source, plan.slabs, outbox, known, meter, is_lent=is_lent)
        if self._copier is None:
            self._copier = ThreadPoolExecutor(1, f"storesvc-copy-{self._name.run}")
        # One after another: one that takes memory before a save is written that waits
        # for some would wait for ever.
        copying = self._copier.submit(snapshot.take)
        if copies is None:
            try:
                copying.result()
            except BaseException as e:  # Ctrl-C: the caller may change the tree now
                outbox.fail(e)
                raise
        return Save(description.step, future), outbox

    def _saved(
        self, upload: "Upload", plan: "Plan", known_base: str, meter: Meter
    ) -> "Saved":
        self._last_saved = None  # where this fails, what it told is of no use
        with meter:
            saved = upload.run(known_base)
            self._last_saved = plan, saved
        return saved

    def _known(
        self, description: "Description", plan: "Plan", upload: "Upload"
    ) -> "tuple[Known | None, str]":
        """What the last save leaves to be known of the chunks of this one, and the
        name of the checkpoint that it made."""
        from storesvc_client._snapshotting import Known

        last = self._last_saved  # a save that begins meanwhile empties it
        if last is None or description.base is None:
            return None, ""
        last_plan, saved = last
        step = saved.checkpoint.step
        if description.base.which not in ("latest", step):
            return None, ""
        # arrays that came out of a step may lie otherwise than those that went in
        if last_plan is not plan and not last_plan.tree.is_cut_as(plan.tree):
            return None, ""
        known = Known(
            sums=saved.sums,
            claimable=partial(upload.claimable, saved.sums),
            ask=upload.ask,
        )
        return known, CheckpointName(self._name, step).resource

    def _describe(
        self,
        step: SupportsIndex,
        metrics: Mapping[str, SupportsFloat] | None,
        labels: Mapping[str, str] | None,
        base: Which | None,
    ) -> "Description":
        from storesvc_client._sending import Description

        try:
            number = -1 if isinstance(step, bool) else operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= MAX_STEP:
            raise InvalidRequestError(
                f"save to {self.name}: expected a step of 0 to 2^63 - 1, got {step!r}"
            )
        return Description(
            run=self._name,
            step=number,
            labels=checked_labels(f"save to {self.name}", labels),
            metrics=checked_metrics(f"save to {self.name}", metrics),
            base=None if base is None else self._checkpoint_name(base),
        )
