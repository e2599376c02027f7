"""Rpcs of tags."""

from storesvc.errors import InvalidFieldError
from storesvc.format.names import CheckpointName, RunName, TagName
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context
from storesvc.rpc.paging import list_page
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api


class TagCalls:
    """Sets, deletes and lists tags."""

    _store: Store

    async def SetTag(
        self, request: checkpoint_api.SetTagRequest, context: Context
    ) -> checkpoint_api.SetTagResponse:
        name = TagName.from_resource(request.name)
        record = await self._store.tags.set(
            name,
            checkpoint_of(request, name),
            protected=request.protected if request.HasField("protected") else None,
            etag=request.etag,
            write_id=requests.write_id_of(request),
        )
        return checkpoint_api.SetTagResponse(tag=messages.tag_message(name, record))

    async def DeleteTag(
        self, request: checkpoint_api.DeleteTagRequest, context: Context
    ) -> checkpoint_api.DeleteTagResponse:
        name = TagName.from_resource(request.name)
        write_id = requests.write_id_of(request)
        await self._store.tags.delete(name, etag=request.etag, write_id=write_id)
        return checkpoint_api.DeleteTagResponse()

    async def ListTags(
        self, request: checkpoint_api.ListTagsRequest, context: Context
    ) -> checkpoint_api.ListTagsResponse:
        run, tags = RunName.from_resource(request.parent), self._store.tags
        page = await list_page(
            request,
            f"{request.parent}/tags",
            find=lambda last, limit: tags.list(run, after=last or "", limit=limit),
            parse=str,
            key=lambda name: name.tag,
            show=messages.tag_message,
        )
        return checkpoint_api.ListTagsResponse(
            tags=page.rows, damaged=page.damaged, next_page_token=page.token
        )


def checkpoint_of(
    request: checkpoint_api.SetTagRequest, name: TagName
) -> CheckpointName:
    """Returns the checkpoint to which SetTag points a tag.

    Raises:
        InvalidFieldError: It belongs to another run.
    """
    checkpoint = CheckpointName.from_resource(request.checkpoint)
    if checkpoint.run != name.run:
        raise InvalidFieldError(
            f"checkpoint: expected one of {name.run}, got {checkpoint}; a tag names "
            "checkpoints of its own run"
        )
    return checkpoint
