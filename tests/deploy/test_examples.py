"""The examples: a Job's pods train together, and resume from what they saved."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import storesvc_client as store
from tests.conftest import gcs_root
from tests.deploy.manifests import DEPLOY, jobs_of, read
from tests.fake_gcs import FakeGcs
from tests.support.sockets import free_port

EXAMPLES = DEPLOY / "examples"
PODS = 2
SECONDS = 120


def container_of(example: str) -> Any:
    """The container of the pods of an example."""
    (found,) = (o for o in read(EXAMPLES / example) if o["kind"] in ("Job", "JobSet"))
    (job,) = jobs_of(found) if found["kind"] == "JobSet" else [found]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    completions = str(job["spec"]["completions"])
    assert completions == variables_of(container)["PROCESSES"]
    return container


def variables_of(container: Any) -> dict[str, str]:
    """Returns the environment of a container."""
    return {entry["name"]: entry["value"] for entry in container["env"]}


def run_pods(container: Any, root: str, place: Path, *, steps: int) -> list[list[str]]:
    """Runs pods as processes of this machine, and returns what each printed."""
    program, script, *options = container["command"]
    assert "python" == program
    (stored,) = (option for option in options if option.startswith("--store="))
    options[options.index(stored)] = f"--store={root}"
    variables = variables_of(container) | {
        "COORDINATOR": f"127.0.0.1:{free_port()}",
        "PROCESSES": str(PODS),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    command = [
        *(sys.executable, str(EXAMPLES / Path(script).name), *options),
        *("--steps", str(steps), "--save-every", "2"),
    ]
    logs = [place / f"pod-{index}" for index in range(PODS)]
    with ExitStack() as stack:
        pods = []
        for index, log in enumerate(logs):
            pod = subprocess.Popen(
                command,
                env=os.environ | variables | {"JOB_COMPLETION_INDEX": str(index)},
                stdout=stack.enter_context(log.open("w")),
            )
            stack.callback(pod.wait)
            stack.callback(pod.kill)
            pods.append(pod)
        assert [0] * PODS == [pod.wait(SECONDS) for pod in pods]
    return [log.read_text().splitlines() for log in logs]


def test_a_jobset_runs_what_a_job_runs() -> None:
    job, jobset = container_of("job.yaml"), container_of("jobset.yaml")

    assert job["command"] == jobset["command"]
    assert variables_of(job).keys() == variables_of(jobset).keys()


def test_the_pods_of_a_job_save_together_and_resume_together(
    gcs: FakeGcs, tmp_path: Path
) -> None:
    del gcs
    container, root = container_of("job.yaml"), gcs_root()
    run_pods(container, root, tmp_path, steps=2)

    outputs = run_pods(container, root, tmp_path, steps=4)

    assert all("resumes at step 2" in lines for lines in outputs)
    with store.connect(root) as client:
        run = client.run("examples/train")
        assert [4, 2] == [found.step for found in run.checkpoints()]
        assert run.verify(4).ok
