"""A call that is cancelled anywhere leaves nothing behind, and keeps no other waiting.

``make soak SOAK=cancels`` cancels each call of the contract at each point.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cancels import CancellingServer
from tests.support.every_call import (
    CALLS,
    Make,
    Saved,
    check_save,
    write_chunks,
    write_within_a_chunk,
)
from tests.support.examples import sampled, soaked
from tests.support.rpcs import NAMES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CancellingServer]:
    root: Path = tmp_path_factory.mktemp("cancels")
    with CancellingServer(root) as server:
        yield server


@pytest.mark.parametrize("times", soaked([1, 2], every=2))
@pytest.mark.parametrize("make", [write_chunks, write_within_a_chunk])
def test_chunks_whose_stream_is_cancelled_anywhere_hold_nothing(
    server: CancellingServer, make: Make, times: int
) -> None:
    points = list(server.sweep(lambda: make(Saved(server.address)), times=times))

    assert [] == [point for point in points if point[1]]
    assert len(points) > 10
    check_save(server.address)


@pytest.mark.parametrize("make", [write_chunks, write_within_a_chunk])
def test_chunks_whose_cancellation_comes_with_a_result_hold_nothing(
    server: CancellingServer, make: Make
) -> None:
    points = list(
        server.sweep(lambda: make(Saved(server.address)), times=1, is_late=True)
    )

    assert [] == [point for point in points if point[1]]
    assert len(points) > 8
    check_save(server.address)


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "name",
    sampled(
        [
            "BeginUpload",
            "DiffCheckpoints",
            "FindChunks",
            "FinishWriter",
            "ReadChunks",
            "ReadManifest",
            "VerifyCheckpoint",
            "WatchCheckpoints",
        ],
        every=4,
    ),
)
def test_a_call_that_is_cancelled_holds_nothing(
    server: CancellingServer, name: str, is_late: bool
) -> None:
    (make,) = CALLS[name]

    points = list(
        server.sweep(
            lambda: make(Saved(server.address)), times=1, stride=3, is_late=is_late
        )
    )

    assert [] == [point for point in points if point[1]]
    assert points
    check_save(server.address)


def test_every_call_of_the_contract_is_swept() -> None:
    assert NAMES == set(CALLS)
