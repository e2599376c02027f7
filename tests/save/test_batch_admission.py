"""Places of batches go to all peers alike, and from the slowest client."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from storesvc.errors import LimitExceededError
from storesvc.save import batches
from storesvc.save.batches import BatchAdmission, Permit


def ignore() -> None:
    """Recalls nothing."""


def asked(
    admission: BatchAdmission,
    peer: str,
    namespace: str = "n",
    recall: Callable[[], None] = ignore,
) -> "asyncio.Task[Permit]":
    """Asks for a permit."""
    asking: Coroutine[Any, Any, Permit] = admission.acquire(
        peer=peer, namespace=namespace, recall=recall
    )
    return asyncio.ensure_future(asking)


async def until_waiting(admission: BatchAdmission, count: int) -> None:
    """Returns once so many wait."""
    while admission.waiting < count:  # noqa: ASYNC110 - it has no event of that
        await asyncio.sleep(0)


def test_a_peer_with_many_streams_does_not_keep_out_one_with_few() -> None:
    async def test() -> list[str]:
        admission, order = BatchAdmission(1), list[str]()
        first = await admission.acquire(peer="a", namespace="n", recall=ignore)
        waiting = [asked(admission, "a") for _ in range(20)]
        await until_waiting(admission, 20)
        waiting += [asked(admission, "b"), asked(admission, "b"), asked(admission, "c")]
        await until_waiting(admission, 23)
        admission.release(first)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                waiting.remove(one)
                order.append(one.result().peer)
                admission.release(one.result())
        return order

    assert ["b", "c", "a", "b", "a"] == asyncio.run(test())[:5]


def test_a_namespace_does_not_keep_out_another_of_the_same_peer() -> None:
    async def test() -> str:
        admission = BatchAdmission(1)
        first = await admission.acquire(peer="a", namespace="many", recall=ignore)
        waiting = [asked(admission, "a", "many") for _ in range(20)]
        await until_waiting(admission, 20)
        other = asked(admission, "a", "few")
        await until_waiting(admission, 21)
        admission.release(first)
        found = (await other).namespace
        for one in waiting:
            one.cancel()
        return found

    assert "few" == asyncio.run(test())


def test_the_place_of_the_slowest_client_is_recalled_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(batches, "FIRST_SECONDS", 0.2)

    async def test() -> list[str]:
        admission, recalled = BatchAdmission(3), list[str]()
        held: dict[str, Permit] = {}

        def recalls(name: str) -> Callable[[], None]:
            def recall() -> None:
                recalled.append(name)
                admission.release(held[name])

            return recall

        for name in ("slow", "idle", "busy"):
            held[name] = await admission.acquire(
                peer=name, namespace="n", recall=recalls(name)
            )
        # "busy" waits for the server; "slow" sends, later and less than it must
        with held["idle"].awaiting_client():
            await asyncio.sleep(0.1)
            with held["slow"].awaiting_client():
                permit = await admission.acquire(
                    peer="new", namespace="n", recall=ignore
                )
        admission.release(permit)
        return recalled

    assert ["idle"] == asyncio.run(test())


@pytest.mark.slow
def test_a_client_that_sends_fast_enough_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(batches, "WAIT_SECONDS", 2.0)

    async def test() -> None:
        admission = BatchAdmission(1)
        permit = await admission.acquire(peer="fast", namespace="n", recall=ignore)
        waiting = asked(admission, "other")
        while not waiting.done():
            permit.count(1 << 20)
            with permit.awaiting_client():
                await asyncio.sleep(0.05)
        assert not permit.is_recalled
        with pytest.raises(LimitExceededError, match="none ended within 2 s"):
            await waiting

    asyncio.run(test())


def test_a_burst_buys_no_long_pause() -> None:
    async def test() -> float:
        permit = await BatchAdmission(1).acquire(peer="a", namespace="n", recall=ignore)
        permit.count(64 << 20)
        with permit.awaiting_client():
            return permit.spare_seconds

    assert asyncio.run(test()) <= batches.CREDIT_SECONDS


@pytest.mark.parametrize("turns", range(6))
def test_a_wait_that_is_cancelled_takes_no_place(turns: int) -> None:
    async def test() -> tuple[int, int]:
        admission = BatchAdmission(1)
        first = await admission.acquire(peer="a", namespace="n", recall=ignore)
        waiting = asked(admission, "b")
        await until_waiting(admission, 1)
        admission.release(first)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            admission.release(await waiting)
        return admission.free, admission.waiting

    assert (1, 0) == asyncio.run(test())
