"""Rpcs of holds."""

from datetime import timedelta
from typing import Final

from storesvc.errors import InvalidFieldError
from storesvc.format.names import CheckpointName, HoldName, RunName
from storesvc.lifecycle.holds import DEFAULT_TTL
from storesvc.rpc import messages, requests
from storesvc.rpc.boundary import Context
from storesvc.rpc.paging import list_page
from storesvc.store import Store
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api

MAX_TTL: Final = timedelta(days=30)
"""Maximum lease of a hold."""


class HoldCalls:
    """Creates, renews, deletes and lists holds."""

    _store: Store

    async def CreateHold(
        self, request: checkpoint_api.CreateHoldRequest, context: Context
    ) -> checkpoint_api.CreateHoldResponse:
        checkpoint = CheckpointName.from_resource(request.parent)
        hex_id = requests.checked_request_id(request.request_id).replace("-", "")
        name, ttl = HoldName(checkpoint.run, hex_id), ttl_of(request)
        owner = requests.checked_owner("owner", request.owner)
        record = await self._store.holds.create(
            name, checkpoint, owner=owner, ttl=ttl, uid=request.uid
        )
        hold = messages.hold_message(name, record)
        return checkpoint_api.CreateHoldResponse(hold=hold)

    async def RenewHold(
        self, request: checkpoint_api.RenewHoldRequest, context: Context
    ) -> checkpoint_api.RenewHoldResponse:
        name = HoldName.from_resource(request.name)
        hold = messages.hold_message(name, await self._store.holds.renew(name))
        return checkpoint_api.RenewHoldResponse(hold=hold)

    async def DeleteHold(
        self, request: checkpoint_api.DeleteHoldRequest, context: Context
    ) -> checkpoint_api.DeleteHoldResponse:
        await self._store.holds.delete(HoldName.from_resource(request.name))
        return checkpoint_api.DeleteHoldResponse()

    async def ListHolds(
        self, request: checkpoint_api.ListHoldsRequest, context: Context
    ) -> checkpoint_api.ListHoldsResponse:
        run, holds = RunName.from_resource(request.parent), self._store.holds
        page = await list_page(
            request,
            f"{request.parent}/holds",
            find=lambda last, limit: holds.list(run, after=last or "", limit=limit),
            parse=str,
            key=lambda name: name.hold,
            show=messages.hold_message,
        )
        return checkpoint_api.ListHoldsResponse(
            holds=page.rows, damaged=page.damaged, next_page_token=page.token
        )


def ttl_of(request: checkpoint_api.CreateHoldRequest) -> timedelta:
    """Returns the lease of a new hold.

    Raises:
        InvalidFieldError: It is not positive, or too long.
    """
    if not request.HasField("ttl"):
        return DEFAULT_TTL
    ttl = requests.duration("ttl", request.ttl, most=MAX_TTL)
    if not ttl:
        raise InvalidFieldError("ttl: expected more than 0 s, got 0 s")
    return ttl
