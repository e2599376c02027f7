"""Saves by all processes of a job: every byte is sent once, by one holder of it."""

import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import storesvc_client as store
from storesvc_client._job.job import JointSave
from storesvc_client._save import saver, writers
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs
from tests.support import job_parts
from tests.support.jax_job import JaxJob, run_job
from tests.support.thread_job import ThreadJob, ThreadProcess

PROCESSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A state that 4 processes with 2 devices each saved twice in a bucket."""

    root: str
    results: list[dict[str, Any]]
    """Results of each process; see ``job_parts.saves``."""
    stored_bytes: int
    """Bytes in the bucket."""
    asked_bytes: int
    """Bytes of the requests to the bucket during the saves."""


@pytest.fixture(scope="module")
def saved(gcs: FakeGcs) -> Saved:
    gcs.clear()
    root = gcs_root()
    results = run_job(
        "tests.support.job_parts:saves",
        PROCESSES,
        devices=2,
        target=root,
        rows=4,
        columns=2,
    )
    return Saved(
        root=root,
        results=results,
        stored_bytes=gcs.stored_bytes,
        asked_bytes=gcs.sent_bytes,
    )


@pytest.mark.slow
def test_every_byte_is_written_once(saved: Saved) -> None:
    size = job_parts.state_bytes()

    assert size <= sum(each["sent"][0] for each in saved.results) <= 1.01 * size
    assert size <= saved.stored_bytes <= 1.02 * size
    assert saved.asked_bytes <= 0.05 * size
    # saved again, nothing is written again
    assert [0] * PROCESSES == [each["sent"][1] for each in saved.results]


@pytest.mark.slow
def test_what_several_hold_is_spread_over_them(saved: Saved) -> None:
    totals = [each["total"][0] for each in saved.results]

    assert max(totals) - min(totals) <= 17 * job_parts.MIB, totals


@pytest.mark.slow
def test_what_process_0_says_of_a_checkpoint_counts(saved: Saved) -> None:
    found = [each["metrics"] for each in saved.results]

    assert [{"process": 0.0}] * PROCESSES == found


@pytest.mark.slow
def test_a_report_names_the_slowest_data_file_and_process(saved: Saved) -> None:
    first = {each["last"][0] for each in saved.results}

    assert len(first) == 1
    assert re.match(r"process [0-3] \(.+\)$", first.pop())
    assert all("/" in each["slowest"][0] for each in saved.results), saved.results
    assert [""] * PROCESSES == [each["slowest"][1] for each in saved.results]


@pytest.mark.slow
def test_one_process_restores_what_several_saved(saved: Saved) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("row", "column"))
    expected = job_parts.state_on(mesh)

    with store.connect(saved.root) as client:
        run = client.run(job_parts.RUN)
        found = run.restore(1, like=expected)
        verified = run.verify(1).ok

    assert [] == job_parts.differing(expected, found)
    assert verified


@pytest.mark.slow
def test_other_processes_restore_what_several_saved_and_read_every_byte_once(
    saved: Saved, gcs: FakeGcs
) -> None:
    size, before = job_parts.state_bytes(), gcs.sent_bytes

    results = run_job(
        "tests.support.job_parts:restores",
        2,
        devices=4,
        target=saved.root,
        rows=2,
        columns=4,
        spread=True,
    )

    read = [each["read_bytes"] for each in results]
    received = [each["received_bytes"] for each in results]
    assert [[], []] == [each["wrong"] for each in results]
    assert size <= sum(read) <= 1.02 * size
    assert gcs.sent_bytes - before <= 1.05 * size
    assert all(bytes_ > 12 * job_parts.MIB for bytes_ in received), received
    assert max(read) - min(read) <= 17 * job_parts.MIB, read
    slowest, same = (each["slowest"] for each in results)
    assert slowest == same
    assert re.match(r"process [01] \(.+\)$", slowest["process"])
    assert slowest["read_bytes"] in read
    assert 0 < slowest["slowest_seconds"] <= slowest["seconds"]


@pytest.mark.slow
def test_a_lease_longer_than_the_heartbeats_of_jax_is_warned_of_once(
    tmp_path: Path,
) -> None:
    results = run_job(
        "tests.support.job_parts:warns", 2, devices=1, target=tmp_path.as_uri()
    )

    leases = [30, 200, 200]
    first = [
        f"{n} after a lease of {s} s" for n, s in zip((0, 1, 1), leases, strict=True)
    ]
    assert [first, [f"0 after a lease of {s} s" for s in leases]] == results


@pytest.mark.slow
def test_a_save_that_cannot_be_names_process_and_cause_and_harms_no_other(
    tmp_path: Path,
) -> None:
    results = run_job(
        "tests.support.job_parts:fails", 3, devices=1, target=tmp_path.as_uri()
    )

    another_plan, unsupported, refused, not_refused, *rest = zip(*results, strict=True)
    never_begun, never_called, other_steps, *rest = rest
    exists, alone, elsewhere, well = rest

    leaf = "leaf 'z': expected (3,) float64, got (4,) float64"
    assert all(leaf in each for each in another_plan), another_plan
    assert all("process 2" in each for each in another_plan[:2]), another_plan
    assert all("process 1" in each for each in (unsupported[0], unsupported[2]))
    assert all("leaf 'odd'" in each for each in unsupported), unsupported
    assert all("process 1" in each for each in (refused[0], refused[2])), refused
    assert all("labels=" in each for each in refused), refused
    assert ("", "", "") == not_refused
    assert "" == never_begun[0]
    assert all("process 0" in each for each in never_begun[1:]), never_begun
    assert all("process 2" in each for each in never_called[:2]), never_called
    assert all("not finished" in each for each in never_called[:2]), never_called
    others = [rf"process {i} \S+ \(its last save is of step {8 + i}\)" for i in (1, 2)]
    unfinished = f"{others[0]}, {others[1]} of 3 processes have not finished"
    expected = f"UnavailableError: save of tests/job@8: {unfinished}"
    assert re.match(expected, other_steps[0]), other_steps
    for index in (1, 2):
        never = (
            rf"@{8 + index}: process 0 \S+ \(its last save is of step 8\) of 3 has not"
        )
        assert re.search(never, other_steps[index]), other_steps
    assert all("exists already" in each for each in exists), exists
    assert all("got one that spans other processes" in each for each in alone), alone
    assert all("process 1" in each for each in (elsewhere[0], elsewhere[2]))
    assert all("memory://; connect all processes" in each for each in elsewhere)
    assert ("", "", "") == well
    with store.connect(tmp_path.as_uri()) as client:
        assert [7, 5, 0] == sorted(
            (c.step for c in client.run(job_parts.RUN).checkpoints()), reverse=True
        )


@pytest.mark.slow
def test_processes_that_hold_nothing_or_fail_once_keep_none_from_going_on(
    tmp_path: Path,
) -> None:
    target = tmp_path.as_uri()

    results = run_job("tests.support.job_parts:differ", 3, devices=1, target=target)

    assert [True] * 3 == [each["is_saved"] for each in results]
    assert [[True, True]] * 3 == [each["is_restored"] for each in results]
    # what no process of those that write it holds is rejected, and not saved as zeros
    assert all("'w'" in each["lone"] for each in results), results
    assert all("of process 2 alone" in each["lone"] for each in results), results
    assert [[True] * 3] * 3 == [each["is_kept"] for each in results]
    assert "" == results[1]["alone"]
    assert all("process 1" in results[at]["alone"] for at in (0, 2)), results
    assert "NotFoundError" in results[1]["opened"], results
    assert all("process 1" in results[at]["opened"] for at in (0, 2)), results
    assert all("failed in another process" in results[at]["opened"] for at in (0, 2)), (
        results
    )
    assert [False, True, False] == ["'odd'" in each["error"] for each in results]
    with store.connect(target) as client:
        assert [5, 4, 3, 0] == [c.step for c in client.run(job_parts.RUN).checkpoints()]


@pytest.mark.slow
@pytest.mark.parametrize("count", [PROCESSES, 2])
def test_a_process_that_dies_is_named_and_its_save_goes_on_where_it_stopped(
    tmp_path: Path, count: int
) -> None:
    target, size = tmp_path.as_uri(), job_parts.state_bytes()
    job = JaxJob(
        "tests.support.job_parts:dies", PROCESSES, 1, {"target": target, "seconds": 6}
    )
    job.start()
    job.await_outcomes(0, 2, 3)
    with store.connect(target) as client:
        unfinished = [u.step for u in client.run(job_parts.RUN).uploads.list()]
        steps = [c.step for c in client.run(job_parts.RUN).checkpoints()]

    sent = run_job("tests.support.job_parts:goes_on", count, devices=1, target=target)

    results = [job.outcome(index) for index in (0, 2, 3)]
    assert all("process 1" in each for both in results for each in both[:2]), results
    assert "UnavailableError: the exchange of bytes" in results[0][2], results
    assert [2, 3] == sorted(unfinished)
    assert [1] == steps
    assert 0.15 * size < sum(sent) < 0.35 * size  # the part of the one that died
    with store.connect(target) as client:
        assert client.run(job_parts.RUN).verify(2).ok


@pytest.mark.slow
def test_a_leaf_that_differs_between_processes_is_rejected_by_leaf_and_processes(
    tmp_path: Path,
) -> None:
    target = tmp_path.as_uri()

    results = run_job("tests.support.job_parts:disagrees", 3, devices=1, target=target)

    *kinds, first, same = zip(*results, strict=True)
    one = "leaf 'rng/count': processes 0 and 2 hold different values"
    assert 5 == len(kinds)
    assert all(one in each for kind in kinds for each in kind), kinds
    assert all(kind[2].startswith("PreconditionError") for kind in kinds), kinds
    either = r"leaf 'rng/count': processes 0 and [12] hold different values"
    assert all(re.search(either, each) for each in first), first
    assert ("", "", "") == same
    with store.connect(target) as client:
        assert [6] == [c.step for c in client.run(job_parts.RUN).checkpoints()]


class Forgetful(ThreadProcess):
    """A process whose board is gone once it has begun a save."""

    def post(self, key: str, text: str) -> None:
        if not key.endswith("/begun"):
            raise store.UnavailableError("no board")
        super().post(key, text)

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        if key.endswith(("/ended", "/last")):
            raise store.UnavailableError("no board")
        return super().read(key, seconds=seconds)


def test_a_board_that_is_gone_fails_no_save_that_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = threading.local()
    monkeypatch.setattr(writers, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(
        saver, "_joint_save", lambda *what: JointSave(joined.process, *what)
    )
    job = ThreadJob(3)

    def part(process: ThreadProcess) -> int:
        joined.process = Forgetful(job, process.index)
        with store.connect(tmp_path.as_uri()) as client:
            save = client.run("tests/job").save(1, {"w": np.arange(10)})
            assert "" == save.report().last_process
            return save.result().step

    assert [1] * 3 == job.run(part)


def test_one_process_alone_sends_the_leaf_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, sent, send = threading.local(), [], writers.Writer._send
    monkeypatch.setattr(
        saver, "_joint_save", lambda *what: JointSave(joined.process, *what)
    )

    def counting(writer: Any, method: Any, requests: Any) -> Any:
        kept = list(requests)
        sent.append(sum(each.ByteSize() for each in kept))
        return send(writer, method, kept)

    monkeypatch.setattr(writers.Writer, "_send", counting)
    tree = {f"layer {n}": np.zeros(2, np.float32) for n in range(2000)}

    def part(process: ThreadProcess) -> int:
        joined.process = process
        with store.connect(tmp_path.as_uri()) as client:
            return client.run("tests/job").save(1, tree).result().step

    assert [1] * 3 == ThreadJob(3).run(part)
    *others, largest = sorted(sent)
    assert largest > 50_000
    assert 2 == len(others)
    assert all(each < 500 for each in others), others
