"""A joint save is committed once: by the process that finished last, or in its place by
one of those that wait. What a save costs grows in proportion to its processes."""

import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import storesvc_client as store
from storesvc import failpoints
from storesvc.save import uploads
from storesvc.storage import hedging
from storesvc.storage.hedging import Limits
from storesvc_client._job.job import JointSave
from storesvc_client._save import saver, writers
from tests.conftest import gcs_root
from tests.fake_gcs import FakeGcs, Logged
from tests.support.jax_job import run_job
from tests.support.thread_job import ThreadJob, ThreadProcess
from tests.support.thread_server import ThreadServer

RUN = "tests/job"
LONG = 3600.0

_KINDS = {
    r"uploads/\w+/writers/": "receipt",
    r"uploads/\w+/lease": "lease",
    r"uploads/\w+/(tree|values)-": "leaf table",
    r"uploads/\w+/": "parts",
    r"uploads/\w+\.binpb": "upload",
    r"checkpoints/": "slot",
    r"recent\.binpb": "hint",
    r"staging/": "staging table",
    r"pool/": "data file",
    r"manifests/": "manifest",
    r"trees/": "key space",
    r"files/": "file table",
    r"journal/": "journal",
    r"runs/": "run",
}


def kind_of(entry: Logged) -> str:
    """Returns what a request does."""
    target = unquote(entry.target)
    how = {"GET": "read", "HEAD": "read", "DELETE": "delete"}.get(entry.method, "write")
    if re.search(r"[?&]prefix=", target):
        how = "list"
    found = [kind for place, kind in _KINDS.items() if re.search(place, target)]
    assert found, f"{entry.method} {target}"
    return f"{how} {found[0]}"


Part = Callable[[ThreadProcess], object]


class Saves:
    """Joint saves of jobs whose processes are threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._joined = threading.local()
        patch.setattr(
            saver, "_joint_save", lambda *what: JointSave(self._joined.process, *what)
        )

    def run(
        self,
        job: ThreadJob,
        root: str,
        step: int = 1,
        process: Callable[[int], ThreadProcess] | None = None,
        begin: Callable[[], None] | None = None,
    ) -> list[object]:
        """Saves a step in all processes, each with a chunk of its own, and connected by
        itself to `root`; returns their checkpoints or errors.

        `begin` is called once all are connected.
        """
        connected = threading.Barrier(job.count, action=begin)

        def part(of: ThreadProcess) -> store.Checkpoint:
            self._joined.process = process(of.index) if process else of
            with store.connect(root) as client:
                connected.wait(60)
                item = store.PerProcess(bytes([of.index]) * 1000)
                tree = {"w": np.arange(10) + step}
                return client.run(RUN).save(step, tree, items={"own": item}).result()

        return job.run(part)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> Saves:
    return Saves(monkeypatch)


def check_saved(root: str, count: int, outcomes: list[object], step: int = 1) -> None:
    """Checks that all processes that live got the same checkpoint, and that it is
    whole."""
    saved = [each for each in outcomes if isinstance(each, store.Checkpoint)]
    assert saved, outcomes
    with store.connect(root) as client:
        run = client.run(RUN)
        assert [run.open(step).info] * len(saved) == saved
        own = run.items(step).per_process("own")
        assert [bytes([index]) * 1000 for index in range(count)] == [*own]
        assert () == run.verify(step).damages


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked twice, or again, because this machine is slow."""
    monkeypatch.setattr(hedging, "READS", Limits(floor_seconds=600))
    monkeypatch.setattr(writers, "POLL_SECONDS", LONG)
    monkeypatch.setattr(uploads, "_OPEN_SECONDS", LONG)
    monkeypatch.setattr(uploads, "_RENEWALS_A_LEASE", 1)


PER_PROCESS = {
    # To join, to check the chunks, and when the writer finishes.
    "read upload": 1,
    "read leaf table": 1,
    "read slot": 1,
    # The chunk. An embedded store trusts its own process that it is whole.
    "write data file": 1,
    "write staging table": 1,
    "write receipt": 1,
    # The commit.
    "read receipt": 1,
    "delete staging table": 1,
    "delete receipt": 1,
}
"""Requests that each process adds to a save, of any number of processes."""

CONSTANT = 40
"""Maximum requests of a save in addition, also to begin it."""


def count_requests(saves: Saves, gcs: FakeGcs, count: int, target: str) -> Counter[str]:
    """Returns the requests of a save, by kind."""
    outcomes = saves.run(ThreadJob(count), target, begin=gcs.clear)
    found = Counter(map(kind_of, gcs.log))
    assert [1] * count == [getattr(each, "step", each) for each in outcomes]
    assert sum(found.values()) <= count * sum(PER_PROCESS.values()) + CONSTANT
    # one commit: the reservation and the commit are the writes of the slot
    expected = {"write manifest": 1, "write slot": 2, "list receipt": 1}
    assert expected == {kind: found[kind] for kind in expected}
    assert 0 == found["write lease"]
    return found


@pytest.mark.emulated
@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("is_served", [False, True])
def test_what_a_save_costs_grows_in_proportion_to_its_processes(
    saves: Saves, gcs: FakeGcs, *, is_served: bool
) -> None:
    found = []
    for count in (9, 17):
        root = gcs_root()
        with ThreadServer(root) as server:
            target = server.address if is_served else root
            found.append(count_requests(saves, gcs, count, target))

    few, many = found
    # Rounded: the stores also look in the background for what is to be collected.
    added = {kind: n for kind in many if (n := round((many[kind] - few[kind]) / 8))}
    expected = dict(PER_PROCESS)
    if is_served:  # one process reads the record and the leaf table
        del expected["read upload"], expected["read leaf table"]
    assert expected == added


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is soon found to be late, but not because this machine is slow."""
    monkeypatch.setattr(writers, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(writers, "LATE_SECONDS", 4.0)


class DeadError(Exception):
    """The process is dead."""


class MortalJob(ThreadJob):
    """A job of which one process dies when it uses the board."""

    def __init__(self, count: int, how: str, key: str, time: int) -> None:
        """The first process that does `how` at a key that ends like this, for the
        `time`-th time in the job, dies, with the effect ("after") or without it."""
        super().__init__(count)
        self.deaths: list[int] = []
        self._how, _, self._when = how.partition(" ")
        self._key, self._time, self._lock = key, time, threading.Lock()

    def act(
        self, process: "MortalProcess", how: str, key: str, act: Callable[[], object]
    ) -> object:
        if process.index in self.deaths:
            raise DeadError
        with self._lock:
            if how == self._how and key.endswith(self._key) and not self.deaths:
                self._time -= 1
                if not self._time:
                    self.deaths.append(process.index)
                    if self._when == "after":
                        act()
                    raise DeadError
        return act()


class MortalProcess(ThreadProcess):
    """A process of such a job."""

    def __init__(self, job: MortalJob, index: int) -> None:
        super().__init__(job, index)
        self._mortal = job

    def post(self, key: str, text: str) -> None:
        self._mortal.act(
            self, "post", key, lambda: super(MortalProcess, self).post(key, text)
        )

    def increment(self, key: str) -> int:
        found = self._mortal.act(
            self, "increment", key, lambda: super(MortalProcess, self).increment(key)
        )
        assert isinstance(found, int)
        return found


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("how", "key", "time"),
    [
        pytest.param(
            "increment", "/finished", 5, id="before-it-counts-that-it-finished"
        ),
        pytest.param(
            "increment after", "/finished", 5, id="before-it-claims-the-commit"
        ),
        pytest.param("post after", "/committer/0", 1, id="before-it-commits"),
        pytest.param("post", "/ended", 1, id="before-it-publishes-the-checkpoint"),
    ],
)
def test_a_process_that_dies_at_the_commit_is_replaced_by_one_other(
    tmp_path: Path, saves: Saves, how: str, key: str, time: int
) -> None:
    job, root = MortalJob(5, how, key, time), tmp_path.as_uri()

    outcomes = saves.run(job, root, process=lambda index: MortalProcess(job, index))

    assert 1 == len(job.deaths)
    died = outcomes.pop(job.deaths[0])
    assert isinstance(died, DeadError)
    check_saved(root, 5, outcomes)
    assert 4 == len(outcomes)
    # each commit writes a key space of its own
    assert 1 == len([*tmp_path.glob("data/*/*/trees/*")])


@pytest.mark.usefixtures("hasty")
def test_a_commit_that_is_late_is_made_by_one_other_process_too(
    tmp_path: Path, saves: Saves
) -> None:
    root = tmp_path.as_uri()

    with failpoints.arm_points("commit.before_record=delay:10@1"):
        outcomes = saves.run(ThreadJob(5), root)

    assert [1] * 5 == [getattr(each, "step", each) for each in outcomes]
    check_saved(root, 5, outcomes)
    assert 2 == len([*tmp_path.glob("data/*/*/trees/*")])


@pytest.mark.usefixtures("hasty")
def test_a_process_that_is_counted_twice_commits_nothing_early(
    tmp_path: Path, saves: Saves
) -> None:
    root, job = tmp_path.as_uri(), ThreadJob(3)

    class Twice(ThreadProcess):
        def increment(self, key: str) -> int:
            if key.endswith("/finished"):
                super().increment(key)
            return super().increment(key)

    outcomes = saves.run(job, root, process=lambda index: Twice(job, index))

    assert [1] * 3 == [getattr(each, "step", each) for each in outcomes]
    check_saved(root, 3, outcomes)


@pytest.mark.usefixtures("hasty")
def test_a_commit_that_is_refused_fails_all_processes_at_once(
    tmp_path: Path, saves: Saves
) -> None:
    root = tmp_path.as_uri()
    with store.connect(root) as client:
        alone = store.Distributed(processes="this")
        client.run(RUN).save(1, {"w": np.arange(3)}, distributed=alone).result()

    outcomes = saves.run(ThreadJob(3), root)

    assert all(isinstance(each, store.StoreError) for each in outcomes), outcomes


def test_the_board_keeps_only_the_last_step_of_each_process(
    tmp_path: Path, saves: Saves
) -> None:
    root, job = tmp_path.as_uri(), ThreadJob(4)
    processes = [job.process(index) for index in range(4)]

    for step in range(1, 4):
        outcomes = saves.run(job, root, step, process=processes.__getitem__)
        check_saved(root, 4, outcomes, step)

    expected = {f"storesvc/steps/{RUN}/{index}": "3" for index in range(4)}
    assert expected == job.board


@pytest.mark.slow
def test_the_coordination_service_of_jax_forgets_what_was_saved(tmp_path: Path) -> None:
    part, target = "tests.support.job_parts:keys_after_saves", tmp_path.as_uri()

    outcomes = run_job(part, 2, devices=1, target=target, steps=3)

    assert [[f"storesvc/steps/{RUN}/{index}" for index in (0, 1)]] * 2 == outcomes
