"""obstore writes only where TensorStore would write the same, as the same caller."""

import threading
from typing import Any

import pytest
from google.auth.exceptions import GoogleAuthError, TransportError

from storesvc.storage.location import storage_at
from storesvc.storage.remote import ENDPOINT, endpoint_in_environment, find_endpoint
from storesvc_client._storage import objects
from storesvc_client._storage.objects import OwnStore


def is_written_by_obstore(root: str) -> bool:
    kvstore: Any = None  # no request is sent
    return not OwnStore(storage_at(root), kvstore).copies_writes


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("path", "expected"),
    [("", True), ("a/b", True), ("a//b", False), ("a/../b", False), ("./a", False)],
)
def test_roots_without_a_name_in_obstore_are_left_to_tensorstore(
    path: str, *, expected: bool
) -> None:
    assert expected is is_written_by_obstore(f"s3://bucket/{path}?region=us-east-1")


@pytest.mark.usefixtures("keys")
def test_a_profile_that_does_not_exist_is_left_to_tensorstore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    assert not is_written_by_obstore("s3://bucket/a?region=us-east-1")


def test_the_endpoint_of_another_root_is_not_used_while_that_root_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(ENDPOINT, raising=False)
    other = storage_at("gs://other?endpoint=https://storage.example")
    found: list[str | None] = []
    reading = threading.Thread(
        target=lambda: found.append(find_endpoint(storage_at("gs://mine")))
    )
    with endpoint_in_environment(other):
        reading.start()
        reading.join(0.2)
    reading.join(60)
    assert [None] == found


class Renewed:
    """Credentials whose first renewals fail."""

    def __init__(self, *errors: GoogleAuthError) -> None:
        self.errors = [*errors]

    def refresh(self, request: object) -> None:
        del request
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.slow
def test_a_renewal_that_fails_for_a_moment_is_retried() -> None:
    passing = TransportError("reset", retryable=True)
    credentials: Any = Renewed(passing, passing)
    objects._refresh(credentials, None)  # type: ignore[arg-type]
    assert [] == credentials.errors


def test_a_renewal_that_is_rejected_is_not_retried() -> None:
    credentials: Any = Renewed(TransportError("revoked", retryable=False))
    with pytest.raises(TransportError, match="revoked"):
        objects._refresh(credentials, None)  # type: ignore[arg-type]
