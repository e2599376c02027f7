"""Calls that hang in the file system fail at their deadline, and block no others."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from storesvc.errors import StorageUnavailableError
from storesvc.storage import file_bucket
from storesvc.storage.file_bucket import FileThreads

SOON = 0.05


class Hanging:
    """A call that hangs until it is released."""

    def __init__(self) -> None:
        self._may_return = threading.Event()

    def __call__(self) -> str:
        self._may_return.wait()
        return "late"

    def go_on(self) -> None:
        self._may_return.set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    """A call that hangs until the end of the test."""
    hanging = Hanging()
    yield hanging
    hanging.go_on()


@pytest.fixture
def threads() -> FileThreads:
    """Threads of a storage."""
    return FileThreads("file:///store")


async def becomes_true(is_so: Callable[[], bool]) -> None:
    """Waits until other threads have made a condition true."""
    while not is_so():  # noqa: ASYNC110 - no event signals it
        await asyncio.sleep(0.01)


async def refused_late(threads: FileThreads, place: str, call: Hanging) -> None:
    with pytest.raises(TimeoutError):
        await threads.run(place, call, seconds=SOON)


async def test_a_call_returns_the_result_of_its_function(threads: FileThreads) -> None:
    calls = (threads.run("a", partial(pow, 2, n), seconds=60) for n in range(100))
    assert [2**n for n in range(100)] == await asyncio.gather(*calls)

    def fail() -> None:
        raise FileNotFoundError("a")

    with pytest.raises(FileNotFoundError, match="a"):
        await threads.run("a", fail, seconds=None)


async def test_calls_of_a_hanging_file_fail_at_once_until_it_returns(
    threads: FileThreads, hanging: Hanging
) -> None:
    await refused_late(threads, "a", hanging)

    for _ in range(1000):
        with pytest.raises(
            StorageUnavailableError,
            match="a: an earlier call for this file has not returned; check",
        ):
            await threads.run("a", hanging, seconds=60)
    assert 1 == await threads.run("b", lambda: 1, seconds=60)

    hanging.go_on()
    await becomes_true(lambda: not threads._abandoned)
    assert 2 == await threads.run("a", lambda: 2, seconds=60)


@pytest.mark.slow
async def test_more_files_may_hang_than_there_are_threads(
    threads: FileThreads, hanging: Hanging
) -> None:
    for at in range(file_bucket.THREADS + 3):
        await refused_late(threads, str(at), hanging)

    assert "well" == await threads.run("a", lambda: "well", seconds=60)


async def test_a_call_waits_for_a_thread_until_its_deadline(
    threads: FileThreads, hanging: Hanging
) -> None:
    others = [
        asyncio.ensure_future(threads.run(str(at), hanging, seconds=None))
        for at in range(file_bucket.THREADS)
    ]
    await asyncio.sleep(0)
    ran = []
    with pytest.raises(TimeoutError):
        await threads.run("a", lambda: ran.append(1), seconds=SOON)
    hanging.go_on()
    assert ["late"] * file_bucket.THREADS == await asyncio.gather(*others)
    assert [] == ran  # its caller has stopped waiting

    assert 1 == await threads.run("a", lambda: 1, seconds=60)


async def test_a_file_that_hangs_occupies_few_threads_before_its_deadline(
    threads: FileThreads, hanging: Hanging
) -> None:
    calls = [
        asyncio.ensure_future(threads.run("a", hanging, seconds=60))
        for _ in range(file_bucket.THREADS * 2)
    ]
    assert 1 == await threads.run("b", lambda: 1, seconds=60)
    await becomes_true(lambda: threads._running["a"] >= file_bucket.CALLS_PER_PATH)
    assert 1 == await threads.run("b", lambda: 1, seconds=60)
    assert file_bucket.CALLS_PER_PATH == threads._running["a"]

    hanging.go_on()
    assert ["late"] * len(calls) == await asyncio.gather(*calls)


async def test_the_number_of_abandoned_threads_is_bounded(hanging: Hanging) -> None:
    threads = FileThreads("file:///store", max_abandoned=5)
    before = threading.active_count()
    for at in range(5):
        await refused_late(threads, str(at), hanging)
    for at in range(100):
        with pytest.raises(StorageUnavailableError, match="5 calls for other"):
            await threads.run(f"other-{at}", hanging, seconds=60)

    assert threading.active_count() <= before + 6


async def test_a_result_after_the_deadline_is_discarded(
    threads: FileThreads, hanging: Hanging
) -> None:
    discarded = threading.Event()
    call = asyncio.ensure_future(
        threads.run("a", hanging, seconds=60, discard=lambda _: discarded.set())
    )
    await asyncio.sleep(SOON)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    hanging.go_on()
    await becomes_true(discarded.is_set)


def test_a_result_that_arrives_with_the_cancellation_is_discarded() -> None:
    discarded = threading.Event()

    async def main() -> None:
        threads = FileThreads("file:///store")
        call = asyncio.ensure_future(
            threads.run("a", lambda: 1, seconds=60, discard=lambda _: discarded.set())
        )
        await asyncio.sleep(0)  # the call is submitted
        while not threads._idle:  # its result is on the way to this loop
            time.sleep(SOON)  # noqa: ASYNC251 - the loop must not see the result yet
        asyncio.get_running_loop().call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
        await becomes_true(discarded.is_set)

    asyncio.run(asyncio.wait_for(main(), 20))


async def test_a_call_that_hangs_past_the_deadline_is_abandoned(
    threads: FileThreads, hanging: Hanging
) -> None:
    call = asyncio.ensure_future(threads.run("a", hanging, seconds=SOON * 4))
    await asyncio.sleep(SOON)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await becomes_true(lambda: bool(threads._abandoned))


async def test_idle_threads_end() -> None:
    threads = FileThreads("file:///store", idle_seconds=SOON)
    await threads.run("a", lambda: time.sleep(SOON), seconds=60)
    await becomes_true(lambda: not threads._threads)
    assert 1 == await threads.run("a", lambda: 1, seconds=60)
