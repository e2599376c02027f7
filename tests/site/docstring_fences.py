"""Shows the examples of docstrings as code; mkdocstrings loads it as an extension.

A docstring has examples as an interpreter shows them, without a fence. In Markdown,
``>>>`` would begin a quotation.
"""

import re
from typing import Any, Final

from griffe import Extension, Object

_EXAMPLE: Final = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class DocstringFences(Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Returns a docstring with its examples as blocks of code."""
    return _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", docstring)
