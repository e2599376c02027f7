"""deploy/README.md: its commands are valid, and the storectl commands work."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.group import COMMANDS
from tests.support.command_line import storectl
from tests.support.contract import Writer
from tests.support.document_blocks import blocks_of, check_names
from tests.support.server_process import ServerProcess
from tests.support.storectl_lines import check_line

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "deploy" / "README.md"
TEXT = GUIDE.read_text()
RUN = "prod/llama-8b"
ROOTS = re.compile(r"gs://(BUCKET|BACKUP|NEW)/ckpts")
FORWARDED = "localhost:7070"
NOT_RUN = {
    "docker": "a daemon; tests/deploy checks the Dockerfile and the install lines",
    "gcloud": "a project of Google Cloud",
    "kubectl": "a cluster; tests/deploy renders and validates the manifests",
    "openssl": "tests/deploy/test_certificates.py runs these",
}
"""Programs of the guide that these tests do not run, and why."""


def lines() -> list[str]:
    """The command lines of the guide, in its order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def lines_of(program: str) -> Iterator[list[str]]:
    """Yields the arguments of a program in these lines."""
    for line in lines():
        if line.startswith(f"{program} "):
            yield shlex.split(line)[1:]


@pytest.fixture
def served(server: ServerProcess) -> ServerProcess:
    """A server of a store with the checkpoints that the guide names."""
    with store.connect(server.address) as client:
        run = client.run(RUN)
        for step in (100, 200, 300):
            run.save(step, {"x": np.full(1000, step)}).result()
    return server


@pytest.mark.slow
def test_the_commands_of_the_guide_work_one_after_the_other(
    served: ServerProcess, tmp_path: Path
) -> None:
    places = {name: (tmp_path / name).as_uri() for name in ("BACKUP", "NEW")}
    places["BUCKET"] = served.address
    upload = Writer(served.address, RUN, 400).begin().name.rpartition("/")[2]
    for line in lines_of("storectl"):
        words = [upload if word == "UPLOAD" else word for word in line]
        words = [ROOTS.sub(lambda found: places[found[1]], word) for word in words]
        target = served.address
        if words[0] == "--store":
            assert words[1] in (*places.values(), FORWARDED)
            if words[1] != FORWARDED:
                target = words[1]
            words = words[2:]
        while words[0] in ("--ca", "--token-file"):  # this server needs neither
            words = words[2:]

        result = storectl(target, *words)

        assert 0 == result.exit_code, (words, result.output)
    with store.connect(served.address) as client:
        run = client.run(RUN)
        assert [200, 100] == [found.step for found in run.checkpoints()]
        assert "ended" == run.uploads.get(upload).state


def test_every_program_of_the_guide_is_run_or_listed() -> None:
    programs = {line.split()[0] for line in lines()}

    assert {"storectl", *NOT_RUN} == programs


def test_every_storectl_command_in_the_text_is_valid() -> None:
    inline = re.findall(r"`storectl ([^`]+)`", TEXT)

    assert inline
    for line in inline:
        if " " in line:
            check_line(shlex.split(line))
        else:  # it speaks of the command
            assert line in COMMANDS


def test_files_that_the_guide_names_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    files = re.findall(r"(?<![\w/])deploy/[\w./-]+", "\n".join(lines()))
    benches = re.findall(r"python -m benchmarks (\w+)", TEXT)

    assert all((links, files, benches))
    for link in links:
        assert (GUIDE.parent / link).exists(), link
    for file in files:
        assert (ROOT / file).exists(), file
    for bench in benches:
        assert (ROOT / "benchmarks" / f"{bench}.py").exists(), bench


def test_each_program_in_the_text_uses_what_exists() -> None:
    programs = [block for block in blocks_of(GUIDE) if block.language == "python"]

    assert programs
    for block in programs:
        check_names(ast.parse(block.text))
