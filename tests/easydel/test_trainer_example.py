"""The example of EasyDeL's trainer, as a user runs it: killed, and run again."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

import storesvc_client as store
from tests.support.server_process import ServerProcess

SCRIPT = Path(__file__).parents[2] / "deploy" / "examples" / "easydel_trainer.py"
RUN = "examples/easydel"
START_SECONDS = 120

LAUNCH = """
import runpy, sys
import tests.easydel  # as in this process: easydel needs no torch
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_example_is_killed_and_resumes_at_its_newest_checkpoint(
    server: ServerProcess,
    client: store.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # EasyDeL writes its logs to the working directory
    options = ["--store", server.address, "--run", RUN, "--save-every", "2"]
    run = client.run(RUN)
    command = [sys.executable, "-W", "ignore", "-c", LAUNCH, str(SCRIPT), *options]
    with (tmp_path / "output").open("wb") as output:
        training = subprocess.Popen(
            [*command, "--steps", "1000"],
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    try:
        ends = time.monotonic() + START_SECONDS
        while (run.latest_step() or 0) < 4:
            text = (tmp_path / "output").read_text(errors="replace")
            assert training.poll() is None, text[-4000:]
            assert time.monotonic() < ends, text[-4000:]
            time.sleep(0.02)
    finally:
        training.kill()
        training.wait()

    saved = run.latest_step()
    assert saved is not None
    last = saved + 3
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--steps", str(last)])
    runpy.run_path(str(SCRIPT), run_name="__main__")

    lines = capsys.readouterr().out.splitlines()
    printed = [line for line in lines if line.startswith(("trains", "saved"))]
    assert [f"trains from step {saved + 1}", f"saved {RUN}@{last}"] == printed
    assert last == run.latest_step()
    assert store.KeepLatest(3) == run.retention.get()
