"""Facts about a function's code, to compare functions that have the same name.

All lambdas in one function have the same name. Their code distinguishes them: its
names, constants and operators, in order. Bytecode would depend on the release of
Python.
"""

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, Final

_LIBRARIES: Final = frozenset({"flax", "jax", "numpy", "optax"})
"""Libraries whose releases change the code of a function but not its behaviour."""

_HAS_DOCSTRING: Final = 0x4000000
"""Flag of code objects since Python 3.13; earlier, the first constant is the
docstring."""

_OPERATIONS: Final = frozenset({"BINARY_OP", "COMPARE_OP", "CONTAINS_OP", "IS_OP"})


def code_name(function: FunctionType) -> str:
    """Returns the module and name of the definition, ignoring wrappers."""
    module = function.__globals__.get("__name__") or "?"
    return f"{module}:{function.__code__.co_qualname}"


def facts_of(function: FunctionType) -> list[list[Any]] | None:
    """Returns names, constants and operators, or None for functions of libraries."""
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
    return not code.co_name.startswith("<")  # for example, <lambda>


def _operators(code: CodeType) -> list[str]:
    return [
        step.argrepr or step.opname
        for step in dis.get_instructions(code)
        if step.opname in _OPERATIONS or step.opname.startswith("UNARY_")
    ]
