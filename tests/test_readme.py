"""The README's first screen is what happens: its example and its outputs."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
ROOT = "file:///tmp/ckpts"
MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+\d\d:\d\d"


def blocks(language: str) -> list[str]:
    text = README.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def steady(text: str) -> str:
    """The text with the moment that it was printed at taken out."""
    return re.sub(MOMENT, "MOMENT", text)


def test_the_example_and_the_command_line_print_what_the_readme_shows(
    tmp_path: Path,
) -> None:
    root = tmp_path.as_uri()
    example = blocks("python")[0]
    assert ROOT in example
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example.replace(ROOT, root), "README.md", "exec"), {})
    assert printed.getvalue().startswith("100 ")
    with contextlib.redirect_stdout(printed):
        models = "import storesvc_client as store\n" + blocks("python")[1]
        exec(compile(models.replace(ROOT, root), "README.md", "exec"), {})
    assert printed.getvalue().endswith("\n7 bfloat16\n")

    (session,) = [b for b in blocks("console") if "STORECTL_STORE" in b]
    first, *commands = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", session, re.MULTILINE)
    assert f"export STORECTL_STORE={ROOT}" == first[0]
    assert 4 == len(commands)
    for command, output in commands:
        ran = subprocess.run(
            command.replace("storectl", f"{sys.executable} -m storesvc_client.cli", 1),
            shell=True,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"STORECTL_STORE": root},
        )
        assert steady(output) == steady(ran.stdout)


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
