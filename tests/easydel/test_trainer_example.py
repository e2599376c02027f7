"""The example of EasyDeL's trainer, as a user runs it."""

import runpy
import sys
from pathlib import Path

import pytest

import storesvc_client as store

SCRIPT = Path(__file__).parents[2] / "deploy" / "examples" / "easydel_trainer.py"
RUN = "examples/easydel"


def test_the_example_trains_and_resumes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # EasyDeL writes its logs to the working directory
    root = (tmp_path / "store").as_uri()

    def printed(steps: int) -> list[str]:
        options = ["--store", root, "--run", RUN, "--steps", str(steps)]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--save-every", "2"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()
        return [line for line in lines if line.startswith(("trains", "saved"))]

    assert ["trains from step 1", f"saved {RUN}@3"] == printed(3)
    assert ["trains from step 4", f"saved {RUN}@5"] == printed(5)
    with store.connect(root) as client:
        run = client.run(RUN)
        assert [2, 3, 4, 5] == run.steps()
        assert store.KeepLatest(3) == run.retention.get()
