"""README.md and docs/: examples do what they show, and what they name exists.

Each block runs by itself:

- a ``python`` block runs over a store of its own; what it prints is the comment behind
  each ``print``;
- a ``console`` block runs over the store that the ``python`` block before it leaves,
  or else over that of docs/storectl.md, and prints what it shows;
- a block that names ``/tmp/old`` has the checkpoints of other projects there, and a
  ``console`` block may go there: ``$ cd /tmp/old``;
- a line of a ``sh`` block is run over the store of docs/storectl.md, unless it needs
  what ``NEEDS`` lists; its programs, targets, extras and options exist in any case;
- a ``py`` block needs another environment: it compiles, and what it takes from storesvc
  exists;
- ``toml`` is a policy or a mapping, and ``diff`` leads
  from a program to one that runs;
- ``text`` is output, or drawn.

docs/tutorial.md is executed as a whole, by tests/repo/test_tutorial.py.
"""

import ast
import builtins
import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import storesvc_client as store
from benchmarks.__main__ import OTHERS
from benchmarks.speed.works import WORKS
from storesvc.auth.policy import ROLES, Permission
from storesvc.auth.policy_file import parse as parse_policy_file
from storesvc_client._mapping.rules import parse_rules
from storesvc_client.cli import main
from storesvc_client.cli.group import COMMANDS
from tests.support.document_blocks import (
    Block,
    blocks_of,
    check_names,
    commands_of,
    steady,
)
from tests.support.old_checkpoints import write_old_checkpoints
from tests.support.storectl_lines import check_line

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = [README, *sorted(DOCS.glob("*.md"))]
STORE = "file:///tmp/ckpts"
OLD = "/tmp/old"
"""Folder of what other projects wrote, in the examples."""
REPORT = "/tmp/restore.json"
"""Report of a restore, which an example writes and a command reads."""
TUTORIAL = DOCS / "tutorial.md"
NEEDS = {
    r"^(git clone|cd) ": "the address of the repository, and its checkout",
    r"^pip install": "a package index",
    r"^make ": "minutes: CI runs the targets that it needs",
    r"^storectl serve": "a server that runs until it is stopped; the tutorial has one",
    r"^storectl audit ls": "an audit log; tests/cli/test_storectl_audit.py has one",
    r"^storectl console": "a browser, and Ctrl-C; tests/console has both",
    r"^storectl hub": "Ctrl-C; tests/hub has a socket and clients",
    r"(?<!--store )gs://": "a bucket",
    r"-s ckpt\.example|-c lab": "another machine",
    r"--map llama": "a Llama; tests/easydel/test_exports.py has some",
    r"^storectl doctor": "places that it writes to; tests/doctor has some",
    r"^storectl map": "a file of rules; tests/cli/test_storectl_map.py has one",
    r"^storectl import": "checkpoints of another project; docs/migration.md has them",
}
"""Lines of ``sh`` blocks that are not run, and what they need that a test lacks."""

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


BLOCKS = [
    block
    for document in DOCUMENTS
    if document != TUTORIAL
    for block in blocks_of(document)
]
SAMPLE = next(b for b in blocks_of(DOCS / "storectl.md") if b.language == "python")
"""Makes the store of the examples."""


def each_block(language: str, *, slow: Collection[Path] = ()) -> pytest.MarkDecorator:
    """Returns the mark of a test of each block in a language; blocks of some documents
    are slow."""
    found = [
        pytest.param(block, marks=pytest.mark.slow if block.document in slow else ())
        for block in BLOCKS
        if block.language == language
    ]
    return pytest.mark.parametrize("block", found, ids=str)


def executed(block: Block, root: Path) -> list[str]:
    """Returns what an example prints over a root; repeated lines count once."""
    printed = io.StringIO()
    source = block.text.replace(STORE, root.as_uri()).replace(OLD, str(_old(root)))
    source = source.replace(REPORT, str(root.with_name("restore.json")))
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(block), "exec"), {"__name__": "__main__"})
    return [line for line, _ in groupby(printed.getvalue().splitlines())]


def shown_prints(block: Block) -> list[str]:
    """Returns the comments behind the prints of an example."""
    comments = re.findall(r"^ *print\(.*\)  # (.*)$", block.text, re.MULTILINE)
    assert len(comments) == block.text.count("print(")
    return [comment for comment, _ in groupby(comments)]


def _old(root: Path) -> Path:
    """Returns the folder of what other projects wrote, next to a store."""
    return root.with_name("old")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints that other projects wrote."""
    folder = tmp_path_factory.mktemp("old")
    write_old_checkpoints(folder)
    return folder


@pytest.fixture
def root(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The root of a store to create, next to what other projects wrote if the document
    names it."""
    root = tmp_path / "store"
    if OLD in block.document.read_text():
        shutil.copytree(request.getfixturevalue("old"), _old(root))
    return root


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of docs/storectl.md."""
    root = tmp_path_factory.mktemp("sample")
    executed(SAMPLE, root)
    return root


def test_each_document_is_linked_from_the_readme() -> None:
    text = README.read_text()

    for document in sorted(DOCS.glob("*.md")):
        assert f"](docs/{document.name})" in text, document.name


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    kinds = {block.language for block in BLOCKS}

    known = {"python", "console", "sh", "py", "toml", "diff", "text"}
    assert known == kinds


def test_the_other_pages_of_the_site_have_output_only() -> None:
    pages = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md")
    kinds = {block.language for page in pages for block in blocks_of(ROOT / page)}

    assert {"text"} == kinds


def test_the_figures_of_speed_are_in_the_tables_of_the_benchmarks() -> None:
    speed = (DOCS / "comparison.md").read_text().partition("## Speed")[2]
    rows = [line for line in speed.splitlines() if line.startswith("| ")]
    figures = set(re.findall(r"\d+\.\d\d", "".join(rows)))
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    (fast,) = re.findall(r"\*\*Fast\.\*\* .*", README.read_text())

    assert len(figures) > 5
    assert figures <= set(re.findall(r"\d+\.\d\d", results))
    rounded = {f"{float(figure):.1f}" for figure in figures}
    assert set(re.findall(r"\d+\.\d", fast)) <= rounded


@each_block("toml")
def test_a_policy_or_a_mapping_of_a_document_is_valid(block: Block) -> None:
    if "[[rules]]" in block.text:
        rules = parse_rules(block.text.encode(), name=str(block), is_toml=True)
        assert rules.rules
        return
    found = parse_policy_file(block.text)

    assert found.policy.bindings or found.lending


def test_the_roles_of_a_document_have_the_permissions_of_the_code() -> None:
    text = (DOCS / "security.md").read_text()
    (header,) = re.findall(r"^\| permission \| (.*) \|$", text, re.MULTILINE)
    rows = re.findall(r"^\| `([a-z]+\.[A-Za-z]+)` \|(.*)\|$", text, re.MULTILINE)
    found = {
        name: frozenset(
            Permission(row)
            for row, cells in rows
            if cells.split("|")[at].strip() == "yes"
        )
        for at, name in enumerate(header.split(" | "))
    }

    assert dict(ROLES) == found
    assert [row for row, _ in rows] == [*Permission]


@each_block("python", slow=[*DOCS.glob("*.md")])
def test_an_example_prints_what_it_shows(block: Block, root: Path) -> None:
    assert shown_prints(block) == executed(block, root)


def _steps(client: store.Client) -> list[int]:
    return [found.step for found in client.run("demo/linear").checkpoints()]


def test_the_training_loop_resumes_where_it_was_killed(tmp_path: Path) -> None:
    loop = next(block for block in blocks_of(README) if block.language == "python")
    killed = loop.text.replace("101)", "61)")

    executed(Block(README, loop.line, "python", killed), tmp_path)
    with store.connect(tmp_path.as_uri()) as client:
        assert [60, 50, 25, 0] == _steps(client)
        client.run("demo/linear").update(50, labels={"kept": "yes"})
    executed(loop, tmp_path)

    assert len([line for line in loop.text.splitlines() if line]) <= 25
    with store.connect(tmp_path.as_uri()) as client:
        assert [100, 75, 60, 50, 25, 0] == _steps(client)
        assert "yes" == client.run("demo/linear").checkpoint(50).labels["kept"]


@each_block("console", slow=list(DOCS.glob("*.md")))
def test_the_command_line_prints_what_a_document_shows(
    block: Block, sample: Path, root: Path
) -> None:
    before = [
        found
        for found in blocks_of(block.document)
        if found.language == "python" and found.line < block.line
    ]
    if before and before[-1] != SAMPLE:
        executed(before[-1], root)
    else:
        shutil.copytree(sample, root)
    commands = commands_of(block.text)

    folder = ROOT
    assert commands
    for command, output in commands:
        if command.startswith("export"):
            assert (f"export STORECTL_STORE={STORE}", "") == (command, output)
            continue
        if command.startswith("cd"):
            assert (f"cd {OLD}", "") == (command, output)
            folder = _old(root)
            continue
        ran = subprocess.run(
            command.replace("storectl", f"{sys.executable} -m storesvc_client.cli", 1),
            shell=True,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=os.environ | {"STORECTL_STORE": root.as_uri(), "COLUMNS": "80"},
        )
        assert (0, steady(output)) == (ran.returncode, steady(ran.stdout))


@each_block("py")
def test_a_program_for_another_environment_uses_what_exists(block: Block) -> None:
    check_names(ast.parse(block.text))


@pytest.mark.slow
@each_block("diff")
def test_a_changed_program_of_a_document_runs(block: Block, tmp_path: Path) -> None:
    lines = [line[1:] for line in block.text.splitlines() if not line.startswith("-")]
    source = "\n".join(lines).replace("file:///ckpts", tmp_path.as_uri())
    names: dict[str, Any] = {"step": 1, "state": {"x": np.ones(3)}}

    exec(compile(source, str(block), "exec"), names)

    names["manager"].close()
    assert [1.0, 1.0, 1.0] == names["state"]["x"].tolist()


def shell_lines(block: Block) -> list[str]:
    """Returns the lines of a block; a backslash at the end of one joins the next."""
    return block.text.replace("\\\n", " ").splitlines()


def runnable_lines(block: Block) -> list[str]:
    """Returns the lines of a ``sh`` block that need nothing but the sample."""
    lines = [line.partition("  #")[0].strip() for line in shell_lines(block)]
    return [line for line in lines if not any(re.search(need, line) for need in NEEDS)]


RUNNABLE = [
    block for block in BLOCKS if block.language == "sh" and runnable_lines(block)
]


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_the_commands_of_a_document_work(
    block: Block, sample: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(sample, root)
    with store.connect(root.as_uri()) as client:
        client.run("prod/llama-8b").tags.set("best", 200)
    if REPORT in block.text:
        (writer,) = [b for b in BLOCKS if b.language == "python" and REPORT in b.text]
        executed(writer, root)
    certificate, config = tmp_path / "ckpt.pem", tmp_path / "config.toml"
    certificate.touch()
    for line in runnable_lines(block):
        words = shlex.split(
            line.replace("/etc/ssl/ckpt.pem", str(certificate))
            .replace(":/ckpts", f":{tmp_path}/ckpts")
            .replace(":/models", f":{tmp_path}/models")
            .replace(REPORT, str(tmp_path / "restore.json"))
        )
        ran = subprocess.run(
            [sys.executable, "-m", "storesvc_client.cli", *words[1:]],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=os.environ
            | {"STORECTL_STORE": root.as_uri(), "STORESVC_CONFIG": str(config)},
        )
        assert 0 == ran.returncode, (line, ran.stdout)


def test_each_need_of_a_command_is_that_of_a_document() -> None:
    text = "\n".join(block.text for block in BLOCKS if block.language == "sh")

    assert [] == [need for need in NEEDS if not re.search(need, text, re.MULTILINE)]
    assert len(RUNNABLE) >= 2


@each_block("sh")
def test_the_commands_of_a_document_exist(block: Block) -> None:
    for line in shell_lines(block):
        check_shell_line(line)


def check_shell_line(line: str) -> None:
    match shlex.split(line, comments=True):
        case ["pip", "install", requirement]:
            extras = set(re.findall(r"\w+", requirement.partition("[")[2]))
            assert extras <= set(_extras()), requirement
        case ["git", "clone", "REPOSITORY", folder] | ["cd", folder]:
            assert "storesvc" == folder
        case ["make", *words]:
            targets = [word for word in words if "=" not in word]
            assert set(targets) <= set(_targets()), line
        case ["storectl", *words]:
            check_line(words)
        case words:
            raise AssertionError(
                f"expected git, cd, pip, make or storectl, got {words}"
            )


def _extras() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    return re.findall(r"^(\w+) = \[", section, re.MULTILINE)


def _targets() -> list[str]:
    return re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def inline_code(document: Path) -> Iterator[str]:
    prose = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
    yield from re.findall(r"`([^`\n]+)`", prose)


def _is_option_alone(words: list[str]) -> bool:
    """Returns whether the text names an option of a command, without its value."""
    command = main.get_command(click.Context(main), words[0])
    assert command is not None
    options = {option for parameter in command.params for option in parameter.opts}
    return len(words) == 2 and words[1] in options


@each_document
def test_the_commands_that_a_document_names_exist(document: Path) -> None:
    for code in inline_code(document):
        if code.startswith(("pip install ", "make ")):
            check_shell_line(code)
        elif code.startswith("storectl "):
            words = shlex.split(code)[1:]
            assert words[0] in COMMANDS, code
            if len(words) > 1 and not _is_option_alone(words):
                check_line(words)


@each_document
def test_the_public_names_that_a_document_uses_exist(document: Path) -> None:
    with store.connect("memory://") as client:
        run = client.run("docs/names")
        save = run.save(1, {"x": 1})
        save.result()
        opened = run.open()
        opened.restore()
        named: dict[str, Any] = {
            "store": store,
            "client": client,
            "run": run,
            "Save": save,
            "OpenCheckpoint": opened,
        }
        for code in inline_code(document):
            found = re.match(
                r"(store|client|run|Save|OpenCheckpoint)((?:\.\w+)+)", code
            )
            if found and not re.fullmatch(r"[\w/]+\.(py|proto)", found[0]):
                functools.reduce(getattr, found[2][1:].split("."), named[found[1]])


@each_document
def test_the_errors_that_a_document_names_exist(document: Path) -> None:
    for code in inline_code(document):
        if re.fullmatch(r"[A-Z]\w+Error", code):
            assert hasattr(store, code) or hasattr(builtins, code), code


@each_document
def test_the_links_of_a_document_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith("https://"):
            continue
        place, _, heading = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        if target.is_relative_to(ROOT / "proto") and not (ROOT / "proto").exists():
            continue  # the installed package has generated code only
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {anchor(title) for title in titles}, link


def anchor(title: str) -> str:
    """Returns the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@each_document
def test_the_tests_and_benches_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()

    for pattern in re.findall(r"tests/[\w/*]+\.py", text):
        assert list(ROOT.glob(pattern)), pattern
    for bench in re.findall(r"python -m (benchmarks\.\w+)", text):
        assert (ROOT / f"{bench.replace('.', '/')}.py").exists(), bench
    for bench in re.findall(r"python -m benchmarks (\w+)", text):
        assert bench in WORKS or bench in OTHERS, bench


def test_each_promise_names_a_test() -> None:
    text = (DOCS / "guarantees.md").read_text()
    rows = re.findall(r"^\| [^|]+\. \| (.*) \|$", text, re.MULTILINE)

    assert len(rows) > 35
    assert [] == [
        row for row in rows if not re.search(r"tests[/.]|make |-m benchmarks", row)
    ]


def _file(path: str) -> Path | None:
    """Returns a file of the product or the tests; None if the wheel lacks it."""
    package, _, rest = path.removeprefix("client/").partition("/")
    if package in ("storesvc", "storesvc_client"):
        spec = find_spec(package)
        assert spec is not None
        return Path(*(spec.submodule_search_locations or ())) / rest
    if package == "proto" and not (ROOT / "proto").exists():
        return None
    return ROOT / path


PATH = (
    r"(?:client/storesvc_client|storesvc|tests|benchmarks|soak|deploy|proto/storesvc)"
    r"/[\w/.-]*"
)


@each_document
def test_the_files_and_functions_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()

    for path in re.findall(rf"`({PATH})`", text):
        file = _file(path.rstrip("/"))
        assert file is None or file.exists(), path
    for name, path in re.findall(rf"`([\w.]+)\(?\)?` in `({PATH}\.py)`", text):
        file = _file(path)
        assert file is not None
        defined = {
            node.name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert set(name.split(".")) <= defined, f"{path}: {name}"


def test_the_architecture_lists_every_package() -> None:
    text = (DOCS / "architecture.md").read_text()

    for prefix, package in ("", "storesvc"), ("client/", "storesvc_client"):
        spec = find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for found in sorted(Path(folder).glob("*/__init__.py")):
                assert f"| `{prefix}{package}/{found.parent.name}/` |" in text
