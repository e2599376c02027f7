"""What the code of a function says, for comparing functions that no name tells apart.

All lambdas of a function have one name. Their code tells them apart: the names that it
uses, its constants and its operators, in their order. Bytes of code would be those of
one release of Python.
"""

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

_LIBRARIES: Final = frozenset({"flax", "jax", "numpy", "optax"})
"""Their releases change the code of a function, and keep what it does."""

_HAS_DOCSTRING: Final = 0x4000000
"""The flag of code since Python 3.13; before, a docstring is the first constant."""

_OPERATIONS: Final = frozenset({"BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP"})


def code_name(function: FunctionType) -> str:
    """Returns where a function was written, whatever its wrapper calls it."""
    module = function.__globals__.get("__name__") or "?"
    return f"{module}:{function.__code__.co_qualname}"


def facts_of(function: FunctionType) -> list[list[Any]] | None:
    """Returns names, constants and operators; None for functions of libraries."""
    if code_name(function).partition(":")[0].split(".")[0] in _LIBRARIES:
        return None
    names: dict[str, None] = {}
    constants: dict[tuple[str, str], Any] = {}
    operators: list[str] = []
    for code in _codes(function.__code__):
        names.update(dict.fromkeys(code.co_names))
        for constant in _constants(code):
            constants[type(constant).__name__, repr(constant)] = constant
        operators += _operators(code)
    return [list(names), list(constants.values()), operators]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _constants(code: CodeType) -> list[Any]:
    constants = code.co_consts
    if constants and isinstance(constants[0], str) and _has_docstring(code):
        constants = constants[1:]
    return [c for c in constants if c is not None and not isinstance(c, CodeType)]


def _has_docstring(code: CodeType) -> bool:
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & _HAS_DOCSTRING)
    return not code.co_name.startswith("<")  # such as <lambda>


def _operators(code: CodeType) -> list[str]:
    return [
        step.argrepr or step.opname
        for step in dis.get_instructions(code)
        if step.opname in _OPERATIONS or step.opname.startswith("UNARY_")
    ]
