"""Emulated clouds that lend credentials, and what a thief of one tries."""

from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import grpc
import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import GCSStore, S3Store

import storesvc_client as store
from storesvc.auth.policy_file import Lending
from storesvc.lending.lender import Lender
from storesvc.rpc.calls import OPEN, Security
from storesvc.server import app, embedded
from storesvc.storage.location import storage_at
from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from tests.fake_gcs import FakeGcs, Tokens
from tests.fake_s3 import FakeS3, Keys
from tests.support.gcs_calls import BUCKET

ROLE = "arn:aws:iam::123456789012:role/storesvc-lending"
OWN = "any"
"""Token and access key of the server; TensorStore keeps the token that it saw first."""

CONFIG = Lending(lifetime=timedelta(hours=1), gcs=True, s3_role_arn=ROLE)


@dataclass
class Cloud:
    """A bucket whose provider lends, and a server over it."""

    emulator: FakeGcs | FakeS3
    root: str
    address: str
    rights: Tokens | Keys
    config: list[Lending | None]
    """The configuration in force, in a list of one."""

    @property
    def prefix(self) -> str:
        """Beginning of the names of all objects of the store."""
        return f"{storage_at(self.root).spec['path']!s}"

    @contextmanager
    def client(self, **options: Any) -> Iterator[store.Client]:
        """A client with lent credentials."""
        with store.connect(
            self.address, direct=self.root, lend_credentials=True, **options
        ) as client:
            yield client

    def lent(self, **purpose: Any) -> api.LendCredentialsResponse:
        """Returns a credential, as the server lends it."""
        with grpc.insecure_channel(self.address) as channel:
            return AccessServiceStub(channel).LendCredentials(
                api.LendCredentialsRequest(**purpose), timeout=30
            )

    def uses(self, part: str) -> list[tuple[str, str]]:
        """Returns credential and line of the requests whose line has a part."""
        return [use for use in self.rights.uses if part in use[1]]

    @property
    def secrets(self) -> list[str]:
        """Names of the credentials that were lent: tokens or access keys."""
        rights = self.rights
        return rights.lent if isinstance(rights, Tokens) else [*rights.sessions]

    def lend_for(self, seconds: float) -> None:
        """Sets the life of the credentials to come."""
        self.rights.lent_seconds = seconds

    def names(self) -> list[str]:
        """Returns the names of all objects of the store."""
        return self.emulator.names(BUCKET)

    def list_status(self, lent: api.LendCredentialsResponse | None, prefix: str) -> int:
        """Returns the status of a list, by the API that TensorStore or obstore uses.

        Args:
            lent: The credential; None: that of the server.
            prefix: Beginning of the names to list.
        """
        if isinstance(self.rights, Tokens):
            token = OWN if lent is None else lent.gcs_token
            url = f"{self.emulator.url}/storage/v1/b/{BUCKET}/o?prefix={quote(prefix)}"
            headers = {"Authorization": f"Bearer {token}"}
            try:
                with urlopen(Request(url, headers=headers)) as response:
                    return int(response.status)
            except HTTPError as e:
                return e.code
        try:
            obstore.list(self.objects(lent, own=lent is None), prefix).collect()
        except GenericError as e:
            return 403 if "403 Forbidden" in str(e) else 500
        return 200

    def objects(
        self, lent: api.LendCredentialsResponse | None = None, *, own: bool = False
    ) -> GCSStore | S3Store:
        """Returns the bucket, as the holder of a credential reaches it."""
        assert own is (lent is None)
        options: Any = {
            "client_options": {"allow_http": True},
            "retry_config": {"max_retries": 0},
        }
        url = self.emulator.url
        if isinstance(self.rights, Tokens):
            token = OWN if lent is None else lent.gcs_token
            given: Any = lambda: {"token": token, "expires_at": None}  # noqa: E731
            return GCSStore(BUCKET, base_url=url, credential_provider=given, **options)
        keys = api.S3Credential(access_key_id=OWN, secret_access_key=OWN)
        if lent is not None:
            keys = lent.s3
        session: Any = (
            {"session_token": keys.session_token} if keys.session_token else {}
        )
        return S3Store(
            BUCKET,
            endpoint=url,
            region="us-east-1",
            access_key_id=keys.access_key_id,
            secret_access_key=keys.secret_access_key,
            **session,
            **options,
        )


@contextmanager
def emulated(provider: str) -> Iterator[Cloud]:
    """Emulates a cloud, and serves a fresh store in it."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        config: list[Lending | None] = [CONFIG]
        rights: Tokens | Keys
        if provider == "gs":
            patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", OWN)
            rights = Tokens(OWN)
            gcs = stack.enter_context(FakeGcs(buckets=[BUCKET], tokens=rights))
            emulator: FakeGcs | FakeS3 = gcs
            root = f"gs://{BUCKET}/lent/store?endpoint={gcs.url}"
        else:
            patch.setenv("AWS_ACCESS_KEY_ID", OWN)
            patch.setenv("AWS_SECRET_ACCESS_KEY", OWN)
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            rights = Keys(OWN, role_arn=ROLE)
            s3 = stack.enter_context(FakeS3(buckets=[BUCKET], keys=rights))
            emulator = s3
            root = f"s3://{BUCKET}/lent/store?endpoint={s3.url}&region=us-east-1"
            config[0] = Lending(
                lifetime=timedelta(hours=1), s3_role_arn=ROLE, s3_sts_endpoint=s3.url
            )
        address = stack.enter_context(
            served(root, lambda: config[0], gcs_sts_url=f"{emulator.url}/v1/token")
        )
        yield Cloud(emulator, root, address, rights, config)


@contextmanager
def served(
    root: str,
    config: Callable[[], Lending | None],
    *,
    security: Security = OPEN,
    **options: Any,
) -> Iterator[str]:
    """Serves a root in this process; yields the address."""
    stack = AsyncExitStack()

    async def start() -> int:
        opened = await app.open_store(root)
        lender = Lender(storage_at(root), config, **options)
        lending = replace(security, lender=lender)
        running = app.running(opened, "127.0.0.1:0", security=lending)
        return (await stack.enter_async_context(running)).port

    port = embedded._run(start())
    try:
        yield f"127.0.0.1:{port}"
    finally:
        embedded._run(stack.aclose())
