"""The groups of a run, and calls that ``Run`` and ``Client`` share.

``Holds`` keep a checkpoint from being purged while it is read. ``Retention`` decides
which checkpoints stay. ``Tags`` are names for checkpoints, which can be moved to
another checkpoint. ``Uploads`` are checkpoints that are being written.

A watch is a stream of events, each with a resume token. A broken stream is opened again
from the last token, so no event is missed or repeated.
"""

import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, Self, cast

from storesvc.format.names import (
    HoldName,
    InvalidNameError,
    RunName,
    TagName,
    UploadName,
    Which,
)
from storesvc_client._restore.hold_lease import Lease
from storesvc_client._rpc.connection import Connection, OnDamage, RunStub, rows
from storesvc_client._rpc.retry import BEGINNINGS
from storesvc_client._session import Session
from storesvc_client._values.arguments import (
    DurationLike,
    checked_flag,
    checked_labels,
    checked_metrics,
    checked_text,
    duration_message,
    is_text,
    parse_received,
)
from storesvc_client._values.messages import read_message
from storesvc_client._values.models import (
    Checkpoint,
    Event,
    HoldInfo,
    RetentionDecision,
    RunInfo,
    Tag,
    UploadInfo,
)
from storesvc_client._values.policies import (
    RetentionPolicy,
    parse_message,
    policy_message,
)
from storesvc_client._views.notebook import Rows, list_results
from storesvc_client.errors import (
    ConflictError,
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    translate_rpc_errors,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api
from storesvc_proto.v1 import maintenance_service_pb2, upload_service_pb2
from storesvc_proto.v1.maintenance_service_pb2_grpc import MaintenanceServiceStub

if TYPE_CHECKING:
    from storesvc_client._restore.checkpoint import OpenCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Result of garbage collection in one run, or its preview; from
    ``Client.collect``."""

    run: str
    """Name of the run, ``namespace/run``."""
    aborted_upload_count: int
    """Uploads that were aborted because their lease had expired."""
    deleted_checkpoint_count: int
    """Checkpoints that were deleted because the retention policy does not keep them."""
    purged_checkpoint_count: int
    """Deleted checkpoints that were purged because their purge time had passed."""
    garbage_object_count: int
    """Objects in the storage that nothing refers to."""
    deleted_object_count: int
    """Number of those objects that were deleted."""
    postponed: str
    """Reason why something was left for the next collection; "" if nothing was."""

    @classmethod
    def from_message(
        cls, message: maintenance_service_pb2.CollectGarbageResponse
    ) -> "Collected":
        """Returns the value of a protobuf message."""
        name = parse_received(RunName.from_resource, message.run)
        return read_message(cls, message, run=str(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Storage that a run uses; from ``Run.usage``."""

    run: str
    """Name of the run, ``namespace/run``."""
    checkpoint_count: int
    """Checkpoints that are not deleted."""
    deleted_checkpoint_count: int
    """Deleted checkpoints that are not purged yet."""
    upload_count: int
    """Live uploads."""
    logical_bytes: int
    """Bytes of all leaves of all checkpoints, including deleted ones."""
    stored_bytes: int
    """Bytes of their stored chunks; a chunk counts once for each checkpoint that uses
    it."""
    distinct_bytes: int
    """Bytes of their stored chunks, each counted once: the sum over the data files of
    the largest number of bytes that one checkpoint uses of the file."""
    file_count: int
    """Data files that they need."""


def collect(
    connection: Connection, request: maintenance_service_pb2.CollectGarbageRequest
) -> Iterator[Collected]:
    """Collects garbage as ``Client.collect``; yields each run once, over as many calls
    as it takes."""
    seen = set[str]()
    collect = MaintenanceServiceStub(connection.channel).CollectGarbage
    for left in reversed(range(BEGINNINGS)):
        passes = connection.stream("CollectGarbage", partial(collect, request))
        with closing(passes):
            try:
                for message in passes:
                    if message.done and message.run not in seen:
                        seen.add(message.run)
                        yield Collected.from_message(message)
            except UnavailableError as e:
                # With a reason the server itself reports the error: no retry helps.
                if e.reason or not left:
                    raise
            else:
                return


class Group:
    """Something that a run has, such as its tags."""

    def __init__(self, stub: RunStub) -> None:
        self._stub = stub

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._stub.name}>"


class Holds(Group):
    """The holds of a run; ``run.holds``.

    Restores and reads hold their checkpoint by themselves. Create a hold for a
    checkpoint that is read again and again.

    >>> with run.holds.create("best", ttl=3600) as hold:
    ...     state = hold.open().restore(like=state)
    """

    def __init__(self, session: Session, stub: RunStub) -> None:
        super().__init__(stub)
        self._session = session

    def create(
        self,
        which: Which = "latest",
        *,
        owner: str | None = None,
        ttl: DurationLike = timedelta(minutes=10),
    ) -> "Hold":
        """Keeps a checkpoint from being purged until the returned hold is closed.

        Args:
            which: A step, "latest" or a tag.
            owner: Name of the holder, for people; None: the name of this machine.
            ttl: How long the hold outlives this process, a ``timedelta`` or seconds.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            InvalidRequestError: The owner or the ttl is out of range.
        """
        checkpoint = self._stub.checkpoint_name(which)
        lease = Lease(self._stub.connection, checkpoint, owner=owner, ttl=ttl)
        try:
            return Hold(self._session, lease)
        except BaseException:
            lease.end()
            raise

    def release(self, hold: str) -> None:
        """Ends a hold, of any process; a hold that does not exist is no error.

        Args:
            hold: ``HoldInfo.id``.

        Raises:
            InvalidRequestError: It is no id of a hold.
        """
        request = api.DeleteHoldRequest(name=_resource(self._stub, HoldName, hold))
        self._stub.ask(self._stub.service.DeleteHold, request)

    @list_results("hold")
    def list(self, *, on_damage: OnDamage = None) -> Iterator[HoldInfo]:
        """Yields the holds, including holds of restores and expired holds.

        Args:
            on_damage: Called with a ``DataLossError`` for each hold whose record is
                damaged; None raises the error in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next hold is damaged.
        """
        request = api.ListHoldsRequest(parent=self._stub.name.resource)
        method = self._stub.service.ListHolds
        found = self._stub.rows(method, request, lambda page: page.holds, on_damage)
        yield from map(HoldInfo.from_message, found)


class Hold:
    """A hold on a checkpoint; returned by ``run.holds.create``.

    A thread renews it until it is closed. The checkpoint can be deleted in the
    meantime; it is not purged, and can be read through the hold.
    """

    def __init__(self, session: Session, lease: Lease) -> None:
        from storesvc_client._restore.checkpoint import OpenCheckpoint, read_checkpoint

        self._lease = lease
        self._opened = OpenCheckpoint(
            read_checkpoint(session, lease.checkpoint, uid=lease.uid, held_by=lease)
        )
        self.checkpoint = self._opened.info
        """The held checkpoint as it was when the hold was created."""

    def __repr__(self) -> str:
        return f"<Hold on {self._opened.name} until {self.expire_time.isoformat()}>"

    @property
    def expire_time(self) -> datetime:
        """Time at which the hold expires unless it is renewed, in UTC."""
        return self._lease.expire_time

    def open(self) -> "OpenCheckpoint":
        """Returns the checkpoint for several reads, even after it was deleted.

        Raises:
            InvalidRequestError: The hold is closed.
            PreconditionError: It was not renewed in time, and may have expired.
            StoreError: The last renewal failed.
        """
        if self._lease.has_ended:
            raise InvalidRequestError(
                f"the hold on {self._opened.name} is closed; take another one"
            )
        self.check()
        return self._opened

    def check(self) -> None:
        """Raises an error if the hold may have expired.

        Raises:
            PreconditionError: It was not renewed in time.
            StoreError: The last renewal failed.
        """
        error = self._lease.error
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the hold; a second call does nothing.

        Raises:
            StoreError: The last renewal failed.
        """
        self._lease.end()
        self.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self.close()
        else:  # the error that ends the block is the one to see
            self._lease.end()


def update_checkpoint(
    stub: RunStub,
    which: Which,
    *,
    labels: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
    pinned: bool | None = None,
    etag: str | None = None,
) -> Checkpoint:
    """Sets labels, metrics or the pin of a checkpoint; see ``Run.update``."""
    place = f"update of {stub.name}"
    message = api.Checkpoint(
        labels=checked_labels(place, labels),
        metrics=checked_metrics(place, metrics),
        pinned=bool(checked_flag(f"{place}: pinned=", pinned)),
    )
    given = {"labels": labels, "metrics": metrics, "pinned": pinned}
    paths = [name for name, value in given.items() if value is not None]
    if not paths:
        raise InvalidRequestError(
            f"{place}: expected labels=, metrics= or pinned= to set, got none"
        )
    # Resolved once: a retry must change the same checkpoint, even if a tag moves.
    message.name = stub.step_name(which).resource
    request = api.UpdateCheckpointRequest(
        checkpoint=message,
        etag=checked_text(f"{stub.name}: etag=", etag),
        request_id=str(uuid.uuid4()),
    )
    request.update_mask.paths.extend(paths)
    response = stub.ask(stub.service.UpdateCheckpoint, request)
    return Checkpoint.from_message(response.checkpoint)


def get_run(stub: RunStub) -> api.Run:
    """Returns the record of a run.

    Raises:
        NotFoundError: There is no such run.
    """
    request = api.GetRunRequest(name=stub.name.resource)
    return stub.ask(stub.service.GetRun, request).run


def update_run(
    stub: RunStub, message: api.Run, paths: list[str], etag: str | None
) -> RunInfo:
    """Sets the fields of a run at ``paths``, and returns the run.

    Raises:
        InvalidRequestError: A value is out of range.
        ConflictError: The run has another etag.
        PreconditionError: The server keeps no migrations.
    """
    message.name = stub.name.resource
    request = api.UpdateRunRequest(
        run=message,
        etag=checked_text(f"{stub.name}: etag=", etag),
        request_id=str(uuid.uuid4()),
    )
    request.update_mask.paths.extend(paths)
    keeps_none = PreconditionError(
        f"{stub.name}: expected a server that keeps migrations, got a server at "
        f"{stub.connection.address} that keeps none, as release 0.2 does; upgrade "
        "it; until then restore with mapping=, and copy into a run that exists"
    )
    try:
        # The request id makes retries of this request idempotent.
        run = stub.ask(stub.service.UpdateRun, request).run
    except InvalidRequestError as e:
        # All else that such an update has was read from a server.
        if "migrations" in paths and e.reason == "INVALID_FIELD":
            raise keeps_none from e
        raise
    if "migrations" in paths and run.migrations != message.migrations:
        raise keeps_none
    return RunInfo.from_message(run)


def set_purge_delay(stub: RunStub, message: api.Run, delay: DurationLike) -> None:
    """Sets the purge delay in the message of a run.

    Raises:
        InvalidRequestError: It is no duration.
    """
    what = f"purge_delay= of {stub.name}"
    message.purge_delay.CopyFrom(duration_message(delay, what))


APPLY_SECONDS: Final = 3600.0
"""Timeout of a call that applies a policy; it may delete thousands of checkpoints."""


class Retention(Group):
    """The retention policy of a run; ``run.retention``.

    >>> policy = KeepLatest(3) | KeepEvery(steps=10_000)
    >>> deleted = [d.step for d in run.retention.preview(policy) if not d.kept]
    >>> run.retention.set(policy, purge_delay=3 * 86_400)
    """

    def get(self) -> RetentionPolicy | None:
        """Returns the policy of the run; None if all checkpoints stay.

        Raises:
            NotFoundError: There is no such run.
        """
        run = get_run(self._stub)
        return parse_message(run.retention) if run.HasField("retention") else None

    def set(
        self,
        policy: RetentionPolicy | None,
        *,
        purge_delay: DurationLike | None = None,
        etag: str | None = None,
    ) -> RunInfo:
        """Sets the policy of the run, and returns the run; creates it if necessary.

        The server deletes the checkpoints that the policy does not keep: now, after
        each commit, and at each collection. ``preview`` lists them in advance. They
        keep their bytes until the purge delay is over, and then until a collection: of
        a bucket without a server, ``storectl gc`` or ``connect(collect=True)``.

        Args:
            policy: Such as ``KeepLatest(3) | KeepEvery(steps=10_000)``; None keeps
                all checkpoints.
            purge_delay: How long a deleted checkpoint can be undeleted, a ``timedelta``
                or seconds; 0: not at all. None leaves it unchanged, which is 3 days in
                a new run.
            etag: ``RunInfo.etag``: rejects the change if the run changed since.

        Raises:
            InvalidRequestError: The policy contradicts itself, or keeps nothing.
            ConflictError: The run changed since the etag was read.
        """
        message, paths = api.Run(), ["retention"]
        if policy is not None:
            message.retention.CopyFrom(policy_message(policy))
        if purge_delay is not None:
            paths.append("purge_delay")
            set_purge_delay(self._stub, message, purge_delay)
        return update_run(self._stub, message, paths, etag)

    def preview(self, policy: RetentionPolicy | None = None) -> list[RetentionDecision]:
        """Returns what a policy would keep and delete; deletes nothing.

        Args:
            policy: The policy to evaluate; None: the policy of the run.

        Returns:
            A decision for each checkpoint, the highest step first.

        Raises:
            InvalidRequestError: The policy contradicts itself, or keeps nothing.
            NotFoundError: There is no such run.
        """
        request = api.ApplyRetentionRequest(
            name=self._stub.name.resource, validate_only=True
        )
        if policy is not None:
            request.policy.CopyFrom(policy_message(policy))
        return self._stub.connection.retry(
            "ApplyRetention", lambda: Rows(self._decisions(request))
        )

    def apply(self) -> list[RetentionDecision]:
        """Deletes the checkpoints that the policy of the run does not keep, at once.

        They can be undeleted until their ``purge_time``. After an ``UnavailableError``
        some may be deleted; it is safe to call this again.

        Returns:
            A decision for each checkpoint, the highest step first.

        Raises:
            NotFoundError: There is no such run.
        """
        # The deleting call is not retried, so a server that restarts is awaited here.
        get_run(self._stub)
        request = api.ApplyRetentionRequest(name=self._stub.name.resource)
        return Rows(self._decisions(request))

    def _decisions(
        self, request: api.ApplyRetentionRequest
    ) -> Iterator[RetentionDecision]:
        method = self._stub.service.ApplyRetention
        with translate_rpc_errors(self._stub.connection.address):
            for page in method(request, timeout=APPLY_SECONDS):
                yield from map(partial(read_message, RetentionDecision), page.decisions)


class Tags(Group):
    """The tags of a run; ``run.tags``.

    A checkpoint with a tag is neither deleted nor dropped by a retention policy. A tag
    is accepted wherever a step is.

    >>> run.tags.set("best", 100).step
    100
    >>> state = run.restore("best", like=state)
    """

    def set(
        self,
        name: str,
        which: Which = "latest",
        *,
        protected: bool | None = None,
        etag: str | None = None,
    ) -> Tag:
        """Creates a tag, or moves it to another checkpoint, and returns it.

        Args:
            name: Name of the tag.
            which: A step, "latest" or another tag.
            protected: Whether later changes need the tag's etag; None leaves it
                unchanged.
            etag: ``Tag.etag``: rejects the change if the tag changed since.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            PreconditionError: The tag is protected, and ``etag`` is None.
            ConflictError: The tag changed since the etag was read.
        """
        request = api.SetTagRequest(
            name=_resource(self._stub, TagName, name),
            checkpoint=self._stub.checkpoint_name(which).resource,
            protected=checked_flag(f"{self._stub.name}: protected=", protected),
            etag=checked_text(f"{self._stub.name}: etag=", etag),
            request_id=str(uuid.uuid4()),
        )
        response = self._stub.ask(self._stub.service.SetTag, request)
        return Tag.from_message(response.tag)

    def delete(self, name: str, *, etag: str | None = None) -> None:
        """Deletes a tag; its checkpoint stays.

        Args:
            name: Name of the tag.
            etag: ``Tag.etag``: rejects the deletion if the tag changed since.

        Raises:
            NotFoundError: There is no such tag.
            PreconditionError: The tag is protected, and ``etag`` is None.
            ConflictError: The tag changed since the etag was read.
        """
        request = api.DeleteTagRequest(
            name=_resource(self._stub, TagName, name),
            etag=checked_text(f"{self._stub.name}: etag=", etag),
            request_id=str(uuid.uuid4()),
        )
        self._stub.ask(self._stub.service.DeleteTag, request)

    @list_results("tag")
    def list(self, *, on_damage: OnDamage = None) -> Iterator[Tag]:
        """Yields the tags, by name.

        Args:
            on_damage: Called with a ``DataLossError`` for each tag whose record is
                damaged; None raises the error in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next tag is damaged.
        """
        request = api.ListTagsRequest(parent=self._stub.name.resource)
        service = self._stub.service
        found = self._stub.rows(service.ListTags, request, lambda p: p.tags, on_damage)
        yield from map(Tag.from_message, found)


class Uploads(Group):
    """The uploads of a run; ``run.uploads``.

    >>> [upload.step for upload in run.uploads.list()]
    [200]
    """

    def __init__(self, stub: RunStub) -> None:
        super().__init__(stub)
        self._service = stub.connection.uploads

    def list(self, *, on_damage: OnDamage = None) -> Iterator[UploadInfo]:
        """Yields the live uploads, by id; none if the run does not exist.

        Args:
            on_damage: Called with a ``DataLossError`` for each upload whose records are
                damaged; None raises the error in its place.

        Raises:
            DataLossError: The records of the next upload are damaged.
            UnavailableError: The server does not answer for longer than a restart
                takes.
        """
        return list_uploads(
            self._stub.connection, self._stub.name.resource, on_damage=on_damage
        )

    def get(self, upload: str) -> UploadInfo:
        """Returns an upload, live or ended; ended uploads are kept for at least a day.

        Args:
            upload: ``UploadInfo.id``, or ``Checkpoint.uid``, which is the id of the
                upload that became the checkpoint.

        Raises:
            InvalidRequestError: It is no id of an upload.
            NotFoundError: There is no such upload.
        """
        name = _resource(self._stub, UploadName, upload)
        request = upload_service_pb2.GetUploadRequest(name=name)
        try:
            response = self._stub.ask(self._service.GetUpload, request)
        except ConflictError as e:  # for a writer: its upload was superseded
            raise NotFoundError(
                f"{self._stub.name} has no upload {upload}, or it ended days ago; list "
                "the live uploads",
                reason=e.reason,
                metadata=e.metadata,
            ) from e
        return UploadInfo.from_message(response.upload)

    def abort(self, upload: str) -> None:
        """Aborts an upload and frees its step: its writers can no longer commit.

        An upload that has ended, or does not exist, is no error.

        Args:
            upload: ``UploadInfo.id``.

        Raises:
            AlreadyExistsError: The upload is committed.
            ConflictError: The upload changed at the same moment.
            InvalidRequestError: It is no id of an upload.
        """
        name = _resource(self._stub, UploadName, upload)
        request = upload_service_pb2.AbortUploadRequest(name=name)
        self._stub.ask(self._service.AbortUpload, request)


def _resource(
    stub: RunStub, kind: type[HoldName | TagName | UploadName], child: str
) -> str:
    try:
        return kind(stub.name, child).resource
    except (InvalidNameError, TypeError) as e:
        raise InvalidRequestError(f"{stub.name}: {e}") from e


@list_results("upload")
def list_uploads(
    connection: Connection, parent: str, *, on_damage: OnDamage
) -> Iterator[UploadInfo]:
    """Yields the live uploads below the resource of a run, a namespace or the store."""
    service = connection.uploads
    found = rows(
        partial(connection.ask, service.ListUploads),
        upload_service_pb2.ListUploadsRequest(parent=parent),
        lambda page: page.uploads,
        on_damage,
    )
    yield from map(UploadInfo.from_message, found)


_COMMITTED: Final = api.CheckpointEvent.KIND_COMMITTED


def watch(
    connection: Connection, parent: str, since: str, *, latest_of: Iterable[str]
) -> Generator[Event]:
    """Returns an endless iterator over events.

    Args:
        connection: Connection to the store.
        parent: Resource name of the run or the namespace.
        since: "now", "latest" or a resume token.
        latest_of: Runs whose newest checkpoints "latest" yields first; iterated only
            for "latest".

    Raises:
        StoreError: As for ``Run.watch``.
    """
    name = parent.removeprefix("namespaces/").replace("/runs/", "/")
    wrong = (
        f"watch of {name}: expected since= 'now', 'latest' or the resume_token of one "
        f"of its events, got {since!r}"
    )
    if not is_text(since) or not since:
        raise InvalidRequestError(wrong)
    events = _events(connection, parent, since, latest_of)
    # Runs to the first yield, so that the watch includes all changes after this call,
    # and close() reaches the `finally` of the generator.
    try:
        next(events)
    except InvalidRequestError as e:
        if e.reason != "INVALID_RESUME_TOKEN":
            raise
        raise InvalidRequestError(wrong, reason=e.reason, metadata=e.metadata) from e
    return cast("Generator[Event]", events)


def _events(
    connection: Connection, parent: str, since: str, latest_of: Iterable[str]
) -> Generator[Event | None]:
    """Yields None once the server has started the watch, and then events."""
    stream = _Stream(connection, parent, "" if since in ("now", "latest") else since)
    try:
        stream.next()
        shown = {}
        if since == "latest":  # the stream yields later commits, too
            newest = [_newest(connection, run) for run in latest_of]
            shown = {message.uid: message for message in newest if message is not None}
        yield None
        for message in tuple(shown.values()):
            event = api.CheckpointEvent(kind=_COMMITTED, checkpoint=message)
            yield Event.from_message(event, stream.token)
        while True:
            change = stream.next()
            if change is None:
                continue
            is_new = change.kind != _COMMITTED or change.checkpoint.uid not in shown
            if is_new:
                yield Event.from_message(change, stream.token)
            else:
                del shown[change.checkpoint.uid]
    finally:
        stream.close()


class _Call(Protocol):
    """A stream of responses."""

    def __next__(self) -> api.WatchCheckpointsResponse:
        """Waits for the next response."""

    def cancel(self) -> bool:
        """Ends the call."""


class _Stream:
    """Reads ``WatchCheckpoints``; calls it again after transient errors."""

    def __init__(self, connection: Connection, parent: str, token: str) -> None:
        self.token = token
        """Resume token of the last message."""
        self._connection = connection
        self._parent = parent
        self._stub = connection.checkpoints
        self._call: _Call | None = None

    def next(self) -> api.CheckpointEvent | None:
        """Returns the next event; None for a message with only a new token.

        Raises:
            UnavailableError: The server cannot be reached.
            DataLossError: A record is damaged; ``metadata`` has the token after it.
        """
        # An idle stream is not a stalled server: the deadline of retries starts when a
        # stream breaks, and a new stream sends its first message at once.
        if self._call is not None:
            try:
                return self._read(self._call)
            except UnavailableError:
                self.close()
        for attempt in self._connection.attempts("WatchCheckpoints"):
            with attempt:
                request = api.WatchCheckpointsRequest(
                    parent=self._parent, resume_token=self.token
                )
                with translate_rpc_errors(self._connection.address):
                    self._call = self._stub.WatchCheckpoints(request)
                try:
                    return self._read(self._call)
                except BaseException:
                    self.close()
                    raise
        raise AssertionError

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _read(self, call: _Call) -> api.CheckpointEvent | None:
        try:
            with translate_rpc_errors(self._connection.address):
                response = next(call, None)
        except DataLossError as e:  # the last message had a token after it
            raise DataLossError(
                f"{e}; to continue after it, watch since the error's resume_token",
                reason=e.reason,
                metadata={**e.metadata, "resume_token": self.token},
            ) from e
        if response is None:
            raise UnavailableError(
                f"store {self._connection.address} ended a watch; try again"
            )
        self.token = response.resume_token
        return response.event if response.HasField("event") else None


def _newest(connection: Connection, run: str) -> api.Checkpoint | None:
    request = api.GetCheckpointRequest(name=f"{run}/checkpoints/latest")
    with suppress(NotFoundError):
        return connection.ask(connection.checkpoints.GetCheckpoint, request).checkpoint
    return None
