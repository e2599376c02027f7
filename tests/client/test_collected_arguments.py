"""Public functions name their arguments; requests take them from ``locals()``."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from textwrap import dedent
from typing import Any

import pytest

import storesvc_client as store
from storesvc_client import easydel, nnx
from storesvc_client._export.elements import ExportRequest
from storesvc_client._restore.open_tree import OpenTree
from storesvc_client._values.options import RestoreRequest, SaveRequest
from storesvc_client.trees.nnx.restore_plans import Options

PAIRS: list[tuple[Callable[..., Any], Any, set[str]]] = [
    (store.Run.save, SaveRequest, set()),
    (easydel.save_state, SaveRequest, {"step", "tree", "document"}),
    (easydel.save_model, SaveRequest, {"tree", "document"}),
    (nnx.save, SaveRequest, {"tree", "document"}),
    (store.Run.restore, RestoreRequest, set()),
    (OpenTree.restore, RestoreRequest, {"mapping"}),
    (store.ForeignRun.restore, RestoreRequest, {"mapping"}),
    (easydel.restore_state, Options, {"step"}),
    (easydel.restore_model, Options, {"step", "opt_state"}),
    (nnx.restore_into, Options, {"step"}),
    (store.Run.export, ExportRequest, set()),
    (store.OpenCheckpoint.export, ExportRequest, set()),
]
"""Each function, its request, and the fields that are no arguments."""

NARROWER = {
    ("mapping", "AnyMapping | None"),  # of a document or a file alone
    ("like", "Any"),
    ("cast", "Any"),
    ("rules", "Rules | Literal[recorded] | None"),  # one type with two names
    ("missing", "Missing"),  # the leaves of an optimizer cannot be left out
}
"""Fields with their types, of which an argument may have a narrower one."""


def _parse(thing: Any) -> Any:
    return ast.parse(dedent(inspect.getsource(thing))).body[0]


def _text(annotation: ast.expr) -> str:
    return ast.unparse(annotation).replace("'", "").replace('"', "")


@pytest.mark.parametrize(
    ("function", "request_class", "others"),
    PAIRS,
    ids=[function.__qualname__ for function, _, _ in PAIRS],
)
def test_the_arguments_of_a_function_are_the_fields_of_its_request(
    function: Callable[..., Any], request_class: Any, others: set[str]
) -> None:
    parsed, given = _parse(function), inspect.signature(function).parameters
    arguments = {
        each.arg: _text(each.annotation)
        for each in (*parsed.args.args, *parsed.args.kwonlyargs)
        if each.annotation
    }
    types = {
        _text(each.target): _text(each.annotation)
        for each in _parse(request_class).body
        if isinstance(each, ast.AnnAssign)
    }
    defaults = {each.name: each.default for each in fields(request_class)}

    assert others == types.keys() - arguments.keys()
    for name in types.keys() & arguments.keys():
        if (name, types[name]) not in NARROWER:
            assert types[name] == arguments[name], name
        if defaults[name] is not MISSING:
            assert defaults[name] == given[name].default, name


@pytest.mark.parametrize(
    ("function", "request_class", "others"),
    PAIRS,
    ids=[function.__qualname__ for function, _, _ in PAIRS],
)
def test_no_argument_besides_is_ignored(
    function: Callable[..., Any], request_class: Any, others: set[str]
) -> None:
    used = {
        each.id for each in ast.walk(_parse(function)) if isinstance(each, ast.Name)
    }
    taken = {each.name for each in fields(request_class)} - others

    assert not inspect.signature(function).parameters.keys() - used - taken
