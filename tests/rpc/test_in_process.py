"""Calls of an embedded store that do not pass its socket: as others, with the same
errors, observers and deadlines."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc import failpoints
from storesvc.failpoints import Action, Failpoint, Fault
from storesvc.server.embedded import EmbeddedServer
from tests.support.recorded_calls import record_calls

RUN = "tests/inside"


@pytest.fixture(params=["in process", "socket"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[store.Client]:
    """A client of a store in this process."""
    root = f"{tmp_path.as_uri()}/store"
    if request.param == "in process":
        with store.connect(root, timeout=20) as client:
            yield client
        return
    server = EmbeddedServer(root, timeout=20)
    try:
        with store.connect(server.address, timeout=20) as client:
            yield client
    finally:
        server.close()


@contextmanager
def delayed(point: Failpoint, seconds: float) -> Iterator[None]:
    """Delays what reaches a failpoint."""
    failpoints.arm(
        {point: Fault(action=Action.DELAY, delay_seconds=seconds, time=None)}
    )
    try:
        yield
    finally:
        failpoints.arm({})


def test_errors_have_their_reason_and_their_values(client: store.Client) -> None:
    run = client.run(RUN)
    run.save(3, {"x": 1.0}).result()

    with pytest.raises(store.NotFoundError, match=f"{RUN}@4 does not exist") as caught:
        run.checkpoint(4)
    assert "CHECKPOINT_NOT_FOUND" == caught.value.reason
    assert "3" == caught.value.metadata["nearest"]
    assert 32 == len(caught.value.metadata["request_id"])


def test_each_call_is_measured_once(client: store.Client) -> None:
    with record_calls("ListRuns") as found:
        assert [] == list(client.runs())

    (one,) = found
    assert ("storesvc.v1.CheckpointService/ListRuns", "OK") == (one.method, one.status)
    assert one.received_bytes > 0
    assert 32 == len(one.request_id)


def test_a_call_with_a_stream_of_requests_receives_all_of_them(
    client: store.Client,
) -> None:
    leaves = {f"leaf {n:05}": np.full(100, n) for n in range(2000)}  # two parts
    with record_calls("BeginUpload") as found:
        client.run(RUN).save(1, leaves).result()

    (one,) = found
    assert "OK" == one.status
    assert one.received_bytes > sum(map(len, leaves))


def test_a_rejected_stream_of_requests_raises_its_error(client: store.Client) -> None:
    run = client.run(RUN)
    large = {"x": np.zeros(1 << 20)}
    run.save(1, large).result()

    with (
        record_calls("BeginUpload") as found,
        pytest.raises(store.AlreadyExistsError) as caught,
    ):
        run.save(1, large).result()

    assert "CHECKPOINT_EXISTS" == caught.value.reason
    assert ["ALREADY_EXISTS"] == [one.status for one in found]


def test_a_call_ends_before_its_deadline_with_the_cause(tmp_path: Path) -> None:
    with store.connect(f"{tmp_path.as_uri()}/store", timeout=2) as client:
        run = client.run(RUN)
        run.save(1, {"x": 1.0}).result()
        with (
            delayed(Failpoint.DELETE_BEFORE_RECORD, 10),
            pytest.raises(store.UnavailableError, match="shortly before its deadline"),
        ):
            run.delete(1)


def test_a_closed_client_makes_no_call(client: store.Client) -> None:
    run = client.run(RUN)
    run.save(1, {"x": 1.0}).result()
    client.close()

    with pytest.raises(store.InvalidRequestError, match="is closed"):
        run.latest()


@pytest.mark.slow
def test_a_server_that_closes_waits_for_the_calls_of_other_threads(
    tmp_path: Path,
) -> None:
    client = store.connect(f"{tmp_path.as_uri()}/store")
    run = client.run(RUN)
    run.save(1, {"x": np.ones(3)}).result()
    with delayed(Failpoint.DELETE_BEFORE_RECORD, 1.0):
        deleting = threading.Thread(target=run.delete, args=[1])
        deleting.start()
        while not failpoints.times_reached(Failpoint.DELETE_BEFORE_RECORD):
            time.sleep(0.01)
        client.close()
        is_deleted = list((tmp_path / "store/journal/tests").glob("*2.binpb"))
        deleting.join()

    assert 1 == len(is_deleted)
    with store.connect(f"{tmp_path.as_uri()}/store") as again:
        assert [] == again.run(RUN).steps()
