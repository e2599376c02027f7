"""The rpc that lends credentials for the storage.

It checks that the upload is open, or the hold live: a credential is lent only to what
the server itself would serve. Permissions are checked before it is called.
"""

from typing import assert_never

from storesvc.access.call import current
from storesvc.catalog.records import timestamp
from storesvc.errors import InvalidFieldError, LendingUnsupportedError
from storesvc.format.names import HoldName, UploadName
from storesvc.lending.lender import GcsToken, LentCredential, S3Keys
from storesvc.rpc import requests
from storesvc.rpc.boundary import Context
from storesvc.rpc.security import Lender
from storesvc.store import Store
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api


class LendingCalls:
    """Lends credentials."""

    _store: Store
    _lender: Lender | None

    async def LendCredentials(
        self, request: access_api.LendCredentialsRequest, context: Context
    ) -> access_api.LendCredentialsResponse:
        match request.WhichOneof("purpose"):
            case "upload":
                lent = await self._lent_to_write(request.upload)
            case "hold":
                lent = await self._lent_to_read(HoldName.from_resource(request.hold))
            case None:
                raise InvalidFieldError("purpose: expected upload or hold, got none")
        if call := current.get():
            call.detail["prefix"] = lent.prefix
            call.detail["expire_time"] = lent.expire_time.isoformat()
        return lent_message(lent)

    async def _lent_to_write(self, ref: upload_api.WriterRef) -> LentCredential:
        name, lender = UploadName.from_resource(ref.upload), self._given_lender()
        upload = await self._store.uploads.open(name, ref.epoch)
        count = upload.record.writer_count
        requests.check_writer("upload.writer", ref.writer, count)
        return await lender.lend_write(name)

    async def _lent_to_read(self, name: HoldName) -> LentCredential:
        lender = self._given_lender()
        await self._store.holds.live(name)
        return await lender.lend_read(name)

    def _given_lender(self) -> Lender:
        if self._lender is None:
            raise LendingUnsupportedError(
                "lending: expected a server with [lending] in its policy file, got one "
                "without; ask its administrator for it, or connect without "
                "lend_credentials="
            )
        return self._lender


def lent_message(lent: LentCredential) -> access_api.LendCredentialsResponse:
    """Returns the response with a credential."""
    response = access_api.LendCredentialsResponse(
        prefix=lent.prefix, expire_time=timestamp(lent.expire_time)
    )
    match lent.secret:
        case GcsToken(token=token):
            response.gcs_token = token
        case S3Keys() as keys:
            response.s3.access_key_id = keys.access_key_id
            response.s3.secret_access_key = keys.secret_access_key
            response.s3.session_token = keys.session_token
        case secret:
            assert_never(secret)
    return response
