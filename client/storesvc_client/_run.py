"""A training run: its checkpoints, and how state goes in and out."""

import operator
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

from storesvc.format.names import (
    MAX_STEP,
    RunName,
    Which,
)
from storesvc_client._channel import Connection
from storesvc_client._collecting import RunUsage
from storesvc_client._entries import checked_labels, checked_metrics
from storesvc_client._inspecting import RunInspection
from storesvc_client._life import RunLife
from storesvc_client._opened import OpenCheckpoint, open_checkpoint
from storesvc_client._pages import OnDamage, rows
from storesvc_client._retaining import RunRetention
from storesvc_client._run_base import RunBase
from storesvc_client._save import Save
from storesvc_client._sending import Description, Saved, Snapshot, Upload
from storesvc_client._uploading import RunUploads
from storesvc_client._values import Checkpoint, LeafInfo
from storesvc_client._watching import RunWatch
from storesvc_client.errors import (
    InvalidRequestError,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike, NDArray

    from storesvc_client._opened import Rules


class Run(
    RunInspection, RunLife, RunRetention, RunUploads, RunUsage, RunWatch, RunBase
):
    """One training run of a store; made by ``Client.run``. Threads may share it."""

    def __init__(self, connection: Connection, name: RunName) -> None:
        super().__init__(connection, name)
        self._lock = Lock()
        self._saver: ThreadPoolExecutor | None = None
        self._last: Save | None = None

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        structure: bytes = b"",
        base: Which | None = "latest",
    ) -> Save:
        """Begins to save a tree, and returns once the tree may change again.

        The bytes are copied to the host before this returns, so the caller may
        donate or overwrite every array. A save first waits for the one before.
        The save goes on in the background: wait for it with ``result()``, or close
        the client, before the process ends.

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

        Returns:
            A handle; ``result()`` waits for the commit.

        Raises:
            UnsupportedLeafError: The tree holds something else, or two paths that
                would share a key; names them all.
            InvalidRequestError: The step, a metric or a label breaks the rules, or
                the structure is no bytes.
            StoreError: What the save before failed with, if nobody has seen it.
        """
        from storesvc_client.trees.snapshot import take_snapshot

        self._connection.check_open()
        description = self._describe(step, metrics, labels, base)
        if not isinstance(structure, bytes):
            raise InvalidRequestError(
                f"save to {self.name}: expected bytes in structure=, got "
                f"{type(structure).__name__}"
            )
        with self._lock:
            self._wait()
            snapshot = take_snapshot(tree, structure)
            self._last = Save(description.step, self._submit(description, snapshot))
            return self._last

    def open(self, which: Which = "latest") -> OpenCheckpoint:
        """Returns a checkpoint, resolved, its manifest read; for several reads of it.

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            DataLossError: Its manifest is damaged.
        """
        return open_checkpoint(self._connection, self._checkpoint_name(which))

    def restore(
        self,
        which: Which = "latest",
        *,
        like: Any = None,
        mesh: "Mesh | None" = None,
        rules: "Rules | None" = None,
        select: str | Iterable[str] | None = None,
        cast: "DTypeLike | None" = None,
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
            select: Globs of leaf keys, such as "params/**"; the others are not
                read, and ``like`` has none of them. None: all leaves.
            cast: A floating-point dtype. Floating-point leaves come back in it:
                those for which ``like`` has it, without ``like`` all.

        Raises:
            NotFoundError: There is no such run or checkpoint, or no leaf that a
                glob matches.
            MismatchError: The checkpoint does not fit; lists every leaf.
            DataLossError: Stored bytes are damaged; names leaf and chunk.
        """
        return self.open(which).restore(
            like=like, mesh=mesh, rules=rules, select=select, cast=cast
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
        if self._last is None:
            return
        try:
            self._last.raise_unseen()
        finally:
            if self._last.done():
                self._last = None

    def _submit(self, description: Description, snapshot: Snapshot) -> "Future[Saved]":
        if self._saver is None:
            self._saver = ThreadPoolExecutor(1, f"storesvc-save-{self._name.run}")
        return self._saver.submit(Upload(self._connection, description).send, snapshot)

    def _describe(
        self,
        step: SupportsIndex,
        metrics: Mapping[str, SupportsFloat] | None,
        labels: Mapping[str, str] | None,
        base: Which | None,
    ) -> Description:
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
