"""``storectl hub`` prints its address, serves, and ends with Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import COMMAND, refusal

DOWNLOAD = """
from huggingface_hub import hf_hub_download
print(hf_hub_download("prod/llama-8b", "config.json", revision="best"))
"""


@pytest.mark.slow
def test_it_serves_what_hf_endpoint_names(root: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--store", root.as_uri(), "hub", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        settings = dict(each.split("=", 1) for each in line.split()[1:])
        assert ["HF_ENDPOINT", "HF_TOKEN"] == list(settings)
        ran = subprocess.run(
            [sys.executable, "-c", DOWNLOAD],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | settings | {"HF_HOME": str(tmp_path)},
        )
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate(timeout=60)
    finally:
        process.kill()

    assert "llama" in Path(ran.stdout.strip()).read_text()
    assert 0 == process.returncode, notes
    assert f"storectl: hub of {root.as_uri()}; Ctrl-C ends it\n" == notes


def test_rules_that_are_none_are_rejected(root: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text("version = 7\n")

    assert "rules.toml" in refusal(root.as_uri(), "hub", "--map", str(rules))
