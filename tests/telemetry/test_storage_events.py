"""Events of a bucket in trouble: hedges, retries and stalls are published."""

import time
from collections.abc import Callable, Iterator

import pytest

import storesvc_client as store
from storesvc.storage import hedging
from storesvc.storage import requests as hedged_calls
from storesvc.storage.hedging import Limits
from storesvc.telemetry.events import (
    Event,
    Retried,
    Stalled,
    StorageRequested,
    subscribe,
    unsubscribe,
)
from storesvc.telemetry.prometheus import Metrics
from tests.conftest import gcs_root
from tests.fake_gcs import Delay, FakeGcs

pytestmark = pytest.mark.emulated


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """All events of this process from now on."""
    seen: list[Event] = []
    subscribe(seen.append)
    yield seen
    unsubscribe(seen.append)


@pytest.fixture
def emulator(gcs: FakeGcs) -> Iterator[FakeGcs]:
    gcs.clear()
    yield gcs
    gcs.clear()


def checkpoint_read(emulator: FakeGcs, before: Callable[[], object]) -> None:
    """Reads a checkpoint of a bucket whose first read of it takes a second."""
    root = gcs_root()
    with store.connect(root) as client:
        client.run("tests/slow").save(1, {"x": 1}).result()
    before()
    with store.connect(root) as client:
        emulator.fault("GET .*checkpoints/0", Delay(1.0))
        client.run("tests/slow").checkpoint(1)


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (Limits(unknown_seconds=0.1, floor_seconds=0.1), "hedge"),
        (Limits(unknown_seconds=600, floor_seconds=600, answer_seconds=0.2), "retry"),
    ],
    ids=["hedge", "retry"],
)
def test_a_slow_read_is_an_event(
    emulator: FakeGcs,
    events: list[Event],
    monkeypatch: pytest.MonkeyPatch,
    limits: Limits,
    kind: str,
) -> None:
    checkpoint_read(emulator, lambda: monkeypatch.setattr(hedging, "READS", limits))

    assert kind in {one.kind for one in events if isinstance(one, Retried)}
    # By its path: servers of other tests may still run in this process.
    slow = [
        one
        for one in events
        if isinstance(one, StorageRequested)
        and "tests/slow/checkpoints/0" in one.path
        and not one.error
    ]
    assert {one.storage for one in slow} == {"gcs"}
    assert all(0 <= one.start <= time.time() for one in slow)


@pytest.mark.slow
def test_a_late_list_is_a_stall(
    emulator: FakeGcs, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = gcs_root()
    monkeypatch.setattr(hedged_calls, "LATE_SECONDS", 0.1)
    with store.connect(root) as client:
        client.run("tests/late").save(1, {"x": 1}).result()
        emulator.fault("GET .*/o[?]", Delay(0.5))
        list(client.run("tests/late").checkpoints())

    assert Stalled(storage="gcs") in events


def test_metrics_count_exactly_the_events(
    emulator: FakeGcs, events: list[Event]
) -> None:
    with store.connect(gcs_root()) as client:
        client.run("tests/counted").save(1, {"x": 1}).result()
        client.run("tests/counted").restore(1)
    emulator.clear()

    metrics = Metrics()
    seen = list(events)
    for one in seen:
        metrics(one)

    requests = [
        one
        for one in seen
        if isinstance(one, StorageRequested) and one.storage == "gcs"
    ]
    for operation in {one.operation for one in requests}:
        labels = {"storage": "gcs", "operation": operation, "result": "ok"}
        found = metrics.registry.get_sample_value(
            "storesvc_storage_request_duration_seconds_sum", labels
        )
        wanted = [
            one.seconds
            for one in requests
            if one.operation == operation and not one.error
        ]
        assert found == pytest.approx(sum(wanted))
