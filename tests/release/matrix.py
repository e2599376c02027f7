"""``python -m tests.release.matrix [lock | sample] [ROW ...]``: the environments of a
release.

A row is a Python and a choice of versions: the floors of pyproject.toml, or the newest
releases. ``lock`` writes the pins of the rows to requirements/matrix; without it, each
row gets an environment of its own in build/matrix, the wheel in it, and the quick suite
runs there; with ``sample``, only the folders that depend most on the versions. The last
lines are a table of what ran. A Python that this machine does not
have is a row that says so.
"""

import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "matrix"
LOCKS: Final = ROOT / "requirements" / "matrix"
UV: Final = Path(sys.executable).with_name("uv")

TESTED: Final = (
    *(
        "tests",
        "benchmarks",
        "soak",
        "docs",
        "requirements",
        "deploy",
        "pyproject.toml",
    ),
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"),
    "Makefile",
)
"""Places that tests read besides the installed package."""

IGNORED: Final = ("tests/repo", "tests/site")
"""Tests of the checkout, which are the same in each environment."""

SAMPLE: Final = (
    *("tests/cli", "tests/export", "tests/foreign", "tests/orbax", "tests/restore"),
    *("tests/save", "tests/storage", "tests/trees/test_structure_golden.py"),
)
"""Tests of what touches dependencies most, in two minutes."""

SHOWN: Final = (
    *("jax", "flax", "optax", "numpy", "tensorstore", "orbax-checkpoint", "grpcio"),
    "protobuf",
)
"""Packages whose versions the table has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An environment."""

    python: str
    pins: str
    """Name of the lock: "floor" has the oldest versions that pyproject.toml allows."""

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.pins.partition('-')[0]}-{self.python}"

    @property
    def lock(self) -> Path:
        """File of its pins."""
        return LOCKS / f"{self.pins}.lock"

    @property
    def interpreter(self) -> Path:
        """The Python of its environment."""
        return BUILD / self.name / "bin" / "python"


ROWS: Final = (
    Row(python="3.11", pins="floor"),
    Row(python="3.11", pins="newest-3.11"),
    Row(python="3.12", pins="newest"),
    Row(python="3.13", pins="newest"),
    Row(python="3.14", pins="newest"),
)

GROUPS: Final = ("bench", "browser", "build", "emulators", "libraries", "lint", "test")
"""Dependency groups of the tests; the generator of the contract pins an old protobuf.
"""


def main() -> int:
    """Writes locks or runs rows; returns the exit code."""
    arguments = sys.argv[1:]
    what = arguments.pop(0) if arguments[:1] in (["lock"], ["sample"]) else "run"
    names = arguments or [row.name for row in ROWS]
    if unknown := set(names) - {row.name for row in ROWS}:
        print(f"unknown rows: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    rows = [row for row in ROWS if row.name in names]
    if what == "lock":
        for row in {row.lock: row for row in reversed(rows)}.values():
            lock(row)
        return 0
    folders = SAMPLE if what == "sample" else ("tests",)
    lines = [run(row, folders) for row in rows]
    print("\n| row | Python | " + " | ".join(SHOWN) + " | quick suite | s |")
    print("|---" * (len(SHOWN) + 4) + "|")
    print(*lines, sep="\n")
    return 1 if any("failed" in line or "error" in line for line in lines) else 0


# --- Pins -----------------------------------------------------------------------------


def lock(row: Row) -> None:
    """Writes the pins of a row."""
    LOCKS.mkdir(exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    arguments = ["pyproject.toml", "--all-extras", "--generate-hashes"]
    for group in GROUPS:
        arguments += ["--group", group]
    if row.pins == "floor":
        floors = BUILD / "floors.txt"
        floors.write_text("\n".join(_floors(row)))
        arguments += ["--constraint", str(floors)]
    _compile(row, *arguments, "--output-file", str(row.lock))


def _floors(row: Row) -> Iterator[str]:
    """Yields the oldest version of each dependency, by uv; but not of theirs."""
    text = _compile(
        row, "pyproject.toml", "--all-extras", "--resolution", "lowest-direct"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        wanted += extra
    ours = {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in wanted}
    for line in text.splitlines():
        if line.partition("==")[0] in ours:
            yield line


def _compile(row: Row, *arguments: str) -> str:
    command = [
        *(str(UV), "pip", "compile", "--quiet", "--python-version", row.python),
        *("--python-platform", "x86_64-manylinux_2_28", "--no-annotate"),
        *("--no-emit-index-url", "--no-emit-find-links"),
        *("--custom-compile-command", "make lock", *arguments),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


# --- Runs -----------------------------------------------------------------------------


def run(row: Row, folders: Sequence[str]) -> str:
    """Runs the quick suite of folders in the environment of a row; returns its line."""
    python = find_python(row.python)
    if python is None:
        cells = [row.name, row.python, *[""] * len(SHOWN), "Python not installed", ""]
        return f"| {' | '.join(cells)} |"
    install(row, python=python)
    folder = BUILD / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in TESTED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    begin = time.monotonic()
    command = [str(row.interpreter), "-m", "pytest", "--numprocesses=3", "-q"]
    done = subprocess.run(
        [
            *(*command, "-m", "not slow", *folders),
            *(f"--ignore={name}" for name in IGNORED),
        ],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        check=False,
    )
    print(done.stdout)
    outcome = done.stdout.strip().splitlines()[-1].strip("= ").partition(" in ")[0]
    cells = [row.name, row.python, *versions(row.lock.read_text(), SHOWN), outcome]
    return f"| {' | '.join(cells)} | {time.monotonic() - begin:.0f} |"


def find_python(version: str) -> str | None:
    """Returns a Python of a version: on the path, or of pyenv; None for none."""
    places = [f"python{version}"]
    places += sorted(
        map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    )
    for place in places:
        command = [place, "-c", "import sys; print(sys.executable)"]
        with suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return done.stdout.strip()
    return None


def install(row: Row, *, python: str) -> None:
    """Creates the environment of a row, with the wheel of this checkout."""
    environment = row.interpreter.parents[1]
    uv = str(UV)
    wheels = BUILD / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    pip = [uv, "pip", "install", "--quiet", "--python", str(row.interpreter)]
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", python, str(environment)],
        [*pip, "--require-hashes", "--requirement", str(row.lock)],
        [uv, "build", "--quiet", "--wheel", "--no-build-isolation", "-o", str(wheels)],
    ):
        subprocess.run(command, cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", *map(str, wheels.glob("*.whl"))], check=True)


def versions(lock_text: str, names: Sequence[str]) -> list[str]:
    """Returns the version that a lock pins for each package; "-" for none."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lock_text, re.MULTILINE))
    return [pins.get(name, "-") for name in names]


if __name__ == "__main__":
    sys.exit(main())
