"""deploy/README.md: its commands work one after the other, and print what it shows."""

import ast
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli import main
from storesvc_client.cli.group import COMMANDS
from tests.repo.test_readme import anchor
from tests.support.command_line import storectl
from tests.support.contract import Writer
from tests.support.document_blocks import blocks_of, check_names, steady
from tests.support.saved_checkpoint import flip
from tests.support.server_process import ServerProcess
from tests.support.storectl_lines import check_line

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "deploy" / "README.md"
TEXT = GUIDE.read_text()
RUN = "prod/llama-8b"
ROOTS = re.compile(r"gs://(BUCKET|BACKUP|NEW)/ckpts")
NOT_RUN = {
    "docker": "a daemon; tests/deploy checks the Dockerfile and the install lines",
    "gcloud": "a project of Google Cloud",
    "kubectl": "a cluster; tests/deploy renders and validates the manifests",
}
"""Programs of the guide that are not run, and what they need."""
RUN_ELSEWHERE = {
    "kubectl kustomize": "tests/deploy/test_manifests.py",
    "openssl": "tests/deploy/test_certificates.py",
    "promtool": "tests/deploy/test_monitoring.py",
}
"""Programs whose output another file compares."""
STEP = re.compile(
    r"^#{2,3} (?P<heading>[^\n]+)$"
    r"|^```sh\n(?P<lines>[^`]*)^```\n\n```text\n(?P<output>[^`]*)^```$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A block of commands, and what the guide shows that it prints."""

    heading: str
    lines: list[str]
    output: str

    @property
    def programs(self) -> set[str]:
        """Programs of its lines."""
        pattern = r"kubectl kustomize|\S+"
        return {found[0] for line in self.lines if (found := re.match(pattern, line))}


def steps() -> list[Step]:
    """Returns the steps of the guide, in its order."""
    found, heading = [], ""
    for part in STEP.finditer(TEXT):
        heading = part["heading"] or heading
        if lines := part["lines"]:
            found.append(
                Step(heading=heading, lines=lines.splitlines(), output=part["output"])
            )
    return found


def step_with(program: str) -> Step:
    """Returns the only step that runs a program."""
    (found,) = (step for step in steps() if program in step.programs)
    return found


def lines() -> list[str]:
    """Returns the command lines of the guide."""
    return [line for step in steps() for line in step.lines]


def without_ids(text: str) -> str:
    """Returns the text without what differs from one store to the next."""
    text = re.sub(r"\b[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}\b", "ID", text)
    # Two seconds after a policy was set, the server deletes what a collection would.
    text = re.sub(r"(?m)^(prod/llama-8b {8}0 {8})[01] ", r"\1DELETED ", text)
    text = re.sub(r"(?m)^(localhost|127\.0\.0\.1):\d+(?=: store)", "ADDRESS", text)
    return steady(
        re.sub(r"(?m)storesvc [\d.]+\d(\.dev\d+)?$", "storesvc VERSION", text)
    )


class Operator:
    """Runs the storectl commands of the guide on a store that is used as it says."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self._server = server
        self._places = {name: (folder / name).as_uri() for name in ("BACKUP", "NEW")}
        self._places["BUCKET"] = server.address
        self.upload = ""
        self.failed: list[str] = []

    def train(self) -> None:
        """Saves three steps, and begins a fourth."""
        with store.connect(self._server.address) as client:
            run = client.run(RUN)
            for step in (100, 200, 300):
                run.save(step, {"x": np.full(1000, step)}).result()
        writer = Writer(self._server.address, RUN, 400)
        self.upload = writer.begin().name.rpartition("/")[2]

    def damage(self) -> None:
        """Flips a bit of the newest step in its largest data file."""
        with store.connect(self._server.address) as client:
            uid = client.run(RUN).checkpoint(300).uid
        files = self._server.root.glob(f"data/{RUN}/pool/{uid}/*")
        flip(max(files, key=lambda file: file.stat().st_size), 100)

    def run(self, line: str) -> str:
        """Returns the output of a line."""
        words = [
            ROOTS.sub(lambda found: self._places[found[1]], word)
            for word in shlex.split(line.replace("UPLOAD", self.upload))[1:]
        ]
        target = self._server.address
        if words[0] == "--store":
            target, words = words[1], words[2:]
        result = storectl(target, *words)
        if result.exit_code:
            self.failed.append(line)
        return result.output


@pytest.mark.slow
def test_the_commands_of_the_guide_print_what_it_shows(
    server: ServerProcess, tmp_path: Path
) -> None:
    operator = Operator(server, tmp_path)
    before: dict[str, Callable[[], None]] = {
        "Monitoring": operator.train,
        "A chunk is damaged": operator.damage,
    }
    for step in steps():
        before.pop(step.heading, lambda: None)()
        if "storectl" in step.programs and step.heading != "Audit log":
            printed = [
                operator.run(line) for line in step.lines if line.startswith("storectl")
            ]
            if not step.programs & NOT_RUN.keys():
                assert without_ids(step.output) == without_ids("".join(printed))

    assert {} == before
    assert [f"storectl verify {RUN}@300"] == operator.failed  # it finds the damage
    with store.connect(server.address) as client:
        run = client.run(RUN)
        assert [300, 200] == [found.step for found in run.checkpoints()]
        assert "ended" == run.uploads.get(operator.upload).state


def test_below_each_block_of_commands_is_what_it_prints() -> None:
    assert TEXT.count("\n```sh\n") == len(steps())
    for step in steps():
        is_seen = not step.programs & NOT_RUN.keys()
        assert is_seen != step.output.startswith("# looks like"), step


def test_every_program_of_the_guide_is_run_or_listed() -> None:
    programs = {program for step in steps() for program in step.programs}

    assert {"storectl", "export", *NOT_RUN, *RUN_ELSEWHERE} == programs
    for file in RUN_ELSEWHERE.values():
        assert (ROOT / file).exists(), file


def test_the_variables_that_the_guide_sets_are_options_of_storectl() -> None:
    (line,) = (line for line in lines() if line.startswith("export "))
    names = {word.partition("=")[0] for word in line.split()[1:]}

    assert names <= {param.envvar for param in main.params}


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
        place, _, heading = link.partition("#")
        target = GUIDE.parent / place if place else GUIDE
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {anchor(title) for title in titles}, link
    for file in files:
        assert (ROOT / file).exists(), file
    for bench in benches:
        assert (ROOT / "benchmarks" / f"{bench}.py").exists(), bench


def test_each_program_in_the_text_uses_what_exists() -> None:
    programs = [block for block in blocks_of(GUIDE) if block.language == "python"]

    assert programs
    for block in programs:
        check_names(ast.parse(block.text))
