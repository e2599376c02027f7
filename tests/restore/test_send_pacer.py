"""The send pacer: one send per iteration of the event loop, in order of arrival."""

import asyncio

from storesvc.restore.sender import SendPacer

MANY = 20


def test_one_send_per_iteration_lets_other_tasks_run_between() -> None:
    async def test() -> None:
        pacer, order, passes = SendPacer(), list[int](), 0

        async def step(number: int) -> None:
            await pacer.wait_turn()
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


def test_a_single_sender_does_not_wait() -> None:
    async def test() -> None:
        pacer = SendPacer()
        for _ in range(3):
            coroutine = pacer.wait_turn()
            try:
                coroutine.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError
            await asyncio.sleep(0)

    asyncio.run(test())
