"""Copies between stores: every byte, once, with everything that a checkpoint has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc_client._api.run import run_copy
from storesvc_client._restore.open_tree import get_reader
from tests.conftest import gcs_root, s3_root
from tests.fake_gcs import FakeGcs
from tests.fake_s3 import FakeS3
from tests.support.saved_checkpoint import flip

TABLE = np.arange(3_000_000, dtype=np.float32)


def tree_of(step: int) -> dict[str, Any]:
    return {
        "params": {"kernel": np.arange(33 * 17.0).reshape(33, 17), "table": TABLE},
        "empty": [np.zeros((0, 3)), None, ()],
        "name": "adam",
        "step": step,
    }


def largest_file(root: Path, run: store.Run) -> Path:
    """Returns the largest data file of a run."""
    pool = root / RunPaths(RunName.parse(run.name)).pool
    files = (file for file in pool.rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


def damage(file: Path) -> None:
    """Flips a bit in the middle of a file."""
    flip(file, file.stat().st_size // 2)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[store.Run]:
    """A run of another store, which does not exist yet."""
    with store.connect((tmp_path / "lab").as_uri()) as client:
        yield client.run("lab/copy")


@pytest.fixture
def prod(run: store.Run) -> store.Run:
    """A run with the steps 100 and 200."""
    for step in (100, 200):
        run.save(
            step,
            tree_of(step),
            metrics={"loss": 1 / step},
            labels={"team": "a"},
            items={"config": {"layers": step}},
        ).result()
    run.tags.set("best", 100, protected=True)
    run.update(200, pinned=True)
    run.configure(labels={"owner": "b"}, purge_delay=60)
    return run


def test_a_copy_has_all_that_its_source_has(prod: store.Run, lab: store.Run) -> None:
    done = prod.copy_to(lab)

    assert [100, 200] == lab.steps() == [one.checkpoint.step for one in done]
    for step in lab.steps():
        ours, theirs = prod.checkpoint(step), lab.checkpoint(step)
        manifests = [get_reader(run.open(step)).manifest for run in (prod, lab)]
        assert manifests[0].tree == manifests[1].tree
        assert (
            manifests[0].sums.digests.tobytes() == manifests[1].sums.digests.tobytes()
        )
        assert {"layers": step} == lab.items(step)["config"]
        assert ours.metrics == theirs.metrics
        assert ours.pinned == theirs.pinned
        assert {
            "team": "a",
            "copy.uid": ours.uid,
            "copy.create_time": ours.create_time.isoformat(),
        }.items() <= theirs.labels.items()
        assert f"{prod.name}@{step}" == theirs.labels["copy.url"].partition("//")[2]
        assert lab.verify(step).ok
    restored, expected = lab.restore(100), tree_of(100)
    assert ("adam", 100) == (restored["name"], restored["step"])
    assert [None, ()] == restored["empty"][1:]
    assert TABLE.tobytes() == np.asarray(restored["params"]["table"]).tobytes()
    assert expected["params"].keys() == restored["params"].keys()
    (tag,) = lab.tags.list()
    assert ("best", 100, True) == (tag.name, tag.step, tag.protected)
    assert prod.info().labels == lab.info().labels
    assert prod.info().purge_delay == lab.info().purge_delay


@pytest.mark.slow
def test_a_second_copy_moves_nothing(prod: store.Run, lab: store.Run) -> None:
    prod.copy_to(lab)

    again = prod.copy_to(lab)

    assert [(False, 0)] * 2 == [(done.is_new, done.sent_bytes) for done in again]


@pytest.mark.slow
def test_chunks_that_the_target_has_are_not_read(
    prod: store.Run, lab: store.Run, server: Any
) -> None:
    prod.copy_to(lab, steps=[100])
    damage(largest_file(server.root, prod))

    (done,) = prod.copy_to(lab, steps=[200])

    assert done.sent_bytes < 1000
    assert done.checkpoint.stored_bytes - done.sent_bytes == done.reused_bytes


@pytest.mark.slow
def test_a_copy_of_a_copy_is_known_where_it_came_from(
    prod: store.Run, lab: store.Run, client: store.Client
) -> None:
    prod.copy_to(lab)
    third = client.run(f"{prod.name}-third")
    lab.copy_to(third)

    assert [False, False] == [done.is_new for done in lab.copy_to(prod)]
    assert [False, False] == [done.is_new for done in prod.copy_to(third)]


@pytest.mark.slow
def test_a_step_with_another_origin_is_not_replaced(
    prod: store.Run, lab: store.Run
) -> None:
    lab.save(200, {"own": np.ones(3)}).result()

    with pytest.raises(store.AlreadyExistsError, match="another origin"):
        prod.copy_to(lab)
    assert [200] == lab.steps()
    prod.copy_to(lab, steps=[100])
    assert [100, 200] == lab.steps()


def test_a_tag_of_the_target_moves_only_on_request(
    prod: store.Run, lab: store.Run
) -> None:
    prod.copy_to(lab, tags=False)
    lab.tags.set("best", 200, protected=True)

    with pytest.raises(store.PreconditionError, match=r"best \(step 200 there"):
        prod.copy_to(lab)
    assert 200 == lab.checkpoint("best").step
    prod.copy_to(lab, move_tags=True)
    assert 100 == lab.checkpoint("best").step


@pytest.mark.slow
def test_the_retention_policy_is_copied_on_request(
    prod: store.Run, lab: store.Run
) -> None:
    policy = store.KeepLatest(3)
    prod.retention.set(policy)

    prod.copy_to(lab)
    assert lab.retention.get() is None
    prod.copy_to(lab, retention=True)
    assert policy == lab.retention.get()


def test_a_damaged_chunk_is_not_copied(
    prod: store.Run, lab: store.Run, server: Any
) -> None:
    damage(largest_file(server.root, prod))

    with pytest.raises(store.DataLossError, match="params/table"):
        prod.copy_to(lab, steps=[100])
    assert [] == lab.steps()


@pytest.mark.slow
def test_an_interrupted_copy_is_resumed(prod: store.Run, lab: store.Run) -> None:
    next(run_copy(prod, lab).checkpoints(None))

    assert [False, True] == [done.is_new for done in prod.copy_to(lab)]


@pytest.mark.slow
@pytest.mark.emulated
def test_a_run_is_copied_from_bucket_to_bucket(
    prod: store.Run, gcs: FakeGcs, s3: FakeS3
) -> None:
    with store.connect(gcs_root()) as google, store.connect(s3_root(s3)) as other:
        first, second = google.run("a/b"), other.run("c/d")
        prod.copy_to(first)
        done = first.copy_to(second)

        assert [True, True] == [one.is_new for one in done]
        assert second.verify(200).ok
        assert prod.checkpoint(200).uid == second.checkpoint(200).labels["copy.uid"]
        table = second.restore(200)["params"]["table"]
        assert TABLE.tobytes() == np.asarray(table).tobytes()


def test_a_run_is_not_copied_to_itself(prod: store.Run) -> None:
    with pytest.raises(store.InvalidRequestError, match="the same one"):
        prod.copy_to(prod)


def test_a_run_or_step_that_is_missing_is_rejected(
    prod: store.Run, lab: store.Run
) -> None:
    with pytest.raises(store.NotFoundError, match="no checkpoint at step 7"):
        prod.copy_to(lab, steps=[7])
    with pytest.raises(store.NotFoundError):
        lab.copy_to(prod)
