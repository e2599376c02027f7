"""A training run: its checkpoints, and how state goes in and out."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from storesvc.format.names import CheckpointName, Which
from storesvc_client._api.collection import RunUsage
from storesvc_client._api.inspection import RunInspection
from storesvc_client._api.lifecycle import RunLife
from storesvc_client._api.retention import RunRetention
from storesvc_client._api.uploads import RunUploads
from storesvc_client._api.watch import RunWatch
from storesvc_client._rpc.paging import OnDamage
from storesvc_client._rpc.run_stub import RunBase
from storesvc_client._save.saver import RunSaving
from storesvc_client._values.arguments import checked_choice
from storesvc_client._values.durations import Deadline, checked_length
from storesvc_client._values.key_patterns import Patterns
from storesvc_client._values.options import DEFAULT_DEADLINE, Processes
from storesvc_client._values.progress import OnProgress
from storesvc_client._values.values import Checkpoint, LeafInfo
from storesvc_proto.v1 import checkpoint_service_pb2 as api

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from numpy.typing import DTypeLike, NDArray

    from storesvc_client._job.job import Job
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._restore.joint_restore import JointRestore
    from storesvc_client._values.options import Rules


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

    def open(
        self,
        which: Which = "latest",
        *,
        processes: Processes = "this",
        deadline: timedelta = DEFAULT_DEADLINE,
    ) -> "OpenCheckpoint":
        """Returns a checkpoint, resolved, its manifest read; for several reads of it.

        Args:
            which: A step, "latest", or a tag.
            processes: Whether "all" processes of a ``jax.distributed`` job open the
                same checkpoint, and restore it together, or "this" one reads it alone.
            deadline: How long it may take; five minutes at most, how long to wait for a
                process that does not open it.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            InvalidRequestError: An argument is not usable, or process 0 opens another.
            DataLossError: Its manifest is damaged.
            UnavailableError: It does not come in time, or a process of the job does not
                open it; names it.
            PeerFailedError: Other processes of the job have failed; says why.
        """
        with self._together(processes) as joint:
            ends = self._ends(deadline)
            opened = self._opened(which, joint, ends)
            if joint is not None:
                joint.check(opened.info.uid, "")
        return opened

    def restore(
        self,
        which: Which = "latest",
        *,
        like: Any = None,
        mesh: "Mesh | None" = None,
        rules: "Rules | None" = None,
        select: Patterns | None = None,
        cast: "DTypeLike | None" = None,
        missing: Literal["error", "keep"] = "error",
        processes: Processes = "all",
        spread: bool | None = None,
        deadline: timedelta = DEFAULT_DEADLINE,
        progress: OnProgress | None = None,
    ) -> Any:
        """Returns the state of a checkpoint, every bit as it was saved.

        Only jax's mark of a weak type is not kept: there is no public way to set it.

        Shards stream straight into one buffer each, and from there onto their
        devices; nothing that no local device needs is read.

        In a ``jax.distributed`` job every process calls this, for the same leaves and
        shardings. All restore the checkpoint that process 0 finds, and it ends well in
        all of them or in none.

        Args:
            which: A step, "latest", or a tag.
            like: A pytree of the structure to return. ``jax.Array`` and
                ``jax.ShapeDtypeStruct`` become device arrays on their sharding,
                NumPy arrays host arrays. A ``ShapeDtypeStruct`` without a sharding
                goes to the default device, whole. None returns the dicts, lists,
                tuples and Nones that were saved, dicts or lists for containers of
                other kinds, and texts for keys that are neither text nor integer.
                A checkpoint with a ``document=`` of its own, or from an earlier
                release, does not hold which containers were tuples, None or empty.
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
            processes: Whether "all" processes of the job restore together, or "this"
                one does, alone. Of no matter outside of a job.
            spread: Whether each stored byte that several processes need is read by one
                of them, and goes to the others between their devices. None: where that
                saves more than 64 MiB of reads from far.
            deadline: How long all of it may take, and, five minutes at most, how long
                to wait for a process that does not restore.
            progress: Called with a ``Progress`` at most ten times a second, from any
                thread but by one at a time, and once at the end. What it raises ends
                the restore.

        Raises:
            NotFoundError: There is no such run or checkpoint, or no leaf that a
                glob or an expression matches.
            InvalidRequestError: An argument is not usable, or the processes of the job
                ask for different checkpoints, leaves or shardings; names them.
            MismatchError: The checkpoint does not fit; lists every leaf.
            DataLossError: Stored bytes are damaged; names leaf and chunk.
            UnavailableError: It is not done at the deadline; lists what is
                outstanding. Or a process of the job does not restore; names it.
            PeerFailedError: Other processes of the job have failed, or are not done at
                the deadline; names them, and says why, or what they lack.
        """
        with self._together(processes) as joint:
            ends = self._ends(deadline)
            return self._opened(which, joint, ends).restored(
                joint,
                ends,
                select=select,
                spread=spread,
                progress=progress,
                like=like,
                mesh=mesh,
                rules=rules,
                cast=cast,
                missing=missing,
            )

    @contextmanager
    def _together(self, processes: Processes) -> "Generator[JointRestore | None]":
        """The restore of all processes of the job; None: of this one alone."""
        checked_choice(f"{self.name}: processes=", processes, Processes)
        job = _job() if processes == "all" else None
        # Late, as all that needs NumPy: lists of checkpoints must not wait for it.
        from storesvc_client._restore.joint_restore import together

        with together(job, self.name) as joint:
            yield joint

    def _ends(self, deadline: timedelta) -> Deadline:
        length = checked_length(f"{self.name}: deadline=", deadline)
        return Deadline.after(length.total_seconds())

    def _opened(
        self, which: Which, joint: "JointRestore | None", deadline: Deadline
    ) -> "OpenCheckpoint":
        """A checkpoint, which in a job is that of process 0."""
        from storesvc_client._restore.open import open_checkpoint

        name, job = self._checkpoint_name(which), None
        if joint is not None:
            found = joint.begin(
                str(name), lambda: self._fixed_name(which, deadline).resource, deadline
            )
            name, job = CheckpointName.from_resource(found), joint.job
        return open_checkpoint(self._session, name, job=job, deadline=deadline)

    def checkpoints(self, *, on_damage: OnDamage = None) -> Iterator[Checkpoint]:
        """Yields the checkpoints, newest first.

        Args:
            on_damage: Called, with the error, for each one whose record is damaged;
                None raises it in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next one is damaged.
        """
        found = self._rows(
            self._stub.ListCheckpoints,
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
        response = self._ask(self._stub.GetCheckpoint, request)
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


def _job() -> "Job | None":
    """The job that this process is of; None: it is alone."""
    from storesvc_client._pytree.jax_job import job_of_process  # it needs jax

    return job_of_process()
