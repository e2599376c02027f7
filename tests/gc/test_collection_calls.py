"""Collection through a real client and a real server."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.catalog.rollbacks import RESERVE_BYTES
from storesvc.failpoints import VARIABLE
from storesvc.format import layout
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from tests.support.collecting_process import NOW
from tests.support.server_process import EndedError, ServerProcess


def tree(version: int) -> dict[str, Any]:
    return {
        "frozen": np.arange(1_000_000, dtype=np.float32),
        "step": np.full(1000, version, np.int32),
    }


def files_below(server: ServerProcess, run: store.Run) -> list[Path]:
    root = server.root / RunPaths(RunName.parse(run.name)).root
    return [path for path in root.rglob("*") if path.is_file()]


def assert_whole(run: store.Run, *steps: int) -> None:
    assert list(steps) == [c.step for c in run.checkpoints()]
    for step in steps:
        found = run.restore(step)
        for key, array in tree(step).items():
            assert array.tobytes() == np.asarray(found[key]).tobytes()


@pytest.mark.slow
def test_a_client_frees_what_nothing_shares(
    client: store.Client, run: store.Run, server: ServerProcess
) -> None:
    for step in range(4):
        run.save(step, tree(step)).result()
    size = sum(path.stat().st_size for path in files_below(server, run))
    for step in (0, 1, 2):
        run.delete(step, purge_delay=NOW)

    (reported,) = client.collect(run.name, grace=NOW, dry_run=True)
    assert (3, 0) == (reported.purged_checkpoint_count, reported.deleted_object_count)
    assert size <= sum(path.stat().st_size for path in files_below(server, run))
    (done,) = client.collect(run.name, grace=NOW)

    assert (run.name, 3) == (done.run, done.purged_checkpoint_count)
    assert reported.garbage_object_count == done.deleted_object_count > 6
    assert "" == done.postponed
    assert_whole(run, 3)
    left = sum(path.stat().st_size for path in files_below(server, run))
    assert left < size - 2 * 4000
    run.save(4, tree(4)).result()
    assert_whole(run, 4, 3)


def test_a_client_collects_all_runs_of_a_namespace(client: store.Client) -> None:
    for name in ("gcns/a", "gcns/b"):
        client.run(name).save(0, tree(0)).result()

    assert ["gcns/a", "gcns/b"] == [one.run for one in client.collect("gcns")]
    assert {"gcns/a", "gcns/b"} <= {one.run for one in client.collect(dry_run=True)}


def test_a_run_or_a_grace_that_there_is_not_is_rejected(client: store.Client) -> None:
    with pytest.raises(store.NotFoundError, match="absent/nothing"):
        list(client.collect("absent/nothing"))
    with pytest.raises(store.InvalidRequestError, match="grace"):
        list(client.collect(grace=timedelta(seconds=-1)))
    with pytest.raises(store.InvalidRequestError, match="namespace"):
        client.collect("No Namespace")


@pytest.mark.slow
def test_retention_is_applied_soon_after_a_commit(
    start_server: Callable[[], ServerProcess],
) -> None:
    client = store.connect(start_server().address)
    run = client.run("tests/retention")
    run.retention.set(store.KeepLatest(1))
    for step in range(3):
        run.save(step, tree(step)).result()

    deadline = datetime.now(UTC) + timedelta(seconds=30)
    while len(list(run.checkpoints())) > 1:
        assert datetime.now(UTC) < deadline
    assert_whole(run, 2)
    client.close()


def test_an_embedded_store_keeps_a_reserve(tmp_path: Path) -> None:
    with store.connect(tmp_path.as_uri()):
        assert RESERVE_BYTES == (tmp_path / layout.RESERVE).stat().st_size


@pytest.mark.slow
def test_a_server_does_all_that_by_itself(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server("--gc-interval", "1s")
    with store.connect(server.address) as client:
        run = client.run("tests/alone")
        run.save(0, tree(0)).result()
        run.save(1, tree(1)).result()
        run.delete(0, purge_delay=NOW)
        deadline = datetime.now(UTC) + timedelta(seconds=30)
        while run.usage().deleted_checkpoint_count:
            assert datetime.now(UTC) < deadline
        assert_whole(run, 1)
    assert 0 == server.stop()
    assert not (server.root / layout.COLLECTOR).exists()


@pytest.mark.slow
def test_an_interval_below_zero_is_rejected(
    start_server: Callable[..., ServerProcess],
) -> None:
    with pytest.raises(EndedError):
        start_server("--gc-interval", "-1s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "fates"),
    [
        ("raise", ["failed", "failed", "failed", "left", "left"]),
        ("raise@2", ["done", "failed", "done", "done", "done"]),
    ],
    ids=["all", "one"],
)
def test_a_collection_leaves_the_rest_once_the_storage_answers_no_more(
    start_server: Callable[..., ServerProcess], fault: str, fates: list[str]
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        names = [f"down/run-{number}" for number in range(5)]
        for name in names:
            client.run(name).configure(labels={"a": "b"})
        server.kill()
        server.environment[VARIABLE] = f"collect.before_list={fault}"
        server.start()

        reported = list(client.collect("down", grace=NOW))

    assert names == [done.run for done in reported]
    assert fates == [_fate(done.postponed) for done in reported]


def _fate(postponed: str) -> str:
    if "collect again" in postponed:
        return "left"
    return "failed" if postponed else "done"
