"""What happens to a run's checkpoints after their commit."""

import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta

from storesvc.format.names import HoldName, InvalidNameError, TagName, Which
from storesvc_client._api.hold import Hold
from storesvc_client._restore.hold_lease import Lease
from storesvc_client._rpc.paging import OnDamage
from storesvc_client._session import SessionRun
from storesvc_client._values.arguments import (
    checked_flag,
    checked_labels,
    checked_metrics,
    checked_text,
)
from storesvc_client._values.durations import duration_message
from storesvc_client._values.values import Checkpoint, HoldInfo, Tag
from storesvc_client.errors import (
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    translated,
)
from storesvc_proto.v1 import checkpoint_service_pb2 as api


class RunLife(SessionRun):
    """Changes, deletes, names and holds the checkpoints of a run."""

    def update(
        self,
        which: Which,
        *,
        labels: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        pinned: bool | None = None,
        etag: str | None = None,
    ) -> Checkpoint:
        """Sets what is known of a checkpoint, and returns it.

        Args:
            which: A step, "latest" or a tag.
            labels: Its labels from now on; None leaves them.
            metrics: Its metrics from now on; None leaves them.
            pinned: Whether it must not be deleted; None leaves that.
            etag: ``Checkpoint.etag``: refuses the change if it changed since.

        Raises:
            NotFoundError: There is none, or it was deleted.
            ConflictError: It changed since the etag was read.
            InvalidRequestError: Nothing is to be set, or a value breaks a rule.
        """
        place = f"update of {self.name}"
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
        # What moves is looked up once: a repetition must mean the same checkpoint.
        message.name = self._fixed_name(which).resource
        request = api.UpdateCheckpointRequest(
            checkpoint=message, etag=self._text("etag", etag), request_id=_new_id()
        )
        request.update_mask.paths.extend(paths)
        response = self._ask(self._stub.UpdateCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def delete(
        self,
        step: int,
        *,
        uid: str | None = None,
        etag: str | None = None,
        purge_delay: timedelta | None = None,
    ) -> Checkpoint:
        """Deletes a checkpoint, and returns it with its ``purge_time``: until then it
        can be undeleted. Deleting it again changes nothing.

        Args:
            step: Of the checkpoint.
            uid: ``Checkpoint.uid``: refuses another one at the same step.
            etag: ``Checkpoint.etag``: refuses to delete it if it changed since.
            purge_delay: How long it can be undeleted; None: as the run says.

        Raises:
            NotFoundError: There is none, or another one.
            PreconditionError: It is pinned or tagged.
            ConflictError: It changed since the etag was read.
        """
        request = api.DeleteCheckpointRequest(
            name=self._step_name(step),
            uid=self._text("uid", uid),
            etag=self._text("etag", etag),
            request_id=_new_id(),
        )
        if purge_delay is not None:
            request.purge_delay.CopyFrom(
                duration_message(purge_delay, f"purge_delay= of {self.name}")
            )
        response = self._ask(self._stub.DeleteCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def undelete(self, step: int, *, uid: str | None = None) -> Checkpoint:
        """Takes the deletion of a checkpoint back, and returns it.

        Args:
            step: Of the checkpoint.
            uid: ``Checkpoint.uid``: refuses another one at the same step.

        Raises:
            NotFoundError: There is none, or another one, or it was purged.
            ConflictError: It is being purged.
        """
        request = api.UndeleteCheckpointRequest(
            name=self._step_name(step),
            uid=self._text("uid", uid),
            request_id=_new_id(),
        )
        response = self._ask(self._stub.UndeleteCheckpoint, request)
        return Checkpoint.from_message(response.checkpoint)

    def purge(
        self, step: int, *, uid: str | None = None, etag: str | None = None
    ) -> None:
        """Ends a deleted checkpoint for good, and frees its step.

        Args:
            step: Of the checkpoint.
            uid: ``Checkpoint.uid``: refuses another one at the same step.
            etag: ``Checkpoint.etag``: refuses to purge it if it changed since.

        Raises:
            NotFoundError: There is none, or another one.
            PreconditionError: It is not deleted, or something needs it.
            ConflictError: It changed since the etag was read.
        """
        request = api.PurgeCheckpointRequest(
            name=self._step_name(step),
            uid=self._text("uid", uid),
            etag=self._text("etag", etag),
        )
        was_asked = False
        for attempt in self._connection.attempts("PurgeCheckpoint"):
            with attempt:
                try:
                    with translated(self._connection.address):
                        self._stub.PurgeCheckpoint(
                            request, timeout=self._connection.timeout
                        )
                except UnavailableError:
                    was_asked = True
                    raise
                except NotFoundError:
                    # the call whose answer was lost may have purged it
                    if not was_asked:
                        raise

    def deleted(self, *, on_damage: OnDamage = None) -> Iterator[Checkpoint]:
        """Yields the checkpoints that were deleted and can be undeleted, newest first.

        Args:
            on_damage: Called, with the error, for each checkpoint, deleted or not,
                whose record is damaged; None raises it in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next one is damaged.
        """
        request = api.ListCheckpointsRequest(
            parent=self._name.resource, show_deleted=True
        )
        for message in self._rows(
            self._stub.ListCheckpoints, request, lambda p: p.checkpoints, on_damage
        ):
            if message.HasField("delete_time"):
                yield Checkpoint.from_message(message)

    def tag(
        self,
        name: str,
        which: Which = "latest",
        *,
        protected: bool | None = None,
        etag: str | None = None,
    ) -> Tag:
        """Makes a tag name a checkpoint, wherever it was before, and returns it.

        Args:
            name: Of the tag.
            which: A step, "latest" or another tag.
            protected: Whether later changes need the tag's etag; None leaves that as it
                was.
            etag: ``Tag.etag``: refuses to move the tag if it changed since.

        Raises:
            NotFoundError: There is no such checkpoint, or it was deleted.
            PreconditionError: The tag is protected.
            ConflictError: The tag changed since the etag was read.
        """
        request = api.SetTagRequest(
            name=self._tag_name(name),
            checkpoint=self._checkpoint_name(which).resource,
            protected=checked_flag(f"{self.name}: protected=", protected),
            etag=self._text("etag", etag),
            request_id=_new_id(),
        )
        return Tag.from_message(self._ask(self._stub.SetTag, request).tag)

    def untag(self, name: str, *, etag: str | None = None) -> None:
        """Deletes a tag.

        Args:
            name: Of the tag.
            etag: ``Tag.etag``: refuses to delete the tag if it changed since.

        Raises:
            NotFoundError: There is none.
            PreconditionError: It is protected.
            ConflictError: It changed since the etag was read.
        """
        request = api.DeleteTagRequest(
            name=self._tag_name(name),
            etag=self._text("etag", etag),
            request_id=_new_id(),
        )
        self._ask(self._stub.DeleteTag, request)

    def tags(self, *, on_damage: OnDamage = None) -> Iterator[Tag]:
        """Yields the tags by name.

        Args:
            on_damage: Called, with the error, for each one whose record is damaged;
                None raises it in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next one is damaged.
        """
        request = api.ListTagsRequest(parent=self._name.resource)
        found = self._rows(self._stub.ListTags, request, lambda p: p.tags, on_damage)
        yield from map(Tag.from_message, found)

    def hold(
        self,
        which: Which = "latest",
        *,
        owner: str | None = None,
        ttl: timedelta = timedelta(minutes=10),
    ) -> Hold:
        """Keeps a checkpoint from being purged until the hold is closed.

        Restores and reads hold what they read by themselves: this is for what is read
        again and again.

        >>> with run.hold("best") as hold:  # doctest: +SKIP
        ...     state = hold.open().restore()

        Args:
            which: A step, "latest" or a tag.
            owner: Who holds it, for people; None: the name of this machine.
            ttl: How long the hold outlives this process.

        Raises:
            NotFoundError: There is none, or it was deleted.
            InvalidRequestError: The owner or the time breaks a rule.
        """
        lease = Lease(
            self._connection, self._checkpoint_name(which), owner=owner, ttl=ttl
        )
        try:
            return Hold(self._session, lease)
        except BaseException:
            lease.end()
            raise

    def holds(self, *, on_damage: OnDamage = None) -> Iterator[HoldInfo]:
        """Yields the holds, those of restores among them, and expired ones.

        Args:
            on_damage: Called, with the error, for each one whose record is damaged;
                None raises it in its place.

        Raises:
            NotFoundError: There is no such run.
            DataLossError: The record of the next one is damaged.
        """
        request = api.ListHoldsRequest(parent=self._name.resource)
        found = self._rows(self._stub.ListHolds, request, lambda p: p.holds, on_damage)
        yield from map(HoldInfo.from_message, found)

    def end_hold(self, hold: str) -> None:
        """Ends a hold, whoever has it; one that does not exist changes nothing.

        Args:
            hold: ``HoldInfo.id``.

        Raises:
            InvalidRequestError: It is no id of a hold.
        """
        try:
            name = HoldName(self._name, hold)
        except (InvalidNameError, TypeError) as e:
            raise InvalidRequestError(f"{self.name}: {e}") from e
        self._ask(self._stub.DeleteHold, api.DeleteHoldRequest(name=name.resource))

    def _text(self, name: str, given: str | None) -> str:
        return checked_text(f"{self.name}: {name}=", given)

    def _step_name(self, step: int) -> str:
        name = self._checkpoint_name(step)
        if isinstance(name.which, str):
            raise InvalidRequestError(
                f"{self.name}: expected a step (int), got {step!r}; what it names may "
                "move"
            )
        return name.resource

    def _tag_name(self, tag: str) -> str:
        try:
            return TagName(self._name, tag).resource
        except (InvalidNameError, TypeError) as e:
            raise InvalidRequestError(f"{self.name}: {e}") from e


def _new_id() -> str:
    return str(uuid.uuid4())
