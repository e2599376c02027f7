"""A store keeps exactly what the policies say once its clients have closed it."""

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from tests.support.server_process import ServerProcess


def _save(run: store.Run, count: int, start: int = 0) -> None:
    for step in range(start, start + count):
        run.save(step, {"x": step})
    run.wait()


def _steps(url: str, run: str = "a/b") -> list[int]:
    with store.connect(url) as client:
        return sorted(client.run(run).steps())


def test_a_store_that_is_closed_keeps_what_its_policies_say(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with store.connect(url) as client:
        for name in ("a/b", "a/c"):
            client.run(name).retention.set(store.KeepLatest(3))
            _save(client.run(name), 5)
        late = client.run("a/late")
        _save(late, 4)
        late.retention.set(store.KeepLatest(2))
    assert [[2, 3, 4], [2, 3, 4], [2, 3]] == [
        _steps(url, name) for name in ("a/b", "a/c", "a/late")
    ]

    with store.connect(url) as first, store.connect(url) as second:
        _save(first.run("a/b"), 2, start=5)
        _save(second.run("a/b"), 2, start=7)
    assert [6, 7, 8] == _steps(url)


def test_a_policy_frees_its_steps_without_a_purge_delay(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    with store.connect(url) as client:
        run = client.run("a/b")
        run.retention.set(store.KeepLatest(1), purge_delay=0)
        _save(run, 3)
    with store.connect(url) as client:
        (done,) = client.collect(grace=0)
        assert 2 == done.purged_checkpoint_count
        assert [] == list(client.run("a/b").checkpoints(deleted=True))


_LOOP = """
import sys
import numpy as np
import storesvc_client as store

url, start, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
client = store.connect(url)
with client.run("a/b").loop(
    every=store.Steps(1), keep=store.KeepLatest(3), create=True
) as loop:
    for step in loop.steps(start, start + 9):
        loop.after(step, {"x": np.full(8, step)})
if how == "close":
    client.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_quick_loop_keeps_what_it_was_told_to(tmp_path: Path, how: str) -> None:
    url = f"file://{tmp_path}/store"
    for start in (0, 9):
        subprocess.run([sys.executable, "-c", _LOOP, url, str(start), how], check=True)
        assert [start + 6, start + 7, start + 8] == _steps(url)


@pytest.mark.slow
def test_a_server_that_stops_applies_the_policies_of_its_last_commits(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    with store.connect(server.address) as client:
        run = client.run("a/b")
        run.retention.set(store.KeepLatest(3))
        _save(run, 9)
    server.stop()

    assert [6, 7, 8] == _steps(f"file://{server.root}")


def test_a_loop_sets_the_purge_delay_together_with_its_policy(tmp_path: Path) -> None:
    with store.connect(f"file://{tmp_path}/store") as client:
        run = client.run("a/b")
        every, keep = store.Steps(1), store.KeepLatest(1)
        with run.loop(every=every, keep=keep, purge_delay=0, create=True) as loop:
            for step in loop.steps(0, 2):
                loop.after(step, {"x": step})
        assert timedelta(0) == run.info().purge_delay
        with run.loop(every=every, keep=keep, purge_delay=timedelta(0)):
            pass
        with (
            pytest.raises(store.PreconditionError, match="that of the run, 0:00:00, "),
            run.loop(every=every, keep=keep, purge_delay=60),
        ):
            pass
        with pytest.raises(store.InvalidRequestError, match="together with keep="):
            run.loop(every=every, purge_delay=60)


def test_a_loop_says_what_deleted_checkpoints_cost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "storesvc_client")
    with store.connect(f"file://{tmp_path}/store") as client:
        run = client.run("a/b")
        for step in range(3):
            run.save(step, {"x": np.full(1 << 18, step, np.int32)}).result()
        with run.loop(every=store.Steps(1), keep=store.KeepLatest(1)):
            pass

    assert (
        "keep= of a/b: deleted checkpoints keep 2.0 MiB for 3 days; purge_delay= "
        "changes it"
    ) in caplog.messages


def test_a_loop_without_a_purge_delay_has_no_cost_to_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "storesvc_client")
    with store.connect(f"file://{tmp_path}/store") as client:
        run, every = client.run("a/b"), store.Steps(1)
        with run.loop(
            every=every, keep=store.KeepLatest(1), purge_delay=0, create=True
        ):
            pass

    assert not [line for line in caplog.messages if "deleted checkpoints" in line]
