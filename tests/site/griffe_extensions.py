"""How the reference shows the code; mkdocstrings loads the classes as extensions.

- A docstring has examples as an interpreter shows them, without a fence; in Markdown,
  ``>>>`` would begin a quotation.
- A default that is a constant is shown as its value: ``timeout=60.0``.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from griffe import (
    Alias,
    AliasResolutionError,
    Attribute,
    Class,
    ExprName,
    Extension,
    Function,
    GriffeLoader,
    Module,
    Object,
)

_EXAMPLE: Final = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class DocstringFences(Extension):
    """Puts a fence around each example."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Changes the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """Returns a docstring with its examples as blocks of code."""
    return _EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", docstring)


class ConstantDefaults(Extension):
    """Replaces names of constants by their values."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Changes the functions of a package."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                default = parameter.default
                if isinstance(default, ExprName) and default.name.isupper():
                    constant = _constant(loader, default.canonical_path)
                    if constant is not None and constant.value is not None:
                        parameter.default = constant.value


def _functions(owner: Module | Class) -> Iterator[Function]:
    for member in owner.members.values():
        if isinstance(member, Alias):
            continue
        if isinstance(member, Function):
            yield member
        elif isinstance(member, Module | Class):
            yield from _functions(member)


def _constant(loader: GriffeLoader, path: str) -> Attribute | None:
    """Returns the constant of a path, or None if another package has it."""
    try:
        found = loader.modules_collection[path]
        found = found.final_target if isinstance(found, Alias) else found
    except (AliasResolutionError, KeyError):
        return None
    return found if isinstance(found, Attribute) else None
