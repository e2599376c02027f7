"""Buffers of a transfer never overlap, stay within the budget, and are reused."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc_client._chunks.memory import ALIGNMENT, ExtentPool

BUDGET = 64 * ALIGNMENT

SIZES = st.integers(0, BUDGET)


def begin(buffer: Any) -> int:
    return int(buffer.ctypes.data)


@given(st.lists(st.tuples(SIZES, st.integers(0, 3))))
def test_buffers_do_not_overlap_and_all_memory_returns(
    steps: list[tuple[int, int]],
) -> None:
    pool, taken = ExtentPool(BUDGET), list[Any]()
    for size, given_back in steps:
        buffer = pool.take_now(size)
        if buffer is not None:
            assert size == len(buffer)
            assert 0 == begin(buffer) % ALIGNMENT
            taken.append(buffer)
        for _ in range(min(given_back, len(taken))):
            pool.give_back(taken.pop(size % len(taken)))
        spans = sorted((begin(one), begin(one) + len(one)) for one in taken)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert sum(map(len, taken)) <= pool.used_bytes <= BUDGET
    for buffer in taken:
        pool.give_back(buffer)
    assert 0 == pool.used_bytes
    assert pool.take_now(BUDGET) is not None


def test_a_buffer_of_another_size_has_the_memory_that_was_given_back() -> None:
    pool = ExtentPool(BUDGET)
    first, second = pool.take_now(10 * ALIGNMENT), pool.take_now(ALIGNMENT)
    assert first is not None
    assert second is not None
    pool.give_back(first)

    smaller = pool.take_now(4 * ALIGNMENT)

    assert begin(first) == begin(smaller)


@contextmanager
def waiting_take(
    pool: ExtentPool, size: int, cancelled: Callable[[], bool] = lambda: False
) -> Iterator[Future[Any]]:
    """Yields the result of a take that waits, and joins its thread."""
    waiting = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(
            pool.take, size, cancelled=cancelled, waiting=waiting.set
        )
        assert waiting.wait(60)
        yield found


@pytest.mark.parametrize("size", [BUDGET, 3 * BUDGET])
def test_a_large_buffer_waits_for_all_others(size: int) -> None:
    pool = ExtentPool(BUDGET)
    small = pool.take_now(1)
    with waiting_take(pool, size) as found:
        assert not found.done()
        assert small is not None
        pool.give_back(small)

    assert size == len(found.result())
    assert pool.take_now(1) is None
    assert pool.used_bytes == size
    pool.give_back(found.result())
    assert pool.take_now(BUDGET) is not None


def test_a_wait_ends_when_it_is_cancelled() -> None:
    pool = ExtentPool(BUDGET)
    assert pool.take_now(BUDGET) is not None
    cancelled = threading.Event()
    with waiting_take(pool, 1, cancelled.is_set) as found:
        cancelled.set()
        pool.wake()

    assert found.result() is None
