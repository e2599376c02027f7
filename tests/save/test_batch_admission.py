"""Places of batches go to all peers alike, and from the slowest client."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from storesvc.errors import LimitExceededError
from storesvc.save.batches import AdmissionLimits, BatchAdmission, Permit


async def acquire(
    admission: BatchAdmission,
    peer: str,
    namespace: str = "n",
    recall: Callable[[], None] = lambda: None,
) -> Permit:
    return await admission.acquire(peer=peer, namespace=namespace, recall=recall)


async def wait_for(
    admission: BatchAdmission, *callers: tuple[str, str]
) -> list[asyncio.Task[Permit]]:
    """Asks for permits, each for a peer and a namespace; returns once all wait."""
    count = admission.waiting + len(callers)
    asking = [asyncio.create_task(acquire(admission, *caller)) for caller in callers]
    while admission.waiting < count:  # noqa: ASYNC110 - it has no event of that
        await asyncio.sleep(0)
    return asking


async def test_a_peer_with_many_streams_does_not_keep_out_one_with_few() -> None:
    admission, order = BatchAdmission(1), list[str]()
    first = await acquire(admission, "a")
    waiting = await wait_for(admission, *[("a", "n")] * 20)
    waiting += await wait_for(admission, ("b", "n"), ("b", "n"), ("c", "n"))
    admission.release(first)
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            waiting.remove(one)
            order.append(one.result().peer)
            admission.release(one.result())

    assert ["b", "c", "a", "b", "a"] == order[:5]


async def test_a_namespace_does_not_keep_out_another_of_the_same_peer() -> None:
    admission = BatchAdmission(1)
    first = await acquire(admission, "a", "many")
    waiting = await wait_for(admission, *[("a", "many")] * 20)
    (other,) = await wait_for(admission, ("a", "few"))
    admission.release(first)

    assert "few" == (await other).namespace
    for one in waiting:
        one.cancel()


async def test_the_place_of_the_slowest_client_is_recalled_and_of_no_other() -> None:
    limits = AdmissionLimits(patience_seconds=0, first_seconds=0.2)
    admission, recalled = BatchAdmission(3, limits), list[str]()
    held: dict[str, Permit] = {}

    def recalls(name: str) -> Callable[[], None]:
        def recall() -> None:
            recalled.append(name)
            admission.release(held[name])

        return recall

    for name in ("slow", "idle", "busy"):
        held[name] = await acquire(admission, name, recall=recalls(name))
    # "busy" waits for the server; "slow" sends, later and less than it must
    with held["idle"].awaiting_client():
        await asyncio.sleep(0.1)
        with held["slow"].awaiting_client():
            permit = await acquire(admission, "new")
    admission.release(permit)

    assert ["idle"] == recalled


@pytest.mark.slow
async def test_a_client_that_sends_fast_enough_keeps_its_place() -> None:
    admission = BatchAdmission(1, AdmissionLimits(patience_seconds=0, wait_seconds=2))
    permit = await acquire(admission, "fast")
    waiting = asyncio.create_task(acquire(admission, "other"))
    while not waiting.done():
        permit.count(1 << 20)
        with permit.awaiting_client():
            await asyncio.sleep(0.05)
    assert not permit.is_recalled
    with pytest.raises(LimitExceededError, match="none ended within 2 s"):
        await waiting


async def test_a_burst_buys_no_long_pause() -> None:
    permit = await acquire(BatchAdmission(1), "a")
    permit.count(64 << 20)
    with permit.awaiting_client():
        assert permit.spare_seconds <= AdmissionLimits().credit_seconds


@pytest.mark.parametrize("turns", range(6))
async def test_a_wait_that_is_cancelled_takes_no_place(turns: int) -> None:
    admission = BatchAdmission(1)
    first = await acquire(admission, "a")
    (waiting,) = await wait_for(admission, ("b", "n"))
    admission.release(first)
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        admission.release(await waiting)

    assert (1, 0) == (admission.free, admission.waiting)
