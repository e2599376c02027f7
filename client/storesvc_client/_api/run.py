"""A training run: saves and restores state, and manages its checkpoints.

``Run`` is the class that a user sees. What reads or writes data is elsewhere:
``_save.saver``, ``opening`` and ``copying``; the groups (``run.tags``) are in
``groups``. Imports and copies are functions besides, as ``storectl`` shows each
checkpoint once it is committed, where ``Run`` returns all at the end.
"""

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsFloat, SupportsIndex

from storesvc.format.keys import is_item
from storesvc.format.names import CheckpointName, RunName, Which
from storesvc_client._api.groups import (
    Holds,
    Retention,
    Tags,
    Uploads,
    Usage,
    get_run,
    set_purge_delay,
    update_checkpoint,
    update_run,
    watch,
)
from storesvc_client._api.loop import Loop
from storesvc_client._api.migrations import Migrations
from storesvc_client._api.opening import Opening
from storesvc_client._pictures.plots import Plot, make_plot
from storesvc_client._rpc.connection import OnDamage, RunStub
from storesvc_client._rpc.retry import BEGINNINGS
from storesvc_client._save.saver import PendingSave, RunSaver, Save, checked_step
from storesvc_client._session import Session
from storesvc_client._telemetry.progress import ProgressCallback
from storesvc_client._telemetry.reports import SaveTrace, WriterReport
from storesvc_client._values.arguments import (
    DurationLike,
    checked_choice,
    checked_labels,
    checked_text,
    duration_message,
)
from storesvc_client._values.key_patterns import Patterns
from storesvc_client._values.messages import read_message
from storesvc_client._values.models import (
    Checkpoint,
    Damage,
    Diff,
    Event,
    ItemDifference,
    LeafDifference,
    RunInfo,
    Tag,
    Transfer,
    Verification,
)
from storesvc_client._values.options import (
    ALL_PROCESSES,
    DEFAULT_DEADLINE,
    THIS_PROCESS,
    Distributed,
    IfBusy,
    Indivisible,
    Like,
    MappingRules,
    OnDamaged,
    RestoreRequest,
    SaveOptions,
    SaveRequest,
    SnapshotMode,
    collect_arguments,
)
from storesvc_client._values.policies import RetentionPolicy
from storesvc_client._values.triggers import RAISE, OnFailure, Trigger
from storesvc_client._views.notebook import list_results
from storesvc_client.errors import (
    InvalidRequestError,
    NotFoundError,
    StoreError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2 as maintenance_api
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh
    from numpy.typing import DTypeLike

    from storesvc_client._api.copying import RunCopy
    from storesvc_client._export.elements import OrbaxLayout
    from storesvc_client._export.exporting import ExportReport
    from storesvc_client._foreign.mount import ForeignRun
    from storesvc_client._job.job import Departures
    from storesvc_client._pictures.svg import Picture
    from storesvc_client._pytree.save_plan import Plan
    from storesvc_client._restore.checkpoint import OpenCheckpoint
    from storesvc_client._restore.items import Items
    from storesvc_client._values.options import Rules


@dataclass(frozen=True, slots=True, eq=False)
class RunParts:
    """A run as the other packages of the client use it; see ``get_parts``."""

    session: Session
    stub: RunStub
    saver: RunSaver
    defaults: SaveOptions
    opening: Callable[..., Opening]

    def begin(
        self,
        request: SaveRequest,
        check: "Callable[[Plan], None] | None" = None,
        loop: "Departures | None" = None,
    ) -> PendingSave:
        """Starts a save once ``check`` accepts its plan; see ``RunSaver.begin``."""
        return self.saver.begin(request.filled_in(self.defaults), check, loop)


class Run:
    """One training run of a store; returned by ``Client.run``. Threads may share it.

    >>> run = client.run("prod/llama-8b")
    >>> run.save(100, state, metrics={"loss": 2.31}).result().step
    100
    >>> state = run.restore("latest", like=state)
    """

    def __init__(
        self, session: Session, name: RunName, saver: RunSaver, defaults: SaveOptions
    ) -> None:
        stub = RunStub(session.connection, name)
        self.name = str(name)
        """Name of the run, ``namespace/run``."""
        self.tags = Tags(stub)
        """Tags: ``set``, ``delete``, ``list``."""
        self.holds = Holds(session, stub)
        """Holds: ``create``, ``release``, ``list``."""
        self.retention = Retention(stub)
        """Retention policy: ``get``, ``set``, ``preview``, ``apply``."""
        self.migrations = Migrations(session, stub)
        """Rules for older checkpoints: ``list``, ``add``, ``remove``."""
        self.uploads = Uploads(stub)
        """Uploads: ``list``, ``get``, ``abort``."""
        self._session = session
        self._stub = stub
        self._opening = partial(Opening, session, stub)
        self._parts = RunParts(session, stub, saver, defaults, self._opening)

    def __repr__(self) -> str:
        return f"<Run {self.name} of {self._session.connection.address}>"

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import RUN_ROWS, run_html

        newest, tags, problem = list[Checkpoint](), list[Tag](), ""
        try:
            newest = [*islice(self.checkpoints(), RUN_ROWS + 1)]
            tags = [*self.tags.list()]
        except StoreError as e:  # a display must not fail
            problem = str(e)
        address = self._session.connection.address
        return run_html(self.name, address, newest, tags, problem)

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metrics: Mapping[str, SupportsFloat] | None = None,
        labels: Mapping[str, str] | None = None,
        items: Mapping[str, Any] | None = None,
        document: bytes = b"",
        base: Which | None = "latest",
        snapshot: SnapshotMode | None = None,
        if_busy: IfBusy | None = None,
        distributed: Distributed = ALL_PROCESSES,
        progress: ProgressCallback | None = None,
    ) -> Save:
        """Starts to save a tree, and returns as soon as the tree may change again.

        The bytes are copied before this returns, so the caller may donate or overwrite
        every array. The save continues in the background: wait for it with
        ``Save.result``, or close the client, before the process ends. Copies on the
        host stay within ``connect(staging_bytes=)``: if the tree is larger, or other
        saves use that memory, this waits until enough of it is written.

        In a ``jax.distributed`` job every process calls this with the same tree. Each
        writes a part of what its devices hold, every byte once, and the checkpoint is
        committed when the last process has finished. Labels, metrics and base are taken
        from process 0. NumPy arrays, Python numbers, texts, bytes and replicated arrays
        must be equal in all processes: a difference from process 0 is rejected with the
        leaf and the processes. Replicated arrays of more than 1 MiB are not compared,
        nor are arrays that are replicated over some axes of a mesh and sharded over
        others.

        Args:
            step: Training step, >= 0; each step is written once.
            tree: Any pytree of ``jax.Array``, typed PRNG keys, ``numpy.ndarray``,
                NumPy scalars, and Python ``bool``, ``int``, ``float``, ``complex``,
                ``str`` and ``bytes``.
            metrics: Numbers to keep with the checkpoint, at most 64; retention policies
                can rank by them.
            labels: Texts to keep with the checkpoint, at most 64.
            items: Values to keep with the checkpoint, at most 64, each of at most 1
                GiB: ``str``, ``bytes``, or what JSON has (None, ``bool``, ``int``,
                finite ``float``, lists, and dicts with texts as keys); or a data
                iterator or random generator, whose state is taken within this call.
                Names are lower-case letters, digits and hyphens. ``Run.items`` returns
                them. In a job all processes pass the same names; the values are taken
                from process 0, and a ``PerProcess`` value, or a state, from each. A
                ``Replicated`` value must be equal in all. Before the snapshot, this
                then waits until process 0 has made this call, or for a ``PerProcess``
                or ``Replicated`` value or a state all have.
            document: Bytes about the tree to keep with it, at most 16 MiB;
                ``storesvc_client.easydel`` keeps the structure of a model in it.
            base: A checkpoint of this run, by step, "latest" or tag: chunks that are
                equal in it are neither sent nor stored again. None sends all chunks,
                and so does "latest" for up to 1 MiB of one process. A larger save of
                the same step that was interrupted is resumed in any case.
            snapshot: Where the bytes are copied to while the caller waits. "host";
                "device", which needs as much device memory as the tree has there, and
                less time; "auto": the device if its memory is known to suffice. "none"
                copies nothing that is on the host as it is stored, and the rest through
                at most 512 MiB, and returns once the save has ended: for the last save
                of a process, or if there is no memory for a copy. None: the default of
                the run (``client.run(save=)``), else "auto".
            if_busy: What to do while an earlier save of this run is running: "wait" for
                it, "queue" behind it, or "refuse". If that save waits for a server that
                does not answer, "wait" starts no save: this is logged, and the handle
                raises ``UnavailableError``. None: the default of the run, else "wait".
            distributed: Which processes of a job take part, and the lease of the
                upload.
            progress: Called with a ``Progress``; see ``ProgressCallback``.

        Returns:
            A handle; ``result`` waits for the commit.

        Raises:
            UnsupportedLeafError: The tree has leaves of other types, or two paths with
                one key; the message lists them all.
            InvalidRequestError: An argument is out of range.
            ConflictError: An earlier save is running, and ``if_busy`` is "refuse".
            UnavailableError: The coordination service of the job does not answer.
            StoreError: The save before failed, and its error was not raised yet; an
                error of another process of the job is only logged.
        """
        request = collect_arguments(SaveRequest, locals())
        return Save(self._parts.begin(request))

    def wait(self) -> None:
        """Waits for the saves in the background.

        Raises:
            StoreError: A save failed, and its error was not raised yet.
        """
        self._parts.saver.wait()

    def restore(
        self,
        which: Which = "latest",
        *,
        distributed: Distributed = ALL_PROCESSES,
        deadline: DurationLike = DEFAULT_DEADLINE,
        on_damage: OnDamaged = "raise",
        like: Like | None = None,
        mesh: "Mesh | None" = None,
        rules: "Rules | None" = None,
        select: Patterns | None = None,
        cast: "DTypeLike | None" = None,
        missing: Literal["error", "keep"] = "error",
        indivisible: Indivisible = "error",
        mapping: MappingRules | None = None,
        progress: ProgressCallback | None = None,
    ) -> Like:
        """Returns the state of a checkpoint, with every bit as it was saved.

        It is ``run.open(which).restore(...)`` in one call, with the migrations of the
        run. Shards stream into one
        buffer each, and from there onto their devices; no byte is read that no local
        device needs. Only jax's flag of weak types is lost: no public function sets it.

        In a ``jax.distributed`` job every process calls this, for the same leaves and
        shardings. All restore the checkpoint that process 0 resolves, and the call
        succeeds in all of them or in none.

        Args:
            which: A step, "latest", or a tag.
            distributed: Which processes of a job take part, and whether they read every
                stored byte only once.
            deadline: Maximum duration, a ``timedelta`` or seconds. Processes that do
                not join are waited for until then, and for five minutes at most.
            on_damage: With "latest": "raise" the error if the newest checkpoint is
                damaged, or restore the newest "older" one that is whole. The skipped
                ones are logged, reported (``RestoreReport.damaged``) and get a label
                "damage", which lists show. In a job all processes restore the same
                checkpoint.
            like: A pytree of the structure to return. ``jax.Array`` and
                ``jax.ShapeDtypeStruct`` leaves become device arrays on their sharding,
                NumPy arrays become host arrays. A ``ShapeDtypeStruct`` without a
                sharding is placed on the default device. None returns the dicts, lists,
                tuples and Nones that were saved, dicts or lists for containers of other
                types, and texts for keys that are neither text nor integer. A
                checkpoint with a ``document=`` of its own, or of an earlier release,
                does not record which containers were tuples, None or empty.
            mesh: Mesh to place device arrays on, instead of the sharding of ``like`` or
                the saved sharding.
            rules: With ``mesh``: ``(pattern, PartitionSpec)`` pairs; the first whose
                regular expression is found in the key of a leaf applies; scalars are
                replicated. Or "recorded": the saved sharding.
            select: Globs of leaf keys, such as "params/**", or compiled regular
                expressions, which may match anywhere in a key, or both. Other leaves
                are not read, and must not be in ``like``. None: all leaves.
            cast: A floating-point dtype, such as "bfloat16" or "bf16", which all
                floating-point arrays are returned in, also those that ``like`` has in
                another one; Python numbers, integers and PRNG keys stay. Or "like":
                each in the dtype that ``like`` has.
            missing: What to do with leaves of ``like`` that the checkpoint lacks, or
                that ``select`` leaves out: "error", or "keep" the value in ``like``,
                which must be a real array, on the given mesh or where it is. Their
                number is logged. All other leaves must match in any case.
            indivisible: What to do with a dimension that an axis of ``rules`` does not
                divide, or that the leaf lacks, and with a recorded axis that the mesh
                lacks: "error", or "replicate", which does not split it, and is logged.
            mapping: Rules that make another tree of the checkpoint, with which all
                other arguments work: a TOML or JSON file, or a parsed document. Only
                what the wanted parts are made of is read. Every part of a key is then
                a text. None: the migrations of the run that were made for its tree; see
                ``run.migrations``.
            progress: Called with a ``Progress``; see ``ProgressCallback``.

        Raises:
            NotFoundError: There is no such run or checkpoint, or no leaf matches a
                pattern of ``select``.
            InvalidRequestError: An argument is out of range, or the processes of the
                job ask for different checkpoints, leaves or shardings; lists them.
            MismatchError: The checkpoint does not match ``like``, or the rules of the
                mapping do not fit it; lists every leaf.
            DataLossError: Stored bytes are damaged; the message names leaf and chunk.
                With ``on_damage="older"``: all checkpoints are; lists them.
            UnavailableError: The deadline is exceeded; lists what is outstanding. Or a
                process of the job did not join; names it.
            PeerFailedError: Other processes of the job failed, or exceeded the
                deadline; names them and the cause.
        """
        request = collect_arguments(RestoreRequest, locals())
        opening = self._opening(
            which, distributed=distributed, deadline=deadline, on_damage=on_damage
        )
        state: Like
        _, state = opening.restore(request)
        return state

    def open(
        self,
        which: Which = "latest",
        *,
        distributed: Distributed = THIS_PROCESS,
        deadline: DurationLike = DEFAULT_DEADLINE,
        on_damage: OnDamaged = "raise",
    ) -> "OpenCheckpoint":
        """Resolves a checkpoint and reads its manifest; for several reads of it.

        >>> opened = run.open("latest")
        >>> [leaf.shape for leaf in opened.leaves.values()]
        [(512, 512)]

        Args:
            which: A step, "latest", or a tag.
            distributed: Which processes of a job open and restore the checkpoint
                together, and whether they read every stored byte only once. By default
                this process reads alone.
            deadline: Maximum duration, a ``timedelta`` or seconds. Processes that do
                not join are waited for until then, and for five minutes at most.
            on_damage: As for ``Run.restore``; only records and manifests are read here,
                so later reads still raise the error of a damaged chunk.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            InvalidRequestError: An argument is out of range, or process 0 opens another
                checkpoint.
            DataLossError: The manifest is damaged.
            UnavailableError: The deadline is exceeded, or a process of the job did not
                join; names it.
            PeerFailedError: Other processes of the job failed; names the cause.
        """
        opening = self._opening(
            which, distributed=distributed, deadline=deadline, on_damage=on_damage
        )
        return opening.open()

    def export(
        self,
        which: Which,
        url: "str | Path",
        *,
        select: Patterns | None = None,
        cast: "DTypeLike | None" = None,
        mapping: MappingRules | None = None,
        layout: "OrbaxLayout | None" = None,
        item: str | None = None,
        max_shard_bytes: int | None = None,
        config: "str | Path | None" = None,
        drop_items: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: ProgressCallback | None = None,
    ) -> "ExportReport":
        """Writes a checkpoint in the format of another project.

        >>> run.export("best", "safetensors:/models/llama", cast="bfloat16").leaf_count
        291

        Arguments that are not listed are as for ``OpenCheckpoint.export``.

        Args:
            which: A step, "latest" or a tag.
            url: Format and place: ``orbax:URL``, ``safetensors:URL`` or ``npz:FILE``.

        Raises:
            StoreError: As for ``OpenCheckpoint.export``.
        """
        from storesvc_client._export.elements import ExportRequest

        request = collect_arguments(ExportRequest, locals())
        return self._opening(which).read(migrates=False).export(url, request)

    def loop(
        self,
        *,
        every: Trigger | timedelta,
        keep: RetentionPolicy | None = None,
        purge_delay: DurationLike | None = None,
        on_failure: OnFailure = RAISE,
        create: bool = False,
        distributed: Distributed = ALL_PROCESSES,
    ) -> Loop:
        """Returns a training loop that saves to this run; use it in a ``with`` block.

        Args:
            every: When to save: ``Steps(1000)``, ``Minutes(15)``, a ``timedelta``, or
                several of them joined by ``|``. In a job, the clock of process 0
                decides for all.
            keep: Retention policy to set if the run has none; another one that it has
                is an error. None leaves the policy unchanged.
            purge_delay: How long a checkpoint that ``keep`` deletes can be undeleted
                and keeps its bytes, as for ``run.retention.set``; set together with
                the policy. None leaves it unchanged, which is 3 days in a new run.
            on_failure: ``Raise()`` the error of a failed save, or ``Tolerate(3)``
                failures in a row. Failures are logged in any case.
            create: Whether ``Loop.restore_or`` accepts a run that does not exist.
            distributed: Which processes of a job take part.

        Raises:
            InvalidRequestError: An argument has another type, or is out of range.
        """
        return Loop(
            self,
            self._parts,
            every=every,
            keep=keep,
            purge_delay=purge_delay,
            on_failure=on_failure,
            create=create,
            distributed=distributed,
        )

    def items(
        self,
        which: Which = "latest",
        *,
        distributed: Distributed = ALL_PROCESSES,
        deadline: DurationLike = DEFAULT_DEADLINE,
    ) -> "Items":
        """Returns the items of a checkpoint by name; each is read when asked for.

        In a ``jax.distributed`` job every process calls this, and all get the items of
        the checkpoint that process 0 resolves. Needs no jax.

        >>> run.items("latest")["config"]
        {'layers': 32}

        Args:
            which: A step, "latest", or a tag.
            distributed: Which processes of a job call this: by default all, and each
                gets its own value of a ``PerProcess`` item; otherwise this one alone.
            deadline: Maximum duration until they are listed, as for ``Run.open``.

        Raises:
            StoreError: As for ``Run.open``.
        """
        return self.open(which, distributed=distributed, deadline=deadline).items

    def checkpoint(self, which: Which) -> Checkpoint:
        """Returns a checkpoint: its step, metrics, labels, times and sizes.

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such checkpoint; names the nearest steps.
        """
        return Checkpoint.from_message(self._record(which).checkpoint)

    def trace(self, which: Which) -> SaveTrace:
        """Returns the timeline of the save of a checkpoint.

        >>> print(run.trace("latest"))

        Args:
            which: A step, "latest", or a tag.

        Raises:
            NotFoundError: There is no such checkpoint; names the nearest steps.
        """
        response = self._record(which)
        checkpoint = Checkpoint.from_message(response.checkpoint)
        return SaveTrace(
            run=checkpoint.run,
            step=checkpoint.step,
            upload=checkpoint.uid,
            create_time=checkpoint.create_time,
            commit_time=checkpoint.commit_time,
            writers=tuple(map(WriterReport.from_message, response.writers)),
        )

    def _record(self, which: Which) -> api.GetCheckpointResponse:
        name = self._stub.checkpoint_name(which)
        request = api.GetCheckpointRequest(name=name.resource)
        return self._stub.ask(self._stub.service.GetCheckpoint, request)

    def latest(self) -> Checkpoint:
        """Returns the newest checkpoint.

        Raises:
            NotFoundError: The run has no checkpoint.
        """
        return self.checkpoint("latest")

    def latest_step(self) -> int | None:
        """Returns the newest committed step; None if the run has no checkpoint.

        >>> start = 0 if run.latest_step() is None else run.latest_step() + 1
        """
        try:
            return self.latest().step
        except NotFoundError:
            return None

    def steps(self) -> list[int]:
        """Returns the committed steps, ascending; none if there is no such run.

        Raises:
            DataLossError: The record of a checkpoint is damaged; ``checkpoints`` can
                list the others.
        """
        try:
            return sorted(found.step for found in self.checkpoints())
        except NotFoundError:
            return []

    @list_results("checkpoint")
    def checkpoints(
        self, *, deleted: bool = False, on_damage: OnDamage = None
    ) -> Iterator[Checkpoint]:
        """Yields the checkpoints, the highest step first.

        Args:
            deleted: Lists the deleted checkpoints that can be undeleted, instead of the
                others.
            on_damage: Called with a ``DataLossError`` for each checkpoint whose record
                is damaged; None raises the error in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next checkpoint is damaged.
        """
        request = api.ListCheckpointsRequest(
            parent=self._stub.name.resource, show_deleted=deleted
        )
        for message in self._stub.rows(
            self._stub.service.ListCheckpoints,
            request,
            lambda page: page.checkpoints,
            on_damage,
        ):
            if message.HasField("delete_time") == deleted:
                yield Checkpoint.from_message(message)

    def update(
        self,
        which: Which,
        *,
        labels: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        pinned: bool | None = None,
        etag: str | None = None,
    ) -> Checkpoint:
        """Sets labels, metrics or the pin of a checkpoint, and returns it.

        Args:
            which: A step, "latest" or a tag.
            labels: All labels of the checkpoint; None leaves them unchanged.
            metrics: All metrics of the checkpoint; None leaves them unchanged.
            pinned: Whether the checkpoint cannot be deleted; None leaves it unchanged.
            etag: ``Checkpoint.etag``: rejects the change if the checkpoint changed
                since.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            ConflictError: It changed since the etag was read.
            InvalidRequestError: Nothing is to be set, or a value is out of range.
        """
        return update_checkpoint(
            self._stub, which, labels=labels, metrics=metrics, pinned=pinned, etag=etag
        )

    def delete(
        self,
        step: int,
        *,
        uid: str | None = None,
        etag: str | None = None,
        purge_delay: DurationLike | None = None,
    ) -> Checkpoint:
        """Deletes a checkpoint, and returns it with its ``purge_time``.

        Until then it can be undeleted. Deleting it again changes nothing.

        Args:
            step: Step of the checkpoint.
            uid: ``Checkpoint.uid``: rejects another checkpoint at the same step.
            etag: ``Checkpoint.etag``: rejects the deletion if it changed since.
            purge_delay: How long it can be undeleted, a ``timedelta`` or seconds; None:
                the purge delay of the run.

        Raises:
            NotFoundError: There is no such checkpoint, or its uid is another one.
            PreconditionError: It is pinned or has a tag.
            ConflictError: It changed since the etag was read.
        """
        request = api.DeleteCheckpointRequest(
            name=self._step_resource(step),
            uid=checked_text(f"{self.name}: uid=", uid),
            etag=checked_text(f"{self.name}: etag=", etag),
            request_id=str(uuid.uuid4()),
        )
        if purge_delay is not None:
            what = f"purge_delay= of {self.name}"
            request.purge_delay.CopyFrom(duration_message(purge_delay, what))
        response = self._stub.ask(self._stub.service.DeleteCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def undelete(self, step: int, *, uid: str | None = None) -> Checkpoint:
        """Restores a deleted checkpoint to the list of the run, and returns it.

        Args:
            step: Step of the checkpoint.
            uid: ``Checkpoint.uid``: rejects another checkpoint at the same step.

        Raises:
            NotFoundError: There is no such checkpoint, its uid is another one, or it
                was purged.
            ConflictError: It is being purged.
        """
        request = api.UndeleteCheckpointRequest(
            name=self._step_resource(step),
            uid=checked_text(f"{self.name}: uid=", uid),
            request_id=str(uuid.uuid4()),
        )
        response = self._stub.ask(self._stub.service.UndeleteCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def purge(
        self, step: int, *, uid: str | None = None, etag: str | None = None
    ) -> None:
        """Removes a deleted checkpoint for good, and frees its step.

        Args:
            step: Step of the checkpoint.
            uid: ``Checkpoint.uid``: rejects another checkpoint at the same step.
            etag: ``Checkpoint.etag``: rejects the purge if it changed since.

        Raises:
            NotFoundError: There is no such checkpoint, or its uid is another one.
            PreconditionError: It is not deleted, or a hold or an upload needs it.
            ConflictError: It changed since the etag was read.
        """
        request = api.PurgeCheckpointRequest(
            name=self._step_resource(step),
            uid=checked_text(f"{self.name}: uid=", uid),
            etag=checked_text(f"{self.name}: etag=", etag),
        )
        stub, may_be_purged = self._stub, False
        connection = stub.connection
        for attempt in connection.attempts("PurgeCheckpoint"):
            with attempt:
                try:
                    with translate_rpc_errors(connection.address):
                        stub.service.PurgeCheckpoint(
                            request, timeout=connection.timeout
                        )
                except UnavailableError:
                    may_be_purged = True  # only the response may have been lost
                    raise
                except NotFoundError:
                    if not may_be_purged:
                        raise

    def _step_resource(self, step: int) -> str:
        name = self._stub.checkpoint_name(step)
        if isinstance(name.which, str):
            raise InvalidRequestError(
                f"{self.name}: expected a step (int), got {step!r}, which can move to "
                "another checkpoint"
            )
        return name.resource

    def info(self) -> RunInfo:
        """Returns the run's record: uid, labels, purge delay, etag.

        Raises:
            NotFoundError: There is no such run.
        """
        return RunInfo.from_message(get_run(self._stub))

    def configure(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        purge_delay: DurationLike | None = None,
        etag: str | None = None,
    ) -> RunInfo:
        """Sets labels or the purge delay of the run, and returns it; creates the run
        if necessary.

        Args:
            labels: All labels of the run; None leaves them unchanged.
            purge_delay: How long a deleted checkpoint can be undeleted, a ``timedelta``
                or seconds; None leaves it unchanged.
            etag: ``RunInfo.etag``: rejects the change if the run changed since.

        Raises:
            InvalidRequestError: Nothing is to be set, or a value is out of range.
            ConflictError: The run changed since the etag was read.
        """
        message, paths = api.Run(), []
        if labels is not None:
            paths.append("labels")
            message.labels.update(checked_labels(self.name, labels))
        if purge_delay is not None:
            paths.append("purge_delay")
            set_purge_delay(self._stub, message, purge_delay)
        if not paths:
            raise InvalidRequestError(
                f"{self.name}: expected labels= or purge_delay= to configure, got none"
            )
        return update_run(self._stub, message, paths, etag)

    def usage(self) -> Usage:
        """Returns how many bytes and data files the run uses.

        Raises:
            NotFoundError: There is no such run.
        """
        service = MaintenanceServiceStub(self._stub.connection.channel)
        request = maintenance_api.GetUsageRequest(name=self._stub.name.resource)
        response = self._stub.ask(service.GetUsage, request)
        return read_message(Usage, response, run=self.name)

    def verify(
        self,
        which: Which = "latest",
        *,
        progress: Callable[[Verification], object] | None = None,
    ) -> Verification:
        """Reads every byte of a checkpoint on the server, and returns the damage.

        Only the findings are sent. A verification that is interrupted, as by a restart
        of the server, starts again.

        Args:
            which: A step, "latest", or a tag.
            progress: Called about once a second with the findings so far.

        Raises:
            NotFoundError: There is no such checkpoint, or it was purged in the
                meantime.
            DataLossError: The manifest itself is damaged.
            UnavailableError: The server, or its storage, does not answer.
        """
        name = self._stub.checkpoint_name(which)
        for left in reversed(range(BEGINNINGS)):
            with closing(_findings(self._stub, name)) as findings:
                found = next(findings)
                try:
                    for found in findings:
                        if progress is not None:
                            progress(found)
                except UnavailableError as e:
                    # With a reason the server itself reports the error: no retry helps.
                    if e.reason or not left:
                        raise
                else:
                    return found
        raise AssertionError

    def diff(
        self, base: Which, which: Which = "latest", *, of: "Run | None" = None
    ) -> Diff:
        """Returns the differences between two checkpoints, leaf by leaf.

        They follow from the digests of the chunks: no data is read.

        Args:
            base: The earlier checkpoint: a step, "latest", or a tag.
            which: The later checkpoint.
            of: The run of the later checkpoint; None: this run.

        Raises:
            NotFoundError: There is no such run or checkpoint.
            DataLossError: A manifest is damaged.
            InvalidRequestError: The other run belongs to another client.
        """
        other = self._stub if of is None else getattr(of, "_stub", None)
        if other is None or other.connection is not self._stub.connection:
            raise InvalidRequestError(
                f"diff of {self.name}: expected a run of the same client, got {of!r}"
            )
        request = api.DiffCheckpointsRequest(
            base=self._stub.checkpoint_name(base).resource,
            name=other.checkpoint_name(which).resource,
        )
        return self._stub.connection.retry(
            "DiffCheckpoints", lambda: _difference(self._stub, request)
        )

    def import_from(
        self,
        source: "str | ForeignRun",
        *,
        steps: Iterable[int] | None = None,
        labels: Mapping[str, str] | None = None,
        mapping: MappingRules | None = None,
        progress: ProgressCallback | None = None,
        jobs: int | None = None,
    ) -> list[Transfer]:
        """Imports checkpoints that another project wrote, the lowest step first, and
        returns once all are committed. Needs no jax, and none of the project's code.

        Each becomes a checkpoint of this run at the same step, with its metrics, and
        with labels that record where it comes from: ``import.url``, ``import.format``,
        ``import.digest`` of the files that describe it, ``import.time``, and
        ``import.create_time`` if they state it. Chunks that an earlier checkpoint has
        are not stored again. A step that was imported from the same files is skipped,
        so an import that was interrupted is repeated to finish it.

        Args:
            source: Format and location of the checkpoints, such as
                "orbax:///ckpts/run" or "safetensors:gs://bucket/model"; or what
                ``open_foreign`` returns.
            steps: Steps to import; None: all finished ones.
            labels: Texts to keep with each checkpoint, besides these.
            mapping: Rules that make another tree of each checkpoint, as for
                ``Run.restore``. Their digest is the label ``import.mapping``: a step
                that other rules made is not skipped but rejected.
            progress: Called with a ``Progress`` of each checkpoint; see
                ``ProgressCallback``.
            jobs: Maximum reads in flight without a mapping; None: 16.

        Returns:
            A ``Transfer`` for each step, also for those that were skipped.

        Raises:
            NotFoundError: The location has no such step, or none at all.
            AlreadyExistsError: The run has another checkpoint at one of the steps;
                nothing was imported.
            MismatchError: The rules of the mapping do not fit a step; nothing was
                imported.
            PreconditionError: A step holds something that a checkpoint cannot hold.
            DataLossError: Files of a step are damaged; the steps before it are
                imported.
            UnavailableError: The location or the store does not answer.
        """
        return list(
            run_import(
                self,
                source,
                steps=steps,
                labels=labels,
                mapping=mapping,
                progress=progress,
                jobs=jobs,
            )
        )

    def copy_to(
        self,
        target: Self,
        *,
        steps: Iterable[int] | None = None,
        tags: bool = True,
        move_tags: bool = False,
        retention: bool = False,
        progress: ProgressCallback | None = None,
    ) -> list[Transfer]:
        """Copies checkpoints to another run, of any store, and returns once all are
        committed. Needs no jax.

        Chunks keep their bytes, and are compared with their checksums twice, when they
        are read and when they are stored. Those that the target has are not read.
        Metrics, labels, items, documents and pins are copied, and the labels and the
        purge delay of the run if the target does not exist. Checkpoints are created in
        the order of their creation, with the labels ``copy.url``, ``copy.time``, and
        ``copy.uid`` and ``copy.create_time`` of the checkpoint that was saved. A
        checkpoint with the same ``copy.uid`` is skipped, so a copy that was interrupted
        is repeated to finish it, and one that is repeated moves nothing.

        >>> with connect("gs://lab/store") as lab:
        ...     run.copy_to(lab.run("prod/llama-8b"), steps=[100])

        Args:
            target: The run to copy to.
            steps: Steps to copy; None: all.
            tags: Whether to set the tags of the copied checkpoints.
            move_tags: Whether tags that name other checkpoints in the target move.
            retention: Whether to set the retention policy, which may then delete
                checkpoints of the target.
            progress: Called with a ``Progress`` of each checkpoint; see
                ``ProgressCallback``.

        Returns:
            A ``Transfer`` for each checkpoint, also for those that were skipped.

        Raises:
            NotFoundError: There is no such run or step.
            InvalidRequestError: The target is this run, or no run.
            AlreadyExistsError: The target has another checkpoint at one of the steps;
                nothing was copied.
            DataLossError: A checkpoint is damaged; those before it are copied.
            PreconditionError: Tags name other checkpoints in the target; everything
                else is copied.
            UnavailableError: One of the stores does not answer.
        """
        copy = run_copy(self, target, progress)
        done = list(copy.checkpoints(steps))
        if tags:
            copied = [one.checkpoint.step for one in done]
            copy.tags(copied, move=move_tags)
        if retention:
            copy.retention()
        return done

    def plot(self, metric: str) -> Plot:
        """Returns a plot of a metric over the steps, which a notebook shows.

        >>> run.plot("loss").save("loss.svg")

        Args:
            metric: Name of a metric that checkpoints of the run were saved with. Those
                without it, or whose value is not finite, leave a gap.

        Raises:
            NotFoundError: There is no such run, or no checkpoint has the metric; names
                the nearest.
        """
        return make_plot(self.name, metric, self.checkpoints())

    def timeline(
        self, metric: str = "", *, axis: Literal["step", "time"] = "step"
    ) -> "Picture":
        """Returns the checkpoints over steps or time, which a notebook shows: kept,
        deleted, tagged, pinned and held ones.

        >>> run.timeline("loss").save("run.svg")

        Args:
            metric: Name of a metric that is drawn above them; "" for none.
            axis: "step", or "time" of the commits.

        Raises:
            NotFoundError: There is no such run.
            InvalidRequestError: An argument is of another type.
        """
        from storesvc_client._pictures.svg import Picture
        from storesvc_client._pictures.timeline import timeline

        place = f"timeline of {self.name}"
        if not isinstance(metric, str):
            raise InvalidRequestError(
                f"{place}: expected the name of a metric, got {metric!r}"
            )
        checked_choice(f"{place}: axis=", axis, Literal["step", "time"])
        drawing = timeline(
            [*self.checkpoints(), *self.checkpoints(deleted=True)],
            tags=self.tags.list(),
            holds=self.holds.list(),
            metric=metric,
            axis=axis,
        )
        return Picture(name=place, drawing=drawing)

    def watch(self, since: str = "now") -> Generator[Event]:
        """Returns an endless iterator over the changes of the run's checkpoints.

        It starts with this call, continues through restarts of the server, and yields
        each commit once. Close it to end the call.

        >>> for event in run.watch():
        ...     if event.kind == "committed":
        ...         evaluate(run.restore(event.step))

        Args:
            since: "now"; "latest", which first yields the newest checkpoint, if there
                is one; or an ``Event.resume_token``, which continues after that event.

        Raises:
            InvalidRequestError: The token does not belong to a watch of this run.
            PreconditionError: The events after the token were dropped.
            UnavailableError: The server does not answer for longer than a restart
                takes; the iterator raises it, too.
            DataLossError: The iterator raises it if the record of the next event is
                damaged. ``metadata["resume_token"]`` continues after it.
        """
        parent = self._stub.name.resource
        return watch(self._session.connection, parent, since, latest_of=[parent])


def get_parts(run: Run) -> RunParts:
    """Returns the parts of a run that a user holds."""
    return run._parts  # noqa: SLF001 - no user sees them, and this is the only door


def run_import(
    run: Run,
    source: "str | ForeignRun",
    *,
    steps: Iterable[int] | None,
    labels: Mapping[str, str] | None,
    mapping: MappingRules | None,
    progress: ProgressCallback | None,
    jobs: int | None,
) -> Iterator[Transfer]:
    """Imports as ``Run.import_from``, and yields each checkpoint once it is
    committed."""
    from storesvc_client._foreign.importing import import_steps, wanted_steps
    from storesvc_client._foreign.mount import ForeignRun, open_foreign
    from storesvc_client._foreign.source import JOBS

    what = f"import into {run.name}"
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise InvalidRequestError(
            f"{what}: jobs=: expected a whole number of at least 1, got {jobs!r}"
        )
    wanted = None
    if steps is not None:
        wanted = [checked_step(run.name, step) for step in steps]
    found = open_foreign(source) if isinstance(source, str) else source
    if not isinstance(found, ForeignRun):
        raise InvalidRequestError(
            f"{what}: expected a URL, such as orbax:///ckpts/run, or what open_foreign "
            f"returns, got {source!r}"
        )
    if mapping is not None:
        found = found.map(mapping)
    parts = get_parts(run)
    yield from import_steps(
        parts.session,
        parts.stub,
        found.root,
        steps=wanted_steps(found.name, found.steps(), wanted),
        labels=checked_labels(what, labels),
        progress=progress,
        jobs=JOBS if jobs is None else jobs,
        rules=found.mapping,
    )


def run_copy(
    source: Run, target: Run, progress: ProgressCallback | None = None
) -> "RunCopy":
    """Returns the copy from a run to another."""
    if not isinstance(target, Run):
        raise InvalidRequestError(
            f"copy of {source.name}: expected a run to copy to, got {target!r}"
        )
    from storesvc_client._api.copying import RunCopy

    return RunCopy(get_parts(source), get_parts(target), progress)


def _findings(stub: RunStub, name: CheckpointName) -> Generator[Verification]:
    """Yields the findings so far: first none, once the server has begun."""
    verify = MaintenanceServiceStub(stub.connection.channel).VerifyCheckpoint
    request = maintenance_api.VerifyCheckpointRequest(name=name.resource)
    reports = stub.connection.stream("VerifyCheckpoint", partial(verify, request))
    damages = list[Damage]()
    with closing(reports):
        checkpoint = Checkpoint.from_message(next(reports).checkpoint)
        yield Verification(
            checkpoint=checkpoint, chunk_count=0, stored_bytes=0, damages=()
        )
        for report in reports:
            damages += (read_message(Damage, each) for each in report.damages)
            yield Verification(
                checkpoint=checkpoint,
                chunk_count=report.chunk_count,
                stored_bytes=report.stored_bytes,
                damages=tuple(damages),
            )


def _difference(stub: RunStub, request: api.DiffCheckpointsRequest) -> Diff:
    summary = api.DiffSummary()
    found, items = list[LeafDifference](), list[ItemDifference]()
    for response in stub.service.DiffCheckpoints(
        request, timeout=stub.connection.timeout
    ):
        if response.HasField("summary"):
            summary = response.summary
        for difference in response.differences:
            if is_item(difference.key):
                items.append(ItemDifference.from_message(difference))
            else:
                found.append(LeafDifference.from_message(difference))
    return Diff(
        base=Checkpoint.from_message(summary.base),
        checkpoint=Checkpoint.from_message(summary.checkpoint),
        same_leaf_count=summary.same_leaf_count,
        differences=tuple(found),
        items=tuple(items),
    )
