"""The order of a save to files of this machine: copies first, then few calls."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client._values.options import SnapshotMode
from tests.support.recorded_calls import record_calls, rpcs_in

RUN = "tests/files"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[store.Run]:
    """A run of an embedded store in a directory."""
    with store.connect(f"{tmp_path.as_uri()}/store") as client:
        yield client.run(RUN)


def the_state(step: int) -> dict[str, np.ndarray]:
    """Returns a state of 8 MiB that no other step has a chunk of."""
    return {f"{n}": np.full(1 << 20, 10.0 * step + n, np.float32) for n in range(2)}


def test_the_upload_begins_when_the_caller_no_longer_waits(run: store.Run) -> None:
    for step in range(2):  # without a base, and with one
        report = run.save(step, the_state(step)).report()
        spans = {span.name: span for span in report.timeline}
        assert spans["begin"].start_seconds >= spans["snapshot"].end_seconds


def test_chunks_that_the_base_may_hold_are_looked_up_before(run: store.Run) -> None:
    run.save(0, the_state(0)).result()

    with record_calls() as calls:
        report = run.save(1, the_state(0)).report()

    assert report.reused_bytes == report.total_bytes
    assert 1 == rpcs_in(calls).count("FindChunks")


@pytest.mark.parametrize("snapshot", ["host", "none"])
def test_a_save_of_a_moment_takes_two_calls(
    run: store.Run, snapshot: SnapshotMode
) -> None:
    run.save(0, the_state(0)).result()

    with record_calls() as calls:
        run.save(1, the_state(1), snapshot=snapshot).result()

    assert ["BeginUpload", "CommitUpload"] == rpcs_in(calls)
    assert run.verify(1).ok
