"""The fenced blocks of the documents."""

import ast
import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Final

import storesvc_client as store

ROOT: Final = Path(__file__).parents[2]
MOMENT: Final = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+\d\d:\d\d"


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: Path
    line: int
    language: str
    text: str
    title: str = ""
    """Name of the file that a reader writes the block into."""

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    """Returns the blocks of a document in their order."""
    text = document.read_text()
    return [
        Block(
            document,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["text"],
            found["title"] or "",
        )
        for found in re.finditer(
            r'^```(?P<language>\w*)(?: title="(?P<title>[\w.]+)")?\n'
            r"(?P<text>.*?)^```$",
            text,
            re.MULTILINE | re.DOTALL,
        )
    ]


def commands_of(text: str) -> list[tuple[str, str]]:
    """Returns each command of a ``console`` block and what it prints."""
    return re.findall(r"^\$ (.*)\n((?:[^$].*\n|\n)*)", text, re.MULTILINE)


def steady(text: str) -> str:
    """Returns the text with the moment that it was printed at, with ages, and the
    seconds that a restore took, taken out."""
    text = re.sub(rf"{MOMENT}(?: +\d+[smhd]\b)?", "MOMENT", text)
    return re.sub(r" in \d+\.\d s\)", " in SECONDS)", text)


def check_names(program: ast.AST) -> None:
    """Checks the imports from storesvc, and the arguments of calls of ``store``."""
    found = 0
    for node in ast.walk(program):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] == "storesvc_client":
                    for name in names:
                        getattr(import_module(module), name.name)
                        found += 1
            case ast.Call(ast.Attribute(ast.Name("store"), name), _, keywords):
                given = {word.arg: None for word in keywords if word.arg}
                inspect.signature(getattr(store, name)).bind_partial(**given)
                found += 1
    assert found
