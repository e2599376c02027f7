"""``on_damage="older"``: the newest checkpoint that is whole, never in silence."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client._job.job import Job
from storesvc_client._restore.joint import Finding, agree_on_damage, find_damage
from tests.support.saved_checkpoint import flip
from tests.support.sessions import send_through_server
from tests.support.thread_job import ThreadJob

RUN = RunName("tests", "older")
PLACES = RunPaths(RUN)
STEPS = (1, 2, 3)


def tree(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, step, np.int32), "step": step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with store.connect(tmp_path.as_uri()) as client:
        for step in STEPS:
            client.run(str(RUN)).save(step, tree(step), base=None).result()
    return tmp_path


@pytest.fixture(params=["direct", pytest.param("streamed", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, root: Path) -> Iterator[store.Run]:
    with store.connect(root.as_uri()) as client:
        if request.param == "streamed":
            send_through_server(client)
        yield client.run(str(RUN))


def damage_record(root: Path, step: int) -> None:
    """Flips a bit of the record of a checkpoint."""
    flip(root / PLACES.checkpoint(step), -1)


def damage_manifest(root: Path, step: int) -> None:
    """Removes the manifest of a checkpoint."""
    manifest_of(root, step).unlink()


def damage_data(root: Path, step: int) -> None:
    """Flips a bit of a chunk of a checkpoint."""
    damage_content(root, np.full(1000, step, np.int32).tobytes())


def damage_content(root: Path, data: bytes) -> None:
    """Flips a bit of stored bytes, which one data file holds."""
    files = (file for file in (root / PLACES.pool).rglob("*") if file.is_file())
    (file,) = (file for file in files if data in file.read_bytes())
    flip(file, file.read_bytes().index(data))


def manifest_of(root: Path, step: int) -> Path:
    with store.connect(root.as_uri()) as client:
        uid = client.run(str(RUN)).checkpoint(step).uid
    (found,) = (root / PLACES.root / "manifests").glob(f"{uid}*")
    return found


DAMAGES = {"record": damage_record, "manifest": damage_manifest, "data": damage_data}
each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


@each_damage
def test_a_damaged_newest_checkpoint_is_an_error_by_default(
    root: Path, run: store.Run, damage: Callable[[Path, int], None]
) -> None:
    damage(root, 3)

    with pytest.raises(store.DataLossError):
        run.restore("latest")
    assert "damage" not in labels(root, 2)


def labels(root: Path, step: int) -> dict[str, str]:
    with store.connect(root.as_uri()) as client:
        return dict(client.run(str(RUN)).checkpoint(step).labels)


@each_damage
def test_the_newest_whole_checkpoint_is_restored_and_the_damage_is_logged(
    root: Path,
    run: store.Run,
    damage: Callable[[Path, int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    damage(root, 3)
    damage(root, 2)

    found = run.restore("latest", on_damage="older")

    assert 1 == found["step"]
    assert np.array_equal(tree(1)["w"], found["w"])
    for step in (2, 3):
        line = f"tests/older@{step} is damaged; the next older checkpoint is tried"
        assert 1 == caplog.text.count(line)


@each_damage
def test_whole_checkpoints_are_restored_as_ever(
    root: Path, run: store.Run, damage: Callable[[Path, int], None]
) -> None:
    damage(root, 2)

    assert 3 == run.restore("latest", on_damage="older")["step"]


@each_damage
def test_the_report_of_a_loop_has_the_damage(
    root: Path, run: store.Run, damage: Callable[[Path, int], None]
) -> None:
    damage(root, 3)

    with run.loop(every=store.Steps(10)) as loop:
        state, start = loop.restore_or(tree(0), on_damage="older")

    assert (2, 3) == (state["step"], start)
    assert loop.restored is not None
    assert loop.restored.report is not None
    (step,) = loop.restored.report.damaged
    assert 3 == step
    assert loop.restored.report.damaged[3]


def test_a_damaged_checkpoint_is_labelled_once(root: Path, run: store.Run) -> None:
    run.update(3, labels={"stage": "warmup"})
    damage_data(root, 3)

    run.restore("latest", on_damage="older")

    found = run.checkpoint(3)
    assert {"stage", "damage"} == set(found.labels)
    assert found.labels["damage"].startswith("tests/older@3 leaf 'w' chunk 0")
    run.restore("latest", on_damage="older")
    assert found.etag == run.checkpoint(3).etag


def test_a_watch_reports_the_label_of_a_damaged_checkpoint(
    root: Path, run: store.Run
) -> None:
    damage_data(root, 3)
    events = run.watch()

    run.restore("latest", on_damage="older")

    event = next(events)
    assert ("updated", 3) == (event.kind, event.step)
    assert event.checkpoint is not None
    assert event.checkpoint.labels["damage"].startswith("tests/older@3 leaf 'w' chunk")
    events.close()


def test_a_label_that_cannot_be_set_does_not_fail_the_restore(
    root: Path, run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    damage_record(root, 3)

    assert 2 == run.restore("latest", on_damage="older")["step"]
    assert "tests/older@3 was not labelled" in caplog.text


@each_damage
def test_without_a_whole_checkpoint_the_error_lists_the_damage(
    root: Path, run: store.Run, damage: Callable[[Path, int], None]
) -> None:
    for step in STEPS:
        damage(root, step)

    with pytest.raises(
        store.DataLossError,
        match=r"tests/older has no whole checkpoint: step 3: .*; step 2: .*; step 1: ",
    ):
        run.restore("latest", on_damage="older")


@pytest.mark.slow
def test_an_error_of_much_damage_describes_three_checkpoints(
    root: Path, run: store.Run
) -> None:
    run.save(4, tree(4)).result()
    run.save(5, tree(5)).result()
    for step in (*STEPS, 4, 5):
        damage_manifest(root, step)

    with pytest.raises(store.DataLossError, match="no whole checkpoint") as caught:
        run.restore("latest", on_damage="older")
    message = str(caught.value)
    assert "step 3: " in message
    assert "step 2: " not in message
    assert message.endswith("; and 2 more, which the log names")


def test_an_open_checkpoint_is_one_whose_manifest_is_whole(
    root: Path, run: store.Run
) -> None:
    damage_manifest(root, 3)
    damage_data(root, 2)

    opened = run.open("latest", on_damage="older")

    assert 2 == opened.info.step
    with pytest.raises(store.DataLossError, match="leaf 'w' chunk 0"):
        opened.restore()
    opened = run.open(1)
    opened.restore()
    assert opened.report is not None
    assert {} == opened.report.damaged


def test_other_errors_do_not_lead_to_an_older_checkpoint(run: store.Run) -> None:
    with pytest.raises(store.MismatchError):
        run.restore("latest", like={"other": np.zeros(3)}, on_damage="older")
    with pytest.raises(store.NotFoundError):
        run.restore("latest", select="other", on_damage="older")


def test_a_checkpoint_that_is_named_is_never_replaced(run: store.Run) -> None:
    run.tags.set("best", 2)
    for which in (3, "best"):
        with pytest.raises(
            store.InvalidRequestError, match="on_damage='older': expected 'latest'"
        ):
            run.restore(which, on_damage="older")
    with pytest.raises(store.InvalidRequestError, match="on_damage=: expected one of"):
        run.restore("latest", on_damage="newer")  # type: ignore[arg-type]


def test_a_run_without_checkpoints_is_an_error(run: store.Run, root: Path) -> None:
    with store.connect(root.as_uri()) as client:
        absent = client.run("tests/absent")
        with pytest.raises(store.NotFoundError, match="tests/absent does not exist"):
            absent.restore("latest", on_damage="older")
        absent.configure(labels={"a": "b"})
        with pytest.raises(store.NotFoundError, match="no committed checkpoint"):
            absent.restore("latest", on_damage="older")


@pytest.mark.slow
def test_a_loop_does_not_save_over_a_damaged_checkpoint(
    root: Path, run: store.Run, caplog: pytest.LogCaptureFixture
) -> None:
    damage_data(root, 3)

    with run.loop(every=store.Steps(3)) as loop:
        state, start = loop.restore_or(tree(0), on_damage="older")
        for step in loop.steps(start, 8):
            save = loop.after(step, state)
            if save is not None:
                save.result()

    assert [1, 2, 3, 4, 6, 7] == run.steps()
    assert 0 == loop.failures
    assert (
        "tests/older@3 is not saved: a damaged checkpoint has this step" in caplog.text
    )


class Batches:
    """A data iterator."""

    at = 0

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.slow
def test_a_damaged_data_iterator_leads_to_an_older_checkpoint(
    run: store.Run, root: Path
) -> None:
    batches = Batches()
    for step in (4, 5):
        batches.at = 1000 + step
        run.save(step, tree(step), items={"data": batches}).result()
    damage_content(root, b'{"at":1005}')
    batches.at = 0

    with (
        pytest.raises(store.DataLossError, match="item 'data'"),
        run.loop(every=store.Steps(10)) as loop,
    ):
        loop.restore_or(tree(0), data=batches)
    assert 0 == batches.at

    with run.loop(every=store.Steps(10)) as loop:
        state, start = loop.restore_or(tree(0), data=batches, on_damage="older")
    assert 5 == start
    assert tree(4)["w"].tobytes() == state["w"].tobytes()
    assert 1004 == batches.at


# In a job: how processes agree.

DAMAGED = store.DataLossError("leaf 'w' chunk 0: damaged")
PEER = store.PeerFailedError("process 1: leaf 'w'")
OTHER = store.UnavailableError("no answer")


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([DAMAGED, PEER], str(DAMAGED)),
        ([PEER, DAMAGED], str(DAMAGED)),
        ([PEER, DAMAGED, OTHER], ""),
        ([PEER, PEER], ""),
        ([OTHER, DAMAGED], ""),
    ],
)
def test_processes_agree_that_damage_ended_a_restore(
    errors: list[store.StoreError], expected: str
) -> None:
    assert expected == find_damage([Finding.from_error(error) for error in errors])

    def part(process: Job) -> str:
        error = errors[process.index]
        return agree_on_damage(process, "x/1", error, seconds=5.0, is_final=False)

    found = ThreadJob(len(errors)).run(part)
    assert [expected] * len(errors) == found


def test_processes_do_not_step_back_from_the_oldest_or_without_a_meeting() -> None:
    def part(process: Job) -> str:
        return agree_on_damage(process, "x/1", DAMAGED, seconds=5.0, is_final=True)

    def unmet(process: Job) -> str:
        return agree_on_damage(process, "", DAMAGED, seconds=5.0, is_final=False)

    assert ["", ""] == ThreadJob(2).run(part)
    assert ["", ""] == ThreadJob(2).run(unmet)


def test_a_process_that_does_not_answer_counts_as_another_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("storesvc_client._restore.joint.LEAST_SECONDS", 0.2)

    def part(process: Job) -> str:
        if process.index == 1:
            return "absent"
        return agree_on_damage(process, "x/1", DAMAGED, seconds=0.0, is_final=False)

    assert ["", "absent", ""] == ThreadJob(3).run(part)
