"""``python -m tests.release.matrix [COMMAND] [ROW ...]``: a release's environments.

A row is a Python and a choice of versions: the floors of pyproject.toml, or the newest
releases; the name "newest" is the newest Python that this machine has. Each row gets an
environment of its own in build/matrix, and the wheel in it, whose files are compared
with the checkout. The commands:

- ``lock`` writes the pins of the rows to requirements.
- ``install`` creates the environments.
- ``slow`` runs the slow tests there, but not the sweeps of ``make soak``.
- Without a command, the quick suite runs there.

The last lines are a table of what ran. A Python that this machine does not have is a
row that says so.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "matrix"
LOCKS: Final = ROOT / "requirements"
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

SHOWN: Final = (
    *("jax", "flax", "optax", "numpy", "tensorstore", "orbax-checkpoint", "grpcio"),
    "protobuf",
)
"""Packages whose versions the table has."""


GROUPS: Final = ("bench", "browser", "build", "emulators", "libraries", "lint", "test")
"""Dependency groups of the tests; the generator of the contract pins an old protobuf.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An environment."""

    python: str
    pins: str
    """Name of the lock."""
    at_floors: bool = False
    """True for the oldest versions that pyproject.toml and the groups allow."""
    groups: tuple[str, ...] = GROUPS

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{Path(self.pins).name.partition('-')[0]}-{self.python}"

    @property
    def lock(self) -> Path:
        """File of its pins."""
        return LOCKS / f"{self.pins}.lock"

    @property
    def interpreter(self) -> Path:
        """The Python of its environment."""
        return BUILD / self.name / "bin" / "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Tests that a command runs."""

    name: str
    marked: str
    """Expression over the markers."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


QUICK: Final = Suite(
    name="quick suite",
    marked="not slow",
    # tests of the checkout, which are the same in each environment
    arguments=("--ignore=tests/repo", "--ignore=tests/site", "--numprocesses=3"),
)
SLOW: Final = Suite(
    name="slow tests",
    marked="slow and not soak",
    # the site's generators need a group of their own, and none of their tests is slow
    arguments=("--ignore=tests/repo/test_site.py", "--numprocesses=4"),
    # what runs once is compiled soon rather than well
    environment={"STORESVC_SUITE": "full", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
)

NEWEST: Final = (
    Row(python="3.11", pins="matrix/newest-3.11"),
    Row(python="3.12", pins="matrix/newest"),
    Row(python="3.13", pins="matrix/newest"),
)
ROWS: Final = (
    Row(python="3.11", pins="matrix/floor", at_floors=True),
    *NEWEST,
    Row(python="3.14", pins="matrix/newest"),
)
EASYDEL: Final = Row(python="3.11", pins="easydel", at_floors=True, groups=("easydel",))
"""The environment of ``make test-easydel``, where CI tests the floors: easydel pins the
oldest jax and flax that pyproject.toml allows, and needs few other packages newer."""


def main() -> int:
    """Does a command for some rows; returns the exit code."""
    arguments = sys.argv[1:]
    commands = ("lock", "install", "slow")
    command = arguments.pop(0) if arguments and arguments[0] in commands else "quick"
    rows = choose_rows(arguments or [row.name for row in ROWS])
    match command:
        case "lock":
            for row in {row.lock: row for row in reversed(rows)}.values():
                lock(row)
        case "install":
            for row in rows:
                install(row)
        case _:
            suite = SLOW if command == "slow" else QUICK
            lines, passed = zip(*(run(row, suite) for row in rows), strict=True)
            print(f"\n| row | Python | {' | '.join(SHOWN)} | {suite.name} | s |")
            print("|---" * (len(SHOWN) + 4) + "|")
            print(*lines, sep="\n")
            return 0 if all(passed) else 1
    return 0


def choose_rows(names: Sequence[str]) -> list[Row]:
    """Returns the rows with these names, of which "newest" depends on the machine."""
    rows = {row.name: row for row in (*ROWS, EASYDEL)}
    rows["newest"] = next(
        (row for row in reversed(NEWEST) if find_python(row.python)), NEWEST[0]
    )
    if unknown := set(names) - rows.keys():
        sys.exit(f"unknown rows: {', '.join(sorted(unknown))}")
    return [rows[name] for name in names]


# --- Pins -----------------------------------------------------------------------------


def lock(row: Row) -> None:
    """Writes the pins of a row."""
    BUILD.mkdir(parents=True, exist_ok=True)
    arguments = ["pyproject.toml", "--all-extras", "--generate-hashes"]
    for group in row.groups:
        arguments += ["--group", group]
    if row.at_floors:
        floors = BUILD / "floors.txt"
        floors.write_text("\n".join(_floors(row)))
        arguments += ["--constraint", str(floors)]
    _compile(row, *arguments, "--output-file", str(row.lock))


def _floors(row: Row) -> Iterator[str]:
    """Yields the oldest version of each dependency, by uv; but not of theirs."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # a group's other packages are wanted new, even at the floors
    groups = map(pyproject["dependency-groups"].__getitem__, row.groups)
    pinned = BUILD / "pinned.txt"
    pinned.write_text(
        "\n".join(each for group in groups for each in group if "==" in each)
    )
    text = _compile(
        *(row, "pyproject.toml", str(pinned)),
        *("--all-extras", "--resolution", "lowest-direct"),
    )
    project = pyproject["project"]
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


def run(row: Row, suite: Suite) -> tuple[str, bool]:
    """Runs tests in the environment of a row; returns its line, and if they passed."""
    if not install(row):
        cells = [row.name, row.python, *[""] * len(SHOWN), "Python not installed", ""]
        return f"| {' | '.join(cells)} |", True
    folder = BUILD / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in TESTED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    begin = time.monotonic()
    outcome, passed = _run_tests(row, suite, folder)
    cells = [row.name, row.python, *versions(row.lock.read_text(), SHOWN), outcome]
    return f"| {' | '.join(cells)} | {time.monotonic() - begin:.0f} |", passed


def _run_tests(row: Row, suite: Suite, folder: Path) -> tuple[str, bool]:
    """Prints the output of pytest; returns its last words, and if the tests passed."""
    compiled = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / "build" / "jax")}
    tests = subprocess.Popen(
        [
            *(str(row.interpreter), "-m", "pytest", "-q", *suite.arguments),
            *("-m", suite.marked, "tests"),
        ],
        cwd=folder,
        env={**os.environ, **compiled, **suite.environment},
        text=True,
        stdout=subprocess.PIPE,
    )
    line = ""
    with tests:
        for line in tests.stdout or ():
            print(line, end="", flush=True)
    return line.strip("= \n").partition(" in ")[0], tests.returncode == 0


def find_python(version: str) -> str | None:
    """Returns a Python of a version, on the path, of pyenv or this one; or None."""
    pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    program = "import sys; print(sys.executable, *sys.version_info[:2], sep='.')"
    for place in (f"python{version}", *sorted(map(str, pyenv)), sys.executable):
        command = [place, "-c", program]
        with suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            if done.stdout.strip().endswith(f".{version}"):
                return done.stdout.strip().removesuffix(f".{version}")
    return None


def install(row: Row) -> bool:
    """Creates the environment of a row, unless it has these pins, and installs the
    wheel of this checkout in it; returns False without its Python."""
    python = find_python(row.python)
    if python is None:
        return False
    environment = row.interpreter.parents[1]
    installed = environment / row.lock.name
    wheels = BUILD / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    # pip, unlike uv, has the settings of the machine, such as another package index
    pip = [python, "-m", "pip", "--python", str(row.interpreter), "install", "--quiet"]
    if not installed.exists() or installed.read_bytes() != row.lock.read_bytes():
        _do(python, "-m", "venv", "--clear", "--without-pip", str(environment))
        _do(*pip, "--no-deps", "--require-hashes", "--requirement", str(row.lock))
        shutil.copy(row.lock, installed)
    build = ["build", "--quiet", "--wheel", "--no-build-isolation", "-o", str(wheels)]
    _do(str(UV), *build)
    (wheel,) = map(str, wheels.glob("*.whl"))
    _do(*pip, "--no-deps", "--no-index", "--force-reinstall", wheel)
    _do(sys.executable, "-m", "tests.repo.wheel_files", wheel)
    return True


def _do(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def versions(lock_text: str, names: Sequence[str]) -> list[str]:
    """Returns the version that a lock pins for each package; "-" for none."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lock_text, re.MULTILINE))
    return [pins.get(name, "-") for name in names]


if __name__ == "__main__":
    sys.exit(main())
