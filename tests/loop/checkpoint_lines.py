"""Counts the lines that a training script has for its checkpoints.

A line counts if the same job without checkpoints, in ``without_checkpoints/``, does not
have it. Blank lines, comments, docstrings and indentation do not count; the formatter
breaks the lines of both.

``python -m tests.loop.checkpoint_lines`` prints the table, which
docs/coming-from-orbax.md has.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[2] / "deploy" / "examples"
PLAIN: Final = Path(__file__).with_name("without_checkpoints")

SCRIPTS: Final = {
    "linen_loop.py": "linen_loop.py",
    "orbax_loop.py": "linen_loop.py",
    "nnx_loop.py": "nnx_loop.py",
    "keras_fit.py": "keras_fit.py",
}
"""Each script, and the same job without checkpoints."""

_KINDS: Final = {
    "linen_loop.py": "Linen",
    "orbax_loop.py": "Linen, with Orbax instead of storesvc",
    "nnx_loop.py": "NNX",
    "keras_fit.py": "Keras",
}
_SILENT: Final = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING),
}
"""Tokens that are no code."""


def checkpoint_lines(script: str) -> list[str]:
    """Returns the lines of an example that are there for its checkpoints."""
    plain = Counter(code_lines((PLAIN / SCRIPTS[script]).read_text()))
    return [*(Counter(code_lines((EXAMPLES / script).read_text())) - plain).elements()]


def code_lines(source: str) -> list[str]:
    """Returns the lines of a module that have code, without indentation."""
    documented = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbers = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    lines = source.splitlines()
    return [lines[number - 1].strip() for number in sorted(numbers - documented)]


def table() -> str:
    """Returns the table of docs/coming-from-orbax.md."""
    rows = [
        f"| [`{name}`](../deploy/examples/{name}) | {_KINDS[name]} "
        f"| {len(checkpoint_lines(name))} |"
        for name in SCRIPTS
    ]
    return "\n".join(
        ("| script | job | lines for checkpoints |", "|---|---|---|", *rows)
    )


if __name__ == "__main__":
    print(table())
