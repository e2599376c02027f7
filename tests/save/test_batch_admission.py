"""Places of batches go to all peers alike, and from the slowest client."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from storesvc.errors import LimitExceededError
from storesvc.save import batch_admission
from storesvc.save.batch_admission import BatchPlaces, Place


def ignore() -> None:
    """Recalls nothing."""


def asked(
    places: BatchPlaces,
    peer: str,
    namespace: str = "n",
    recall: Callable[[], None] = ignore,
) -> "asyncio.Task[Place]":
    """Asks for a place."""
    asking: Coroutine[Any, Any, Place] = places.take(
        peer=peer, namespace=namespace, recall=recall
    )
    return asyncio.ensure_future(asking)


async def until_waiting(places: BatchPlaces, count: int) -> None:
    """Returns once so many wait."""
    while places.waiting < count:  # noqa: ASYNC110 - it has no event of that
        await asyncio.sleep(0)


def test_a_peer_with_many_streams_does_not_keep_out_one_with_few() -> None:
    async def test() -> list[str]:
        places, order = BatchPlaces(1), list[str]()
        first = await places.take(peer="a", namespace="n", recall=ignore)
        waiting = [asked(places, "a") for _ in range(20)]
        await until_waiting(places, 20)
        waiting += [asked(places, "b"), asked(places, "b"), asked(places, "c")]
        await until_waiting(places, 23)
        places.give_back(first)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                waiting.remove(one)
                order.append(one.result().peer)
                places.give_back(one.result())
        return order

    assert ["b", "c", "a", "b", "a"] == asyncio.run(test())[:5]


def test_a_namespace_does_not_keep_out_another_of_the_same_peer() -> None:
    async def test() -> str:
        places = BatchPlaces(1)
        first = await places.take(peer="a", namespace="many", recall=ignore)
        waiting = [asked(places, "a", "many") for _ in range(20)]
        await until_waiting(places, 20)
        other = asked(places, "a", "few")
        await until_waiting(places, 21)
        places.give_back(first)
        found = (await other).namespace
        for one in waiting:
            one.cancel()
        return found

    assert "few" == asyncio.run(test())


def test_the_place_of_the_slowest_client_is_recalled_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_admission, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(batch_admission, "FIRST_SECONDS", 0.2)

    async def test() -> list[str]:
        places, recalled = BatchPlaces(3), list[str]()
        held: dict[str, Place] = {}

        def recalls(name: str) -> Callable[[], None]:
            def recall() -> None:
                recalled.append(name)
                places.give_back(held[name])

            return recall

        for name in ("slow", "idle", "busy"):
            held[name] = await places.take(
                peer=name, namespace="n", recall=recalls(name)
            )
        # "busy" waits for the server; "slow" sends, later and less than it must
        with held["idle"].awaiting_client():
            await asyncio.sleep(0.1)
            with held["slow"].awaiting_client():
                place = await places.take(peer="new", namespace="n", recall=ignore)
        places.give_back(place)
        return recalled

    assert ["idle"] == asyncio.run(test())


def test_a_client_that_sends_fast_enough_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_admission, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(batch_admission, "WAIT_SECONDS", 2.0)

    async def test() -> None:
        places = BatchPlaces(1)
        place = await places.take(peer="fast", namespace="n", recall=ignore)
        waiting = asked(places, "other")
        while not waiting.done():
            place.count(1 << 20)
            with place.awaiting_client():
                await asyncio.sleep(0.05)
        assert not place.is_recalled
        with pytest.raises(LimitExceededError, match="none ended within 2 s"):
            await waiting

    asyncio.run(test())


def test_a_burst_buys_no_long_pause() -> None:
    async def test() -> float:
        place = await BatchPlaces(1).take(peer="a", namespace="n", recall=ignore)
        place.count(64 << 20)
        with place.awaiting_client():
            return place.spare_seconds

    assert asyncio.run(test()) <= batch_admission.CREDIT_SECONDS


@pytest.mark.parametrize("turns", range(6))
def test_a_wait_that_is_cancelled_takes_no_place(turns: int) -> None:
    async def test() -> tuple[int, int]:
        places = BatchPlaces(1)
        first = await places.take(peer="a", namespace="n", recall=ignore)
        waiting = asked(places, "b")
        await until_waiting(places, 1)
        places.give_back(first)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            places.give_back(await waiting)
        return places.free, places.waiting

    assert (1, 0) == asyncio.run(test())
