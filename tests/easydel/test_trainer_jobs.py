"""EasyDeL's trainer in the processes of a ``jax.distributed`` job."""

from pathlib import Path

import pytest

import storesvc_client as store
from tests.easydel.trainer_jobs import PREEMPTED_AT
from tests.support import jax_job
from tests.support.jax_job import run_job
from tests.support.server_process import ServerProcess

PARTS = "tests.easydel.trainer_jobs"
RUN = "tests/job"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing easydel in several processes takes longer than other jobs."""
    monkeypatch.setattr(jax_job, "SECONDS", 500)


@pytest.mark.slow
def test_the_first_process_decides_when_time_is_due_and_all_resume(
    server: ServerProcess, client: store.Client, tmp_path: Path
) -> None:
    first, second = run_job(
        f"{PARTS}:saves_by_time",
        2,
        devices=4,
        target=server.address,
        run=RUN,
        folder=str(tmp_path),
    )

    assert first == second
    assert [[1, 2], [3, 4]] == [outcome["trained"] for outcome in first]
    assert [1, 2, 3, 4] == client.run(RUN).steps()


@pytest.mark.slow
def test_a_preempted_job_saves_the_same_step_in_all_processes_and_ends(
    server: ServerProcess, client: store.Client, tmp_path: Path
) -> None:
    run = "tests/preempted"

    outcomes = run_job(
        f"{PARTS}:is_preempted",
        2,
        devices=4,
        target=server.address,
        run=run,
        folder=str(tmp_path),
    )

    step = client.run(run).latest_step()
    assert step is not None
    assert PREEMPTED_AT <= step < 500
    for outcome in outcomes:
        assert list(range(1, step + 1)) == outcome["trained"]
        assert f"{run}@{step}" == outcome["path"]
        assert [step] == outcome["committed"]
