"""``CheckpointManager`` in a job of several processes."""

from pathlib import Path

import pytest

from tests.support.jax_job import run_job


@pytest.mark.slow
def test_two_processes_save_and_restore_one_step(tmp_path: Path) -> None:
    target = f"{(tmp_path / 'store').as_uri()}#prod/llama"

    found = run_job(
        "tests.support.orbax_parts:saves_and_restores", 2, devices=2, target=target
    )

    for each in found:
        assert each["saved"] == [True] * 3
        assert each["steps"] == each["read"] == [2, 3]
        assert (each["latest"], each["meta"], each["step"]) == (3, {"at": 3}, 3)
        assert each["is_split"]
    shards = sorted(shard for each in found for shard in each["shards"])
    assert shards == [
        [start, [float(start + i) for i in range(4)]] for start in (0, 4, 8, 12)
    ]
