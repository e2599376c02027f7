"""Which chunks a save asks the store for: none that are known to be new, and one of
each leaf if nothing is known about the base."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.chunks import I64, Sums
from storesvc.save.receipts import Receipts
from storesvc.save.uploads import OpenUpload
from tests.conftest import gcs_root
from tests.support.thread_server import ThreadServer

Connect: TypeAlias = Callable[[], store.Run]

HALF = 2_150_001
"""Elements of one of the two chunks of a large leaf."""

KERNEL = 300_000
"""Elements of a leaf of one chunk."""


def state(*, frozen: float, adapter: float) -> dict[str, Any]:
    # not divisible by its chunks, so that the last one is padded when it is copied
    wide = np.arange(2 * HALF - 1, dtype=np.float32) + np.float32(frozen)
    return {
        "embedding": wide,
        "kernel": -wide[:KERNEL],
        "many": [np.full(50, frozen + n) for n in range(30)],
        "adapter": np.full((300, 300), adapter, np.float32),
    }


def changed_in_part(step: int) -> dict[str, Any]:
    found = state(frozen=0, adapter=step)
    found["embedding"][:HALF] += step
    found["kernel"] = found["kernel"] * step
    return found


@pytest.fixture(
    params=["embedded, files", "embedded, bucket", "direct, files", "direct, bucket"]
)
def connect(
    request: pytest.FixtureRequest, tmp_path: Path, bucket_storage: None
) -> Iterator[Connect]:
    """Opens the run, each time as a process that knows nothing."""
    root = gcs_root() if "bucket" in request.param else tmp_path.as_uri()
    with ExitStack() as stack:
        address, direct = root, None
        if "direct" in request.param:
            address, direct = stack.enter_context(ThreadServer(root)).address, root

        def connected() -> store.Run:
            client = store.connect(address, direct=direct)
            return stack.enter_context(client).run("tests/look-ups")

        yield connected


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The chunks of each request that asks which of them are stored."""
    requests: list[list[int]] = []
    find = Receipts.find

    async def noted(
        self: Receipts, upload: OpenUpload, writer: int, parts: AsyncIterator[Sums]
    ) -> AsyncGenerator[I64]:
        asked: list[int] = []
        requests.append(asked)

        async def each() -> AsyncIterator[Sums]:
            async for sums in parts:
                asked.extend(sums.ordinal.tolist())
                yield sums

        async for found in find(self, upload, writer, each()):
            yield found

    monkeypatch.setattr(Receipts, "find", noted)
    return requests


def assert_saved(run: store.Run, step: int, expected: dict[str, Any]) -> None:
    actual = run.restore(step, like=expected)
    assert expected["embedding"].tobytes() == actual["embedding"].tobytes()
    assert expected["kernel"].tobytes() == actual["kernel"].tobytes()
    assert expected["adapter"].tobytes() == actual["adapter"].tobytes()
    assert np.array_equal(expected["many"], actual["many"])


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("snapshot", ["host", "none"])
def test_leaves_are_found_at_the_first_save_after_they_freeze(
    connect: Connect, snapshot: Any, is_fresh: bool
) -> None:
    run = connect()
    run.save(1, state(frozen=1, adapter=1)).result()
    run.save(2, state(frozen=2, adapter=2)).result()
    if is_fresh:
        run = connect()
    report = run.save(3, state(frozen=2, adapter=3), snapshot=snapshot).report()

    assert 300 * 300 * 4 + 4 == report.sent_bytes <= 0.03 * report.total_bytes
    assert_saved(run, 3, state(frozen=2, adapter=3))


@pytest.mark.parametrize("snapshot", ["host", "none"])
def test_chunks_that_are_known_to_be_new_are_not_looked_up(
    connect: Connect, looked_up: list[list[int]], snapshot: Any
) -> None:
    run = connect()
    for step in (1, 2, 3):
        tree = state(frozen=step, adapter=step)
        report = run.save(step, tree, snapshot=snapshot).report()
        assert 0 == report.reused_bytes
    assert [] == looked_up
    assert_saved(run, 3, state(frozen=3, adapter=3))


def test_one_chunk_of_each_leaf_is_looked_up_in_an_unknown_base(
    connect: Connect, looked_up: list[list[int]]
) -> None:
    connect().save(1, state(frozen=1, adapter=1)).result()
    run = connect()
    report = run.save(2, state(frozen=2, adapter=2)).report()

    asked = [chunk for request in looked_up for chunk in request]
    leaves = len(run.open(2).leaves)
    assert leaves == len(set(asked)) == len(asked)
    assert 0 == report.reused_bytes
    assert_saved(run, 2, state(frozen=2, adapter=2))


def test_a_leaf_that_changed_in_part_is_found_at_the_second_save(
    connect: Connect,
) -> None:
    connect().save(1, changed_in_part(1)).result()
    run = connect()
    first = run.save(2, changed_in_part(2)).report()
    second = run.save(3, changed_in_part(3)).report()
    # another base than the last save: remembered by leaf
    third = run.save(4, changed_in_part(4), base=1).report()

    assert first.reused_bytes < 4 * HALF
    assert second.reused_bytes - first.reused_bytes == 4 * HALF + 4
    assert third.reused_bytes == second.reused_bytes
    assert_saved(run, 4, changed_in_part(4))
