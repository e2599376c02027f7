"""Host memory of restores: a block is used again once nothing refers to it."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from storesvc_client._chunks.buffers import Bytes
from storesvc_client._chunks.memory import HUGE_PAGE_BYTES, BlockPool, allocate
from tests.support.examples import sampled

SIZE = 3 * HUGE_PAGE_BYTES + 5
WHOLE = 4 * HUGE_PAGE_BYTES
LIMIT = 1 << 30


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(LIMIT)


def free_bytes(pool: BlockPool) -> int:
    """Returns the free bytes once jax has dropped what it holds for others."""
    jax.device_put(0).block_until_ready()
    gc.collect()
    return pool.free_bytes


@pytest.mark.parametrize(
    "take",
    [allocate, BlockPool(LIMIT).take, BlockPool(0).take],
    ids=["allocate", "pool", "pool without room"],
)
@pytest.mark.parametrize(
    "size", [0, 1, 64 << 10, 1 << 20, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, SIZE]
)
def test_memory_is_writable_and_aligned_for_xla(
    take: Callable[[int], Bytes], size: int
) -> None:
    memory = take(size)

    assert size == memory.nbytes
    assert size < 64 << 10 or 0 == memory.ctypes.data % 64
    memory[...] = 7
    assert (memory == 7).all()


def test_a_block_is_used_again(pool: BlockPool) -> None:
    memory = pool.take(SIZE)
    address = memory.ctypes.data
    del memory

    assert WHOLE == free_bytes(pool)
    assert address == pool.take(SIZE - 4).ctypes.data
    memory = pool.take(WHOLE)
    assert address == memory.ctypes.data
    assert 0 == free_bytes(pool)


def test_the_smallest_block_that_fits_is_used_and_the_newest_of_a_size(
    pool: BlockPool,
) -> None:
    small, large = 16 * HUGE_PAGE_BYTES, 17 * HUGE_PAGE_BYTES
    taken = [pool.take(size) for size in (small, small, large)]
    older, newer, larger = (memory.ctypes.data for memory in taken)
    while taken:
        del taken[0]
        free_bytes(pool)  # admits the blocks in this order

    again = [pool.take(small) for _ in range(3)]

    assert [newer, older, larger] == [memory.ctypes.data for memory in again]


@pytest.mark.parametrize(
    "refer",
    sampled(
        [
            lambda memory: memory[5:9],
            lambda memory: memory.view(np.uint8).reshape(-1)[::2],
            lambda memory: memory.data,
            lambda memory: memoryview(memory)[3:],
            np.from_dlpack,
            jax.device_put,
            lambda memory: jax.device_put(memory).reshape(-1, 1),
            lambda memory: np.asarray(jax.device_put(memory)),
            lambda memory: np.from_dlpack(jax.device_put(memory)),
            lambda memory: jax.dlpack.from_dlpack(jax.device_put(memory)),
            lambda memory: jax.device_put(memory).addressable_shards[0],
        ],
        every=3,
    ),
    ids=[
        "view",
        "strided view",
        "buffer",
        "memoryview",
        "DLPack of NumPy",
        "jax",
        "reshaped",
        "NumPy view of jax",
        "DLPack of jax",
        "DLPack from jax to jax",
        "shard",
    ],
)
def test_a_block_is_not_free_while_anything_refers_to_it(
    pool: BlockPool, refer: Callable[[Bytes], Any]
) -> None:
    memory = pool.take(WHOLE)
    memory[...] = 7
    kept = refer(memory)
    del memory
    free_bytes(pool)

    for _ in range(3):  # would fill the block if it was handed out
        pool.take(WHOLE)[...] = 9
    value = kept.data if hasattr(kept, "replica_id") else kept
    assert (np.asarray(value) == 7).all()

    del kept, value
    assert free_bytes(pool) in (WHOLE, 2 * WHOLE)


def test_a_donated_array_keeps_its_block_as_long_as_the_result_needs_it(
    pool: BlockPool,
) -> None:
    memory = pool.take(WHOLE).view(np.float32)
    memory[...] = 7
    array = jax.device_put(memory)
    del memory
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    result = add(array)
    del array
    free_bytes(pool)
    pool.take(WHOLE)[...] = 0

    assert (np.asarray(result) == 8).all()


@pytest.mark.slow
def test_a_computation_under_way_keeps_its_block(pool: BlockPool) -> None:
    memory = pool.take(WHOLE).view(np.float32)
    memory[...] = 1
    array = jax.device_put(memory)
    del memory
    slow = array
    for _ in range(3):
        slow = jnp.sort(slow[::-1] * array)
    del array
    pool.take(WHOLE)[...] = 0

    assert WHOLE / 4 == float(slow.sum())


def test_blocks_above_the_limit_are_unmapped() -> None:
    pool = BlockPool(2 * WHOLE)
    taken = [pool.take(WHOLE) for _ in range(5)]
    taken.clear()

    assert 2 * WHOLE == free_bytes(pool)


def test_a_block_does_not_serve_a_much_smaller_request(pool: BlockPool) -> None:
    address = pool.take(100 * HUGE_PAGE_BYTES).ctypes.data

    assert 100 * HUGE_PAGE_BYTES == free_bytes(pool)
    assert address != pool.take(50 * HUGE_PAGE_BYTES).ctypes.data
    assert address == pool.take(95 * HUGE_PAGE_BYTES).ctypes.data


def test_blocks_that_stay_free_are_unmapped() -> None:
    now = 0.0
    pool = BlockPool(LIMIT, kept_seconds=10, clock=lambda: now)
    pool.take(WHOLE)
    assert WHOLE == free_bytes(pool)

    now = 9.0
    pool.tidy()
    assert WHOLE == free_bytes(pool)
    now = 10.0
    pool.tidy()
    assert 0 == free_bytes(pool)


def test_the_keeper_unmaps_without_another_restore_and_ends_with_the_pool() -> None:
    before = set(threading.enumerate())
    pool = BlockPool(LIMIT, kept_seconds=0.05)
    pool.take(WHOLE)
    _await(lambda: not pool.free_bytes)
    started = set(threading.enumerate()) - before
    (keeper,) = (t for t in started if t.name == "storesvc-memory")
    assert keeper.is_alive()

    pool = BlockPool(LIMIT)  # the first one is collected
    _await(lambda: not keeper.is_alive())
    assert 0 == pool.free_bytes


def test_a_cleared_pool_keeps_nothing(pool: BlockPool) -> None:
    taken = [pool.take(WHOLE) for _ in range(2)]
    taken.pop()
    assert WHOLE == free_bytes(pool)

    pool.clear()
    taken.clear()

    assert 0 == free_bytes(pool)
    assert SIZE == pool.take(SIZE).nbytes


def test_threads_share_a_pool(pool: BlockPool) -> None:
    shared: list[int] = []
    lock, taken = threading.Lock(), set[int]()

    def work(number: int) -> None:
        for _ in range(200):
            memory = pool.take(HUGE_PAGE_BYTES)
            address = memory.ctypes.data
            with lock:
                if address in taken:
                    shared.append(number)
                taken.add(address)
            memory[:: 1 << 12] = number
            if not (memory[:: 1 << 12] == number).all():
                shared.append(number)
            with lock:
                taken.discard(address)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == shared
    # each thread takes its next block before it drops the last one
    assert free_bytes(pool) <= 2 * 8 * HUGE_PAGE_BYTES


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
