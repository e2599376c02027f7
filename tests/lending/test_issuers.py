"""The exchange of the server's own credentials, with the libraries of the providers."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.auth.downscoped import (
    AccessBoundaryRule,
    AvailabilityCondition,
    CredentialAccessBoundary,
)
from google.oauth2.credentials import Credentials

from storesvc.clock import SystemClock
from storesvc.errors import StorageDeniedError, StorageUnavailableError
from storesvc.format.names import RunName
from storesvc.lending.boundary import Boundary, bound_pool, gcs_options
from storesvc.lending.lender import GcsIssuer
from storesvc.storage.location import storage_at
from tests.fake_gcs import FakeGcs, Tokens

STORAGE = storage_at("gs://bucket/store")
OWN = "the-token-of-the-server"

pytestmark = pytest.mark.emulated


@pytest.fixture
def tokens() -> Tokens:
    return Tokens(OWN)


@pytest.fixture
def sts_url(tokens: Tokens) -> Iterator[str]:
    with FakeGcs(buckets=["bucket"], tokens=tokens) as gcs:
        yield f"{gcs.url}/v1/token"


def limits() -> Boundary:
    return bound_pool(STORAGE, RunName("prod", "llama-8b"))


class Source(Credentials):
    """Credentials of the server, whose refreshes return tokens of a given life."""

    def __init__(self, left: timedelta, refreshed: timedelta) -> None:
        super().__init__(OWN, expiry=_naive(left))  # type: ignore[no-untyped-call]
        self._refreshed = refreshed
        self.refreshes = 0

    def refresh(self, request: Any) -> None:
        """Extends the life of the token."""
        self.refreshes += 1
        self.expiry = _naive(self._refreshed)


def _naive(left: timedelta) -> datetime:
    return (datetime.now(UTC) + left).replace(tzinfo=None)


def issued(source: Credentials, sts_url: str) -> timedelta:
    """Returns the life of a token that is lent."""
    issuer = GcsIssuer(STORAGE, source, clock=SystemClock(), sts_url=sts_url)
    token, until = issuer.issue(limits(), session="any")
    assert token.token != OWN
    return until - datetime.now(UTC)


def test_a_boundary_is_as_googles_own_library_writes_it() -> None:
    prefix = "projects/_/buckets/bucket/objects/store/data/prod/llama-8b/pool/"
    rule = AccessBoundaryRule(
        available_resource="//storage.googleapis.com/projects/_/buckets/bucket",
        available_permissions=["inRole:roles/storage.objectViewer"],
        availability_condition=AvailabilityCondition(
            f"resource.name.startsWith('{prefix}')"
        ),
    )

    assert CredentialAccessBoundary([rule]).to_json() == gcs_options(limits())


def test_a_lent_token_lives_as_long_as_the_token_service_says(sts_url: str) -> None:
    life = issued(Credentials(OWN), sts_url)

    assert timedelta(minutes=59) < life <= timedelta(hours=1)


def test_a_lent_token_never_lives_longer_than_its_source(sts_url: str) -> None:
    source = Source(timedelta(minutes=20), timedelta(hours=1))

    life = issued(source, sts_url)

    assert timedelta(minutes=19) < life <= timedelta(minutes=20)
    assert 0 == source.refreshes


def test_a_source_that_ends_soon_is_refreshed_first(sts_url: str) -> None:
    source = Source(timedelta(minutes=5), timedelta(minutes=50))

    life = issued(source, sts_url)

    assert timedelta(minutes=49) < life <= timedelta(minutes=50)
    assert 1 == source.refreshes


def test_a_rejected_source_is_a_denial_that_names_no_token(
    sts_url: str, tokens: Tokens
) -> None:
    tokens.revoke()

    with pytest.raises(StorageDeniedError, match="Google lends no token") as e:
        issued(Credentials(OWN), sts_url)

    assert OWN not in str(e.value)
    assert "invalid_grant" in str(e.value)


def test_an_answer_that_is_no_token_is_a_failure(sts_url: str) -> None:
    with pytest.raises((StorageUnavailableError, StorageDeniedError)) as e:
        issued(Credentials(OWN), sts_url.replace("/v1/token", "/storage/v1/b"))

    assert OWN not in str(e.value)
