"""Renewals of lent credentials: in time, once for all requests, without a gap."""

import asyncio
import threading

import pytest

from storesvc_client._storage.objects import (
    PAUSE_SECONDS,
    Lent,
    LentCredential,
)
from storesvc_client.errors import UnavailableError

LIFE = 100.0


def lent(token: str, expire_seconds: float) -> Lent:
    """Returns a credential for Google Cloud Storage."""
    return Lent(
        secret={"token": token, "expires_at": None}, expire_seconds=expire_seconds
    )


class Server:
    """Lends credentials of ``LIFE`` seconds, or fails."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lent: list[Lent] = []
        self.error: Exception | None = None
        self.calls = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def lend(self) -> Lent:
        self.calls += 1
        assert self.may_answer.wait(30)
        if self.error is not None:
            raise self.error
        self.lent.append(lent(f"token-{len(self.lent)}", self.now + LIFE))
        return self.lent[-1]

    def credential(self) -> LentCredential:
        return LentCredential(self.lend, clock=lambda: self.now)


@pytest.fixture
def server() -> Server:
    return Server()


async def ended(credential: LentCredential) -> None:
    """Waits until no renewal is in progress."""
    if (renewing := credential._renewing) is not None:
        await asyncio.wait([renewing])
        await asyncio.sleep(0)  # its callback runs


async def test_a_credential_is_used_for_four_fifths_of_its_life(server: Server) -> None:
    credential = server.credential()
    first = await credential.current()
    server.now += 0.79 * LIFE

    assert first is await credential.current()
    assert 1 == server.calls


async def test_then_it_is_renewed_while_requests_still_use_it(server: Server) -> None:
    credential = server.credential()
    first = await credential.current()
    server.now += 0.81 * LIFE
    server.may_answer.clear()

    assert first is await credential.current()
    assert first is await credential.current()
    server.may_answer.set()
    await ended(credential)

    assert server.lent[1] is await credential.current()
    assert 2 == server.calls


async def test_an_expired_credential_is_not_used(server: Server) -> None:
    credential = server.credential()
    first = await credential.current()
    server.now += LIFE

    second = await credential.current()

    assert [first, second] == server.lent


async def test_concurrent_requests_share_one_renewal(server: Server) -> None:
    credential = server.credential()

    found = await asyncio.gather(*(credential.current() for _ in range(50)))

    assert {server.lent[0]} == set(found)

    assert 1 == server.calls


async def test_a_rejected_credential_is_replaced_once_for_all_requests(
    server: Server,
) -> None:
    credential = server.credential()
    first = await credential.current()

    found = await asyncio.gather(
        *(credential.replace_rejected(first) for _ in range(50))
    )

    assert {server.lent[1]} == set(found)
    # one that was rejected late finds the new one
    assert server.lent[1] is await credential.replace_rejected(first)

    assert 2 == server.calls


async def test_a_request_that_is_dropped_does_not_end_the_renewal_of_others(
    server: Server,
) -> None:
    credential = server.credential()
    server.may_answer.clear()
    dropped = asyncio.create_task(credential.current())
    other = asyncio.create_task(credential.current())
    await asyncio.sleep(0)

    dropped.cancel()
    server.may_answer.set()

    found = await other

    assert [found] == server.lent
    assert dropped.cancelled()


async def test_while_the_server_fails_a_valid_credential_is_kept(
    server: Server,
) -> None:
    credential = server.credential()
    first = await credential.current()
    server.now += 0.9 * LIFE
    server.error = UnavailableError("down")

    assert first is await credential.current()
    await ended(credential)
    assert first is await credential.current()
    assert 2 == server.calls  # not again at once

    server.error = None
    server.now += PAUSE_SECONDS
    await credential.current()
    await ended(credential)
    assert server.lent[1] is await credential.current()


async def test_without_a_valid_credential_the_error_of_the_server_is_raised(
    server: Server,
) -> None:
    credential = server.credential()
    server.error = UnavailableError("down")

    with pytest.raises(UnavailableError, match="down"):
        await credential.current()

    server.error = None
    lent = await credential.current()
    assert server.lent[0] is lent


async def test_a_clock_that_is_ahead_does_not_stop_requests(server: Server) -> None:
    credential = LentCredential(server.lend, clock=lambda: server.now + 10 * LIFE)

    lent = await credential.current()

    assert lent is await credential.current()
    assert 1 == server.calls


def test_no_text_of_a_credential_has_its_secret() -> None:
    google = lent("hidden", 0)
    amazon = Lent(
        secret={
            "access_key_id": "id",
            "secret_access_key": "hidden",
            "token": "hidden",
            "expires_at": None,
        },
        expire_seconds=0,
    )

    assert "hidden" not in f"{google!r}{amazon!r}{google}{amazon}"
