"""One long step in each pass of the event loop, in the order in which they came."""

import asyncio

from storesvc.restore.send_pacer import Turns

MANY = 20


def test_one_at_a_time_has_a_turn_and_others_go_between() -> None:
    async def test() -> None:
        turns, order, passes = Turns(), list[int](), 0

        async def step(number: int) -> None:
            await turns.take()
            order.append(number)
            had.append(passes)

        had: list[int] = []
        steps = asyncio.gather(*map(step, range(MANY)))
        while not steps.done():
            await asyncio.sleep(0)
            passes += 1
        assert list(range(MANY)) == order
        assert MANY == len(set(had))

    asyncio.run(test())


def test_who_is_alone_does_not_wait() -> None:
    async def test() -> None:
        turns = Turns()
        for _ in range(3):
            coroutine = turns.take()
            try:
                coroutine.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError
            await asyncio.sleep(0)

    asyncio.run(test())
