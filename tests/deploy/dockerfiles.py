"""Dockerfiles: parses them and replays their RUN lines without a daemon.

A rehearsal runs the RUN lines of the stages that an image is made of, as they are
written. What stands for the root of each stage is a folder of its own, in which the
absolute paths of the Dockerfile are looked up; what stands for the base image's Python
is a virtual environment of this one's. Of a build it leaves out the base image alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PIP: Final = """#!/bin/sh
exec {base}/bin/python3 -m pip --python {python} "$@"
"""
"""pip of a stage; not in its environment, as Debian's Python makes none with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An instruction of a stage."""

    name: str
    arguments: str

    @property
    def words(self) -> list[str]:
        """Its arguments, of either form."""
        if self.arguments.startswith("["):
            listed: list[str] = json.loads(self.arguments)
            return listed
        return self.arguments.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage: what it begins as, and what is done there."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def list_prefixes(self, name: str) -> list[Instruction]:
        """Returns its instructions of a name."""
        return [i for i in self.instructions if i.name == name]


class Dockerfile:
    """A file, read."""

    def __init__(self, path: Path) -> None:
        self.stages: dict[str, Stage] = {}
        self.defaults: dict[str, str] = {}
        """Values of the arguments before the first stage."""
        stage = None
        for name, arguments in _lines(path.read_text()):
            if name == "FROM":
                base, _, called = arguments.split()
                stage = self.stages[called] = Stage(name=called, base=base)
            elif stage is not None:
                instruction = Instruction(name=name, arguments=arguments)
                stage.instructions.append(instruction)
            elif name == "ARG":
                key, value = arguments.split("=", 1)
                self.defaults[key] = value

    def last(self, name: str, *, stage: str) -> Instruction:
        """Returns the last value of an instruction for a stage."""
        found = [i for s in self.line_of(stage) for i in s.list_prefixes(name)]
        return found[-1]

    def line_of(self, stage: str) -> list[Stage]:
        """Returns the stages that one begins as, first to last, and that one."""
        found = self.stages[stage]
        return [*(self.line_of(found.base) if found.base in self.stages else ()), found]

    def table_sources(self, stage: str) -> list[str]:
        """Returns the stages that one copies from, in the order to build them."""
        found: dict[str, None] = {}
        for part in self.line_of(stage):
            for copy in part.list_prefixes("COPY"):
                for word in copy.words:
                    if word.startswith("--from="):
                        source = word.removeprefix("--from=")
                        found |= dict.fromkeys((*self.table_sources(source), source))
        return list(found)


class Rehearsal:
    """The stages of an image, done in folders."""

    def __init__(self, dockerfile: Dockerfile, *, context: Path, place: Path) -> None:
        self._dockerfile = dockerfile
        self._context = context
        self._place = place

    def root_of(self, stage: str) -> Path:
        """Returns what stands for the root of a stage."""
        return self._place / stage

    def run(self, stage: str) -> None:
        """Does the stages that one copies from.

        Raises:
            CalledProcessError: One of their lines fails.
        """
        for source in self._dockerfile.table_sources(stage):
            self._run_one(source)

    def _run_one(self, name: str) -> None:
        root = self.root_of(name)
        environment = _with_python(root)
        where = root
        for stage in self._dockerfile.line_of(name):
            for instruction in stage.instructions:
                match instruction.name:
                    case "ENV":
                        environment |= self._variables(instruction, root)
                    case "WORKDIR":
                        where = self._within(root, instruction.arguments)
                        where.mkdir(parents=True, exist_ok=True)
                    case "COPY":
                        self._copy(instruction.words, where)
                    case "RUN":
                        subprocess.run(
                            ["sh", "-euc", instruction.arguments],
                            cwd=where,
                            env=environment,
                            check=True,
                        )

    def _variables(self, instruction: Instruction, root: Path) -> dict[str, str]:
        pairs = (word.split("=", 1) for word in instruction.words)
        return {
            name: str(self._within(root, value)) if value.startswith("/") else value
            for name, value in pairs
        }

    def _copy(self, words: Sequence[str], where: Path) -> None:
        context = self._context
        if words[0].startswith("--from="):
            context = self.root_of(words[0].removeprefix("--from="))
            words = words[1:]
        *sources, target = words
        for source in sources:
            found = self._within(context, source)
            if found.is_dir():
                shutil.copytree(found, where / target, dirs_exist_ok=True)
                continue
            to_folder = target.endswith("/")
            folder = where / target if to_folder else (where / target).parent
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(
                found, folder / (found.name if to_folder else Path(target).name)
            )

    @staticmethod
    def _within(root: Path, path: str) -> Path:
        return root / path.removeprefix("/")


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile, and their arguments."""
    code = "\n".join(x for x in text.splitlines() if x and not x.startswith("#"))
    for line in re.sub(r"\\\n\s*", "", code).splitlines():
        name, arguments = line.split(maxsplit=1)
        yield name, arguments


def _with_python(root: Path) -> dict[str, str]:
    """Gives a root a Python, and returns the environment that finds it first."""
    python = root / "usr" / "local"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", python], check=True)
    pip = python / "bin" / "pip"
    pip.write_text(PIP.format(base=sys.base_prefix, python=python / "bin" / "python"))
    pip.chmod(0o755)
    ours = {n: v for n, v in os.environ.items() if not n.startswith("PYTHON")}
    return {**ours, "PATH": f"{python / 'bin'}:{ours['PATH']}"}
