"""Tags of a run: names for checkpoints, which can be moved to another checkpoint."""

import uuid
from collections.abc import Iterator

from storesvc.format.names import InvalidNameError, TagName, Which
from storesvc_client._rpc.run_stub import OnDamage, RunStub
from storesvc_client._values.arguments import checked_flag, checked_text
from storesvc_client._values.notebook import listed
from storesvc_client._values.values import Tag
from storesvc_client.errors import InvalidRequestError
from storesvc_proto.v1 import checkpoint_service_pb2 as api


class Tags:
    """The tags of a run; ``run.tags``.

    A checkpoint with a tag is neither deleted nor dropped by a retention policy. A tag
    is accepted wherever a step is.

    >>> run.tags.set("best", 100).step
    100
    >>> state = run.restore("best", like=state)
    """

    def __init__(self, stub: RunStub) -> None:
        self._stub = stub

    def __repr__(self) -> str:
        return f"<Tags of {self._stub.name}>"

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
            name=self._resource(name),
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
            name=self._resource(name),
            etag=checked_text(f"{self._stub.name}: etag=", etag),
            request_id=str(uuid.uuid4()),
        )
        self._stub.ask(self._stub.service.DeleteTag, request)

    @listed("tag")
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

    def _resource(self, tag: str) -> str:
        try:
            return TagName(self._stub.name, tag).resource
        except (InvalidNameError, TypeError) as e:
            raise InvalidRequestError(f"{self._stub.name}: {e}") from e
