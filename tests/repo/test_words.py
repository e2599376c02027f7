"""Checks that code and documents are written in plain technical English.

Each banned word is reported as ``file:line: word``. The checks read files as text and
import nothing of the product. They look at docstrings, comments, string literals of
more than one word, and Markdown. Names in code, inline code and URLs do not count.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]

BANNED: Final = (
    "amiss",
    "anew",
    "astray",
    "be it",
    "beside",
    "hearken",
    "heed",
    "heeded",
    "heeds",
    "in vain",
    "lay",
    "lie",
    "lies",
    "meanwhile",
    "nobody",
    "passes over",
    "somebody",
    "tell",
    "tells",
    "thereof",
    "those of",
    "told",
    "who has",
    "who is",
    "whoever",
    "whom",
    "whose owner",
)
"""Words and phrases that a reader has to decode."""

BANNED_AT_THE_END: Final = ("a while", "as it is", "of a kind")
"""Phrases banned at the end of a clause ("kept as it is"); they may go on ("as it is
written")."""

FIRST_WORDS: Final = (
    *("Are", "Had", "Has", "How", "Is", "Of", "That", "Those"),
    *("What", "Where", "Whether", "Which", "Who", "Whoever", "Whose"),
)
"""Words that no docstring of the product begins with."""

ALLOWED: Final[frozenset[tuple[str, str]]] = frozenset()
"""Pairs of a file and a word that the file may use, such as a word in a quoted name of
another project. Each pair needs a comment with its reason."""


def _alternatives(phrases: Iterable[str], between: str = r"\s+") -> str:
    """Matches the phrases, also where a line break separates their words."""
    return "|".join(between.join(phrase.split()) for phrase in phrases)


PATTERN: Final = re.compile(
    rf"(?<![\w-])(?:(?:{_alternatives(BANNED)})(?![\w-])"
    rf"|(?:{_alternatives(BANNED_AT_THE_END)})(?=\s*(?:[.,;:)]|\Z)))",
    re.IGNORECASE,
)
MAY_HAVE_BANNED: Final = re.compile(
    r"(?:(?<![\w-])|(?<=\\[nrt]))(?:"
    + _alternatives(
        (*BANNED, *BANNED_AT_THE_END), between=r"\W+(?:[bfru]{1,2}(?=[\"'])\W+)?"
    )
    + r")(?![\w-])",
    re.IGNORECASE,
)
"""Finds at least what ``PATTERN`` finds in the prose of a module, and takes a tenth of
the time that dividing the module into prose and code takes."""
NOT_PROSE: Final = re.compile(r"``[^`]+``|`[^`\n]+`|https?://\S+|(?<=\]\()[^)\n]+")
"""Inline code, URLs and the targets of links."""

STRING: Final = re.compile(r"[a-z]*(\"\"\"|'''|\"|')(.*)\1", re.IGNORECASE | re.DOTALL)
CODE_IN_STRING: Final = re.compile(r"\\[nrt]|\{[^{}]*\}")
"""Escapes, and the replacement fields of f-strings."""


@dataclass(frozen=True, slots=True)
class Prose:
    """A docstring, a comment, a literal or a document, and the line it begins at."""

    line: int
    text: str

    def hits(self) -> Iterator[tuple[int, str]]:
        """Yields the line and the word of each banned word."""
        text = NOT_PROSE.sub(_blanked, self.text)
        for found in PATTERN.finditer(text):
            line = self.line + text.count("\n", 0, found.start())
            yield line, " ".join(found[0].lower().split())


def _blanked(found: re.Match[str]) -> str:
    """Returns as many lines without a word."""
    return re.sub(r"[^\n]+", "_", found[0])


def prose_of_python(source: str) -> Iterator[Prose]:
    """Yields docstrings, comments, and string literals of more than one word."""
    pieces: list[tuple[int, str]] = []
    kind = 0
    for token in _tokens(source):
        if token.type in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            continue
        is_next_comment = (
            token.type == tokenize.COMMENT and token.line.lstrip()[0] == "#"
        )
        joins = token.type == kind and (kind == tokenize.STRING or is_next_comment)
        if not joins:
            yield from _joined(pieces)
            pieces = []
        kind = token.type
        if kind == tokenize.COMMENT:
            pieces.append((token.start[0], token.string.lstrip("#")))
        elif kind == tokenize.STRING:
            literal = STRING.fullmatch(token.string)
            assert literal is not None, token
            text = CODE_IN_STRING.sub(lambda code: " _ ", literal[2])
            pieces.append((token.start[0], text))


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    """Yields the tokens of a module, each f-string as one, as Python 3.11 does."""
    begins = getattr(tokenize, "FSTRING_START", None)
    ends = getattr(tokenize, "FSTRING_END", None)
    lines, depth, start = source.splitlines(keepends=True), 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == begins:
            depth += 1
            start = token.start if depth == 1 else start
        if not depth:
            yield token
        if token.type == ends:
            depth -= 1
            if not depth:
                text = _between(lines, start, token.end)
                yield tokenize.TokenInfo(tokenize.STRING, text, start, token.end, "")


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Returns the source between two positions of tokens."""
    taken = lines[start[0] - 1 : end[0]]
    taken[-1] = taken[-1][: end[1]]
    taken[0] = taken[0][start[1] :]
    return "".join(taken)


def _joined(pieces: list[tuple[int, str]]) -> Iterator[Prose]:
    """Yields adjacent literals, or the lines of a comment, as one text."""
    text, line = "", 0
    for start, piece in pieces:
        text += "\n" * (start - line - text.count("\n") if text else 0) + piece
        line = line or start
    if len(text.split()) > 1:
        yield Prose(line, text)


def prose_of_proto(source: str) -> Iterator[Prose]:
    """Yields the comments of a .proto file."""
    lines = [line.partition("//")[2] for line in source.splitlines()]
    yield Prose(1, "\n".join(lines))


def prose_of_comments(source: str) -> Iterator[Prose]:
    """Yields the comments of a file in which ``#`` begins them."""
    lines = [re.split(r"(?:^|\s)#", line, maxsplit=1) for line in source.splitlines()]
    yield Prose(1, "\n".join("".join(parts[1:]) for parts in lines))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields docstrings, those of attributes too, and the lines they begin at."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", ()) if _has_statements(node) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def _has_statements(node: ast.AST) -> bool:
    return isinstance(getattr(node, "body", None), list)


def product_files() -> list[Path]:
    """Returns the modules of the service and the client, as they are installed."""
    found: list[Path] = []
    for package in ("storesvc", "storesvc_client"):
        spec = find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            found += sorted(Path(folder).rglob("*.py"))
    return found


def documents() -> list[Path]:
    """Returns the Markdown of the repository."""
    folders = [ROOT / name for name in ("docs", "deploy", "benchmarks", "soak")]
    found = sorted(ROOT.glob("*.md"))
    for folder in folders:
        found += sorted(folder.rglob("*.md"))
    return found


def configuration() -> list[Path]:
    """Returns the files of the repository that have comments and are no modules."""
    found = [ROOT / name for name in ("Makefile", "mkdocs.yml", "pyproject.toml")]
    found += sorted((ROOT / "deploy").rglob("*.yaml"))
    return [*found, ROOT / "deploy" / "Dockerfile"]


def shown(path: Path) -> str:
    """Returns the path from the root of the repository, or from the installation."""
    if path.is_relative_to(ROOT):
        return str(path.relative_to(ROOT))
    return str(path).partition("site-packages/")[2] or str(path)


def banned_words(path: Path) -> Iterator[str]:
    source = path.read_text()
    match path.suffix:
        case ".py":
            prose = (
                prose_of_python(source) if MAY_HAVE_BANNED.search(source) else iter(())
            )
        case ".proto":
            prose = prose_of_proto(source)
        case ".md":
            prose = iter([Prose(1, source)])
        case _:
            prose = prose_of_comments(source)
    for part in prose:
        for line, word in part.hits():
            if (shown(path), word) not in ALLOWED:
                yield f"{shown(path)}:{line}: {word}"


def check(hits: Iterable[str]) -> None:
    lines = sorted(hits)
    assert not lines, "\n".join((f"{len(lines)} found:", *lines))


def test_the_product_uses_no_banned_word() -> None:
    files = product_files()

    assert len(files) > 200
    check(hit for path in files for hit in banned_words(path))


def test_the_contract_uses_no_banned_word() -> None:
    # the installed package holds generated code only
    files = sorted((ROOT / "proto").rglob("*.proto"))

    check(hit for path in files for hit in banned_words(path))


def test_the_tests_use_no_banned_word() -> None:
    files = [
        path
        for folder in ("tests", "benchmarks", "soak")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    files.remove(Path(__file__))

    check(hit for path in files for hit in banned_words(path))


def test_the_documents_use_no_banned_word() -> None:
    files = documents()

    assert len(files) > 3
    check(hit for path in files for hit in banned_words(path))


def test_the_configuration_uses_no_banned_word() -> None:
    check(hit for path in configuration() for hit in banned_words(path))


def test_no_docstring_of_the_product_begins_with_a_question_word() -> None:
    check(
        f"{shown(path)}:{line}: {first[0]}"
        for path in product_files()
        for line, text in docstrings(path.read_text())
        if (first := re.match(r"\s*(\w+)", text)) and first[1] in FIRST_WORDS
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""It tells nothing."""', [(1, "tells")]),
        ("x = 1  # as it was told\n", [(1, "told")]),
        ("# asked in\n# vain\n", [(1, "in vain")]),
        ('x = (\n    "one "\n    f"{told} lies in"\n)', [(3, "lies")]),
        ('"""One.\n\nIt is kept as it is."""', [(3, "as it is")]),
        ("told = tells['lies']  # nothing", []),
        ("x = f'a {told.tells} b'", []),
        ('"""Calls ``tell`` at https://host/tells, as it is written."""', []),
        ("# layers, besides, a make-or-lie\n", []),
        ('x = "a line\\ntold in "\n', [(1, "told")]),
        ('x = ("one in "\n    f"vain")\n', [(1, "in vain")]),
    ],
)
def test_the_check_finds_words_in_prose_only(
    source: str, expected: list[tuple[int, str]]
) -> None:
    found = [hit for prose in prose_of_python(source) for hit in prose.hits()]

    assert expected == found
    assert not found or MAY_HAVE_BANNED.search(source)
