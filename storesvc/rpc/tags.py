"""Calls that name and hold checkpoints."""

from datetime import timedelta
from typing import Final

from storesvc.errors import InvalidFieldError
from storesvc.format.names import CheckpointName, HoldName, RunName, TagName
from storesvc.lifecycle.holds import DEFAULT_TTL
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context, refusals
from storesvc.rpc.paging import page
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as catalogue_api

MAX_TTL: Final = timedelta(days=30)


class TagCalls:
    """Names and holds checkpoints."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def SetTag(
        self, request: catalogue_api.SetTagRequest, context: Context
    ) -> catalogue_api.SetTagResponse:
        async with refusals(context):
            name = TagName.from_resource(request.name)
            record = await self._store.tags.set(
                name,
                checkpoint_of(request, name),
                protected=request.protected if request.HasField("protected") else None,
                etag=request.etag,
                write_id=requests.write_id_of(request),
            )
            return catalogue_api.SetTagResponse(tag=messages.tag_message(name, record))
        raise AssertionError

    async def DeleteTag(
        self, request: catalogue_api.DeleteTagRequest, context: Context
    ) -> catalogue_api.DeleteTagResponse:
        async with refusals(context):
            await self._store.tags.delete(
                TagName.from_resource(request.name),
                etag=request.etag,
                write_id=requests.write_id_of(request),
            )
            return catalogue_api.DeleteTagResponse()
        raise AssertionError

    async def ListTags(
        self, request: catalogue_api.ListTagsRequest, context: Context
    ) -> catalogue_api.ListTagsResponse:
        async with refusals(context):
            run = RunName.from_resource(request.parent)
            size, listed = (
                requests.page_size(request.page_size),
                f"{request.parent}/tags",
            )
            after = requests.last_of_page(listed, request.page_token, str) or ""
            found = await self._store.tags.list(run, after=after, limit=size + 1)
            made = page(
                listed,
                found,
                size=size,
                key=lambda name: name.tag,
                show=messages.tag_message,
            )
            return catalogue_api.ListTagsResponse(
                tags=made.rows, damaged=made.damaged, next_page_token=made.token
            )
        raise AssertionError

    async def CreateHold(
        self, request: catalogue_api.CreateHoldRequest, context: Context
    ) -> catalogue_api.CreateHoldResponse:
        async with refusals(context):
            checkpoint = CheckpointName.from_resource(request.parent)
            hex_id = requests.checked_request_id(request.request_id).replace("-", "")
            name = HoldName(checkpoint.run, hex_id)
            record = await self._store.holds.create(
                name,
                checkpoint,
                owner=requests.checked_owner("owner", request.owner),
                ttl=ttl_of(request),
                uid=request.uid,
            )
            hold = messages.hold_message(name, record)
            return catalogue_api.CreateHoldResponse(hold=hold)
        raise AssertionError

    async def RenewHold(
        self, request: catalogue_api.RenewHoldRequest, context: Context
    ) -> catalogue_api.RenewHoldResponse:
        async with refusals(context):
            name = HoldName.from_resource(request.name)
            hold = messages.hold_message(name, await self._store.holds.renew(name))
            return catalogue_api.RenewHoldResponse(hold=hold)
        raise AssertionError

    async def DeleteHold(
        self, request: catalogue_api.DeleteHoldRequest, context: Context
    ) -> catalogue_api.DeleteHoldResponse:
        async with refusals(context):
            await self._store.holds.delete(HoldName.from_resource(request.name))
            return catalogue_api.DeleteHoldResponse()
        raise AssertionError

    async def ListHolds(
        self, request: catalogue_api.ListHoldsRequest, context: Context
    ) -> catalogue_api.ListHoldsResponse:
        async with refusals(context):
            run = RunName.from_resource(request.parent)
            size, listed = (
                requests.page_size(request.page_size),
                f"{request.parent}/holds",
            )
            after = requests.last_of_page(listed, request.page_token, str) or ""
            found = await self._store.holds.list(run, after=after, limit=size + 1)
            made = page(
                listed,
                found,
                size=size,
                key=lambda name: name.hold,
                show=messages.hold_message,
            )
            return catalogue_api.ListHoldsResponse(
                holds=made.rows, damaged=made.damaged, next_page_token=made.token
            )
        raise AssertionError


def checkpoint_of(
    request: catalogue_api.SetTagRequest, name: TagName
) -> CheckpointName:
    """Returns the checkpoint that a tag shall name.

    Raises:
        InvalidFieldError: It is of another run.
    """
    checkpoint = CheckpointName.from_resource(request.checkpoint)
    if checkpoint.run != name.run:
        raise InvalidFieldError(
            f"checkpoint: expected one of {name.run}, got {checkpoint}; a tag names "
            "checkpoints of its own run"
        )
    return checkpoint


def ttl_of(request: catalogue_api.CreateHoldRequest) -> timedelta:
    """Returns how long a hold shall last.

    Raises:
        InvalidFieldError: It is not positive, or too long.
    """
    if not request.HasField("ttl"):
        return DEFAULT_TTL
    ttl = requests.duration("ttl", request.ttl, most=MAX_TTL)
    if not ttl:
        raise InvalidFieldError("ttl: expected more than 0 s, got 0 s")
    return ttl
