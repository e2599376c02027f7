"""The training script of the examples, as a pod of a Job runs it."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import storesvc_client as store
from tests.support.sockets import free_port

SCRIPT = Path(__file__).parents[2] / "deploy" / "examples" / "train.py"
RUN = "examples/train"


def options(root: Path, *, steps: int) -> list[str]:
    return [
        *("--store", root.as_uri(), "--run", RUN),
        *("--steps", str(steps), "--save-every", "2"),
    ]


def as_a_pod(root: Path, *, steps: int) -> list[str]:
    """Returns the output of the only pod of a Job."""
    pod = {
        "JOB_COMPLETION_INDEX": "0",
        "PROCESSES": "1",
        "COORDINATOR": f"127.0.0.1:{free_port()}",
    }
    ran = subprocess.run(
        [sys.executable, SCRIPT, *options(root, steps=steps)],
        env=os.environ | pod,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ran.stdout.splitlines()


def alone(root: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options(root, steps=steps)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def losses(root: Path) -> dict[int, float]:
    with store.connect(root.as_uri()) as client:
        found = client.run(RUN).checkpoints()
        return {checkpoint.step: checkpoint.metrics["loss"] for checkpoint in found}


def test_a_pod_resumes_where_another_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    alone(whole, monkeypatch, steps=5)
    alone(parts, monkeypatch, steps=3)

    output = as_a_pod(parts, steps=5)

    assert "resumes at step 3" in output
    assert [5, 4, 2] == list(losses(whole))
    assert [5, 4, 3, 2] == list(losses(parts))
    for step, loss in losses(whole).items():
        assert losses(parts)[step] == pytest.approx(loss, rel=1e-6)
