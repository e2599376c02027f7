"""Restores by all processes of a job: equal results, and every byte is read once."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import storesvc_client as store
from tests.support import job_parts
from tests.support.jax_job import run_job
from tests.support.saved_checkpoint import flip

pytestmark = pytest.mark.slow


def save_by_one(target: str) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("row", "column"))
    with store.connect(target) as client:
        client.run(job_parts.RUN).save(1, job_parts.state_on(mesh)).result()


def test_processes_restore_together_or_report_the_absent_process(
    tmp_path: Path,
) -> None:
    target, size = tmp_path.as_uri(), job_parts.state_bytes()
    save_by_one(target)

    results = run_job(
        "tests.support.job_parts:reads", 4, devices=2, target=target, rows=2, columns=4
    )

    assert [1] * 4 == [each["jobs"] for each in results]
    assert [[]] * 4 == [each["wrong"] for each in results]
    spread, each_its_own, by_default = zip(
        *(each["read_bytes"] for each in results), strict=True
    )
    assert size <= sum(spread) <= 1.02 * size
    assert sum(each_its_own) > 3 * size
    assert each_its_own == by_default  # from a disk of this machine
    assert [1] * 4 == [each["latest"] for each in results]
    absent, otherwise, too_late, not_at_all = zip(
        *(each["errors"] for each in results), strict=True
    )
    assert all("NotFoundError" in each for each in absent), absent
    assert all("process 1" in each for each in otherwise), otherwise
    assert all("other leaves" in each for each in otherwise), otherwise
    assert "" == not_at_all[1]
    missing = [not_at_all[at] for at in (0, 2, 3)]
    assert all("process 1" in each for each in missing), missing
    assert all("has not called it" in each for each in missing), missing
    late, others = too_late[1], [too_late[at] for at in (0, 2, 3)]
    assert late.startswith("UnavailableError"), late
    assert all(each.startswith("PeerFailedError") for each in others), others
    for each in too_late:
        assert "data files are missing" in each
    assert all("job: process 1" in each for each in others), others


def test_the_buffers_of_a_spread_restore_fit_into_the_budget(tmp_path: Path) -> None:
    """Each leaf has three chunks, and each of four processes needs a quarter of it: the
    second and the third one exchange it with two others, one after the other."""
    three = Mesh(np.array(jax.devices()[:3]).reshape(3, 1), ("row", "column"))
    with store.connect(tmp_path.as_uri()) as client:
        client.run(job_parts.RUN).save(1, job_parts.rows_on(three)).result()

    results = run_job(
        "tests.support.job_parts:reads_in_stages",
        4,
        devices=2,
        target=tmp_path.as_uri(),
        budgets=[1, 7 << 20, 1 << 30],
    )

    assert [[]] * 4 == [each["wrong"] for each in results]
    leaf_by_leaf, in_stages, at_once = zip(
        *(each["peaks"] for each in results), strict=True
    )
    assert [3 << 20] * 4 == list(leaf_by_leaf)
    assert max(in_stages) <= 7 << 20
    assert 30 << 20 == at_once[1] == at_once[2]


def test_a_process_that_cannot_read_its_share_is_reported_to_all(
    tmp_path: Path,
) -> None:
    target = tmp_path.as_uri()
    save_by_one(target)
    files = [path for path in tmp_path.rglob("pool/**/*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    flip(largest, 1000)

    results = run_job(
        "tests.support.job_parts:reads_damaged", 3, devices=1, target=target
    )

    readers = [each for each in results if each.startswith("DataLossError")]
    others = [each for each in results if each.startswith("PeerFailedError")]
    assert 1 == len(readers), results
    assert 2 == len(others), results
    assert all("could not read its share" in each for each in others)
    assert all("its stored bytes are corrupt" in each for each in results)


def test_a_spread_restore_by_one_process_of_a_job_alone_is_rejected(
    tmp_path: Path,
) -> None:
    results = run_job(
        "tests.support.job_parts:spreads_alone", 2, devices=1, target=tmp_path.as_uri()
    )

    for opened_alone, restored_alone, apart in results:
        assert "InvalidRequestError: restore of" in opened_alone
        assert "with Distributed(processes='all')" in restored_alone
        assert "" == apart
