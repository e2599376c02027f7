"""TensorStore futures are awaited, and dropped on cancellation."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts

from storesvc.storage.requests import await_future


def promised() -> tuple[Any, Any]:
    """Returns a promise, and its future."""
    promise, asked = ts.Promise.new()  # type: ignore[var-annotated]
    return promise, asked


def test_a_result_is_returned_before_or_after_it_is_awaited() -> None:
    async def main() -> list[int]:
        promise, given = promised()
        promise.set_result(1)
        later, coming = promised()
        asyncio.get_running_loop().call_later(0.01, later.set_result, 2)
        return [await await_future(given), await await_future(coming)]

    assert [1, 2] == asyncio.run(main())


def test_the_error_of_a_future_is_raised() -> None:
    async def main() -> None:
        promise, asked = promised()
        promise.set_exception(LookupError("none"))
        await await_future(asked)

    with pytest.raises(LookupError, match="none"):
        asyncio.run(main())


def test_a_cancelled_waiter_gets_no_result_and_does_not_cancel_the_read() -> None:
    async def main() -> bool:
        promise, asked = promised()
        waiting = asyncio.ensure_future(await_future(asked))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        promise.set_result(1)
        await asyncio.sleep(0)
        return bool(asked.cancelled())

    assert not asyncio.run(main())


def test_a_result_after_the_end_of_the_loop_is_ignored() -> None:
    promise, asked = promised()

    async def main() -> None:
        asking = await_future(asked)
        asking.send(None)  # it waits, and no task of the loop knows
        waiting.append(asking)

    waiting: list[object] = []
    asyncio.run(main())
    promise.set_result(1)

    assert asked.done()
    waiting.clear()


CANCELLING = """
import asyncio, faulthandler, random, sys, time
from storesvc.storage.object_bucket import TensorStoreBucket

faulthandler.dump_traceback_later(60, exit=True)

async def main():
    bucket = await TensorStoreBucket.open(sys.argv[1])
    generation = await bucket.write("a", bytes(1000))
    drawn = random.Random(1)
    for _ in range(3000):
        reads = [asyncio.ensure_future(bucket.read("a")) for _ in range(8)]
        await asyncio.sleep(0)
        end = time.perf_counter() + drawn.random() * 0.0006
        while time.perf_counter() < end:
            pass
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
    print(len((await bucket.read("a")).data))

asyncio.run(main())
"""


@pytest.mark.slow
def test_cancelling_reads_as_they_complete_does_not_crash(tmp_path: Path) -> None:
    """Deadlocks, as ``await`` of a TensorStore future occasionally does."""
    done = subprocess.run(
        [sys.executable, "-c", CANCELLING, tmp_path.as_uri()],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ("1000\n", "") == (done.stdout, done.stderr)
