"""The README's first screen is what happens: its example and its outputs."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[2] / "README.md"
ROOT = "file:///tmp/ckpts"
MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+\d\d:\d\d"


def blocks(language: str) -> list[str]:
    text = README.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def steady(text: str) -> str:
    """The text with the moment that it was printed at taken out."""
    return re.sub(MOMENT, "MOMENT", text)


def executed(example: str, names: dict[str, Any]) -> str:
    """What an example prints; it finds and leaves names."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), names)
    return printed.getvalue()


def run_session(session: str, root: str) -> int:
    """Runs a session of the command line, and returns how many commands it has."""
    commands = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", session, re.MULTILINE)
    for command, output in commands:
        ran = subprocess.run(
            command.replace("storectl", f"{sys.executable} -m storesvc_client.cli", 1),
            shell=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=os.environ | {"STORECTL_STORE": root},
        )
        assert (0, steady(output)) == (ran.returncode, steady(ran.stdout))
    return len(commands)


@pytest.mark.slow
def test_the_examples_and_the_command_line_print_what_the_readme_shows(
    tmp_path: Path,
) -> None:
    root = tmp_path.as_uri()
    examples = (text.replace(ROOT, root) for text in blocks("python"))
    first, life, telling, models = examples
    looking, changing = (b for b in blocks("console") if "STEP" in b)
    export, _, looking = looking.partition("\n")
    names: dict[str, Any] = {}

    assert executed(first, names).startswith("100 ")
    assert f"$ export STORECTL_STORE={ROOT}" == export
    assert 4 == run_session(looking, root)
    assert executed(life, names).splitlines() == ["12 1048580"] * 2
    assert 9 == run_session(changing, root)
    phases = ["place", "plan", "read", "rebuild", "verify"]
    assert f"1048592 {phases}\n" == executed(telling, names)
    assert executed(models, names).endswith("7 bfloat16\n")


def test_every_command_that_shows_a_promise_exists() -> None:
    text = README.read_text()
    tests = re.findall(r"tests/[\w/]+\.py", text)
    benches = re.findall(r"python -m (tests\.bench\.\w+)", text)

    assert tests
    assert benches
    for test in tests:
        assert (README.parent / test).exists(), test
    for bench in benches:
        assert (README.parent / f"{bench.replace('.', '/')}.py").exists(), bench
