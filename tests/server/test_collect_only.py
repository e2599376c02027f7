"""A process that only collects."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import storesvc_client as store
from storesvc_client.cli.commands.serve import serve


@pytest.mark.slow
def test_a_process_that_only_collects_purges_what_others_delete(tmp_path: Path) -> None:
    with store.connect(tmp_path, collect=False) as client:
        run = client.run("tests/collected")
        for step in range(2):
            run.save(step, {"x": np.full(9, step)}).result()
        run.configure(purge_delay=0)
        run.delete(0)
        assert 1 == run.usage().deleted_checkpoint_count
        options = ("--root", str(tmp_path), "--collect-only", "--gc-interval", "0.2s")
        collector = subprocess.Popen(
            [sys.executable, "-m", "storesvc_client.cli", "serve", *options],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            end = time.monotonic() + 60
            while run.usage().deleted_checkpoint_count:
                assert time.monotonic() < end
                time.sleep(0.1)
        finally:
            collector.terminate()
            log = collector.communicate(timeout=60)[1]
        assert [1] == run.steps()

    assert 0 == collector.returncode
    assert f"collecting {tmp_path.as_uri()} every 0:00:00.2" in log


@pytest.mark.parametrize(
    "options", [["--host", "0.0.0.0"], ["--port", "1"], ["--gc-interval", "0s"]]
)
def test_options_for_callers_are_rejected(options: list[str]) -> None:
    rest = ["--root", "memory://", "--collect-only", *options]

    result = CliRunner().invoke(serve, rest)

    assert 2 == result.exit_code
    assert "--collect-only" in result.output
