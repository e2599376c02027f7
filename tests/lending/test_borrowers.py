"""Principals that may borrow a credential, and those that may not."""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from storesvc.auth.policy import Authentication, Binding, Policy, Principal
from storesvc.rpc.calls import Security
from storesvc.rpc.status import Context
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from tests.lending.lending import Cloud, emulated, served
from tests.support.contract import Writer

pytestmark = pytest.mark.emulated

POLICY = Policy(
    bindings=(
        Binding(role="writer", runs=("prod/a",), who=("alice",)),
        Binding(role="writer", runs=("prod/a",), who=("bob",)),
        Binding(role="reader", runs=("prod/a",), who=("carol",)),
        Binding(role="writer", runs=("prod/b",), who=("dave",)),
        Binding(role="manager", runs=("prod/*",), who=("erin",)),
    )
)


@dataclass
class Lab:
    """A server and the principal that its next calls have."""

    cloud: Cloud
    caller: str = "alice"

    async def authenticate(self, _: Context) -> Principal:
        return Principal(name=self.caller, authentication=Authentication.TOKEN)

    def held_by(self, caller: str) -> str:
        """Returns the name of a hold that a caller creates on prod/a@1."""
        self.caller = caller
        request = checkpoint_api.CreateHoldRequest(
            parent="namespaces/prod/runs/a/checkpoints/1",
            request_id=str(uuid.uuid4()),
            owner="tests",
        )
        with grpc.insecure_channel(self.cloud.address) as channel:
            stub = CheckpointServiceStub(channel)
            return str(stub.CreateHold(request, timeout=30).hold.name)

    def outcome(self, caller: str, **purpose: Any) -> str:
        """Returns the prefix that is lent to a caller, or the name of the status."""
        self.caller = caller
        try:
            return self.cloud.lent(**purpose).prefix
        except grpc.RpcError as e:
            return str(e.code().name)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """A lab with a step of prod/a that alice saved."""
    with emulated("gs") as cloud:
        made = Lab(cloud)
        security = Security(authenticate=made.authenticate, policy=lambda: POLICY)
        config: Callable[[], Any] = lambda: cloud.config[0]  # noqa: E731
        sts_url = f"{cloud.emulator.url}/v1/token"
        with served(
            cloud.root, config, security=security, gcs_sts_url=sts_url
        ) as address:
            made.cloud = replace(cloud, address=address)
            Writer(address, "prod/a", 1).save(range(3))
            yield made


def test_only_who_may_write_an_upload_borrows_for_it(lab: Lab) -> None:
    writer = Writer(lab.cloud.address, "prod/a", 2)
    writer.begin()
    upload, own = writer.ref(), writer.name.rpartition("/")[2]

    found = {
        caller: lab.outcome(caller, upload=upload)
        for caller in ("alice", "bob", "carol", "dave", "erin", "")
    }

    prefix = f"gs://bucket/lent/store/data/prod/a/pool/{own}/"
    assert {
        "alice": prefix,
        "bob": "PERMISSION_DENIED",
        "carol": "PERMISSION_DENIED",
        "dave": "NOT_FOUND",
        "erin": prefix,
        "": "NOT_FOUND",
    } == found
    assert 2 == len(lab.cloud.secrets)


def test_only_who_holds_a_checkpoint_borrows_for_it(lab: Lab) -> None:
    of_alice, of_carol = lab.held_by("alice"), lab.held_by("carol")

    found = {
        caller: (lab.outcome(caller, hold=of_alice), lab.outcome(caller, hold=of_carol))
        for caller in ("alice", "carol", "dave")
    }

    prefix = "gs://bucket/lent/store/data/prod/a/pool/"
    assert {
        "alice": (prefix, "PERMISSION_DENIED"),
        "carol": ("PERMISSION_DENIED", prefix),
        "dave": ("NOT_FOUND", "NOT_FOUND"),
    } == found
    assert 2 == len(lab.cloud.secrets)
