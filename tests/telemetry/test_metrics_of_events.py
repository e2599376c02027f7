"""Single events change the metrics of a server as they should."""

import math
from typing import Any

from storesvc.telemetry.events import (
    BugFound,
    CollectorChanged,
    Committed,
    RetentionApplied,
    RunCollected,
    RunContents,
    StoreCollected,
)
from storesvc.telemetry.prometheus import Metrics

NEWEST = (
    "storesvc_checkpoint_newest_timestamp_seconds",
    {"namespace": "prod", "run": "llama"},
)


def committed(moment: float) -> Committed:
    return Committed(
        run="prod/llama",
        step=1,
        upload="0" * 32,
        start=moment,
        seconds=0,
        upload_start=moment,
        stored_bytes=10,
        own_bytes=4,
        chunk_count=1,
    )


def collected(newest_commit: float, **changes: Any) -> RunCollected:
    contents = RunContents(
        checkpoints=2,
        logical_bytes=20,
        own_bytes=14,
        newest_commit=newest_commit,
        uploads_open=0,
        oldest_upload=0,
    )
    fields: dict[str, Any] = {
        "run": "prod/llama",
        "start": 0,
        "seconds": 1,
        "aborted_uploads": 0,
        "deleted_checkpoints": 0,
        "purged_checkpoints": 0,
        "deleted_objects": 0,
        "is_failed": False,
        "contents": contents,
        **changes,
    }
    return RunCollected(**fields)


def store_collected(*, is_complete: bool, start: float = 1e12) -> StoreCollected:
    return StoreCollected(
        start=start, seconds=0, runs=("prod/llama",), is_complete=is_complete
    )


def test_the_newest_commit_never_becomes_older() -> None:
    metrics = Metrics(runs=["prod/llama"])

    metrics(committed(2000))
    metrics(collected(1000))
    assert metrics.registry.get_sample_value(*NEWEST) == 2000
    metrics(collected(3000))
    assert metrics.registry.get_sample_value(*NEWEST) == 3000


def test_a_server_that_collects_no_longer_does_not_know_the_contents() -> None:
    metrics = Metrics()
    metrics(collected(1000))
    metrics(store_collected(is_complete=True))
    assert metrics.registry.get_sample_value("storesvc_checkpoints") == 2

    metrics(CollectorChanged())

    found = metrics.registry.get_sample_value("storesvc_checkpoints")
    assert found is not None
    assert math.isnan(found)


def test_an_incomplete_pass_is_no_success() -> None:
    metrics, name = Metrics(), "storesvc_gc_last_success_timestamp_seconds"
    before = metrics.registry.get_sample_value(name)

    metrics(store_collected(is_complete=False))
    assert metrics.registry.get_sample_value(name) == before
    metrics(store_collected(is_complete=True))
    assert metrics.registry.get_sample_value(name) == 1e12


def test_deletions_by_retention_after_a_commit_count() -> None:
    metrics = Metrics()

    metrics(RetentionApplied(run="prod/llama", deleted_checkpoints=3))
    metrics(collected(1, deleted_checkpoints=2))

    labels = {"what": "checkpoint deleted"}
    assert metrics.registry.get_sample_value("storesvc_gc_ended_total", labels) == 5


def test_the_first_bug_counts_from_zero() -> None:
    metrics = Metrics()
    assert metrics.registry.get_sample_value("storesvc_bugs_total") == 0

    metrics(BugFound())

    assert metrics.registry.get_sample_value("storesvc_bugs_total") == 1
