"""A training run: its checkpoints, and how state goes in and out."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from storesvc.format.names import (
    Which,
)
from storesvc_client._collecting import RunUsage
from storesvc_client._globs import Patterns
from storesvc_client._inspecting import RunInspection
from storesvc_client._life import RunLife
from storesvc_client._pages import OnDamage, rows
from storesvc_client._progress import OnProgress
from storesvc_client._retaining import RunRetention
from storesvc_client._run_base import RunBase
from storesvc_client._saving import RunSaving
from storesvc_client._uploading import RunUploads
from storesvc_client._values import Checkpoint, LeafInfo
from storesvc_client._watching import RunWatch
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike, NDArray

    from storesvc_client._opened import OpenCheckpoint, Rules


class Run(
    RunInspection,
    RunLife,
    RunRetention,
    RunSaving,
    RunUploads,
    RunUsage,
    RunWatch,
    RunBase,
):
    """One training run of a store; made by ``Client.run``. Threads may share it."""

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
