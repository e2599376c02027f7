"""The docstrings of the public API, which the reference shows: their examples run, and
arguments are described.

Each example runs over a store of its own with two checkpoints, with the names of
``_names``. Values that an example shows are of another store, so they are compared only
where ``SHOWN`` names the example.
"""

import doctest
import inspect
import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final

import numpy as np
import pytest

import storesvc_client as store
from tests.site.client_pages import MODELS, PARTS
from tests.support.examples import sampled

NOT_RUN: Final = {
    "Client.audit_entries": "a server with an audit log",
    "connect": "a server on another machine",
    "open_foreign": "a run of Orbax; docs/migration.md has one",
    "Run.watch": "never ends",
}
"""Examples that need what a test does not have."""

SHOWN: Final = ("format_policy", "progress_bar", "Client.test_permissions")
"""Examples whose values do not depend on the store."""


def _examples() -> Iterator[doctest.DocTest]:
    """Yields the docstrings with examples of the public names and their members."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    seen: set[str] = set()
    for name in dir(store):
        found = getattr(store, name)
        for kind in inspect.getmro(found) if inspect.isclass(found) else (found,):
            if not getattr(kind, "__module__", "").startswith("storesvc_client"):
                continue
            for example in finder.find(kind, kind.__name__, module=False, globs={}):
                if example.examples and example.name not in seen:
                    seen.add(example.name)
                    yield example


EXAMPLES: Final = list(_examples())


class _Batches:
    """A data iterator with a state."""

    def __init__(self) -> None:
        self._at = 0

    def __next__(self) -> int:
        self._at += 1
        return self._at

    def get_state(self) -> dict[str, int]:
        return {"at": self._at}

    def set_state(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def _names(client: store.Client) -> dict[str, Any]:
    """Returns what the examples use, over a store with two checkpoints."""
    run, batches = client.run("prod/llama-8b"), _Batches()
    state = {"params": {"kernel": np.ones((512, 512), np.float32)}}
    items = {"config": {"layers": 32}, "data": batches}
    run.save(40, state, metrics={"loss": 2.1}).result()
    run.tags.set("best", 40)
    run.save(50, state, metrics={"loss": 2.0}, items=items).result()
    return {
        **{name: getattr(store, name) for name in dir(store)},
        "batches": batches,
        "client": client,
        "global_batches": 7,
        "init_state": state,
        "items": run.items(50),
        "iterator": batches,
        "iterator_state": {"at": 9},
        "json": json,
        "run": run,
        "state": state,
        "step": 60,
        "timedelta": timedelta,
        "total": 52,
        "train_step": lambda state, batch: (state, float(batch)),
    }


@pytest.mark.parametrize(
    "example",
    sampled([found for found in EXAMPLES if found.name not in NOT_RUN], every=3),
    ids=lambda found: found.name,
)
def test_an_example_of_the_reference_runs(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    places: dict[str, str] = {
        "file:///tmp/ckpts": (tmp_path / "store").as_uri(),
        "gs://lab/store": (tmp_path / "lab").as_uri(),
        '"/ckpts"': repr(str(tmp_path / "ckpts")),
        "/models/llama": str(tmp_path / "llama"),
        "steps=[100]": "steps=[50]",
    }
    with store.connect((tmp_path / "store").as_uri()) as client:
        names = _names(client)
        for part in example.examples:
            source = part.source
            for place, own in places.items():
                source = source.replace(place, own)
            value = _executed(source, names)
            if example.name in SHOWN:
                assert part.want.strip() == ("" if value is None else repr(value))


def _executed(source: str, names: dict[str, Any]) -> object:
    """Returns the value of the last statement, as an interpreter would show it."""
    shown: list[object] = []
    hook: Callable[[object], None] = shown.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.displayhook", hook)
        exec(compile(source, "<example>", "single"), names)
    return next((value for value in shown if value is not None), None)


def test_examples_that_do_not_run_are_few_and_exist() -> None:
    found = [example.name for example in EXAMPLES]

    assert NOT_RUN.keys() | set(SHOWN) <= set(found)
    assert len(found) - len(NOT_RUN) > 25


def _reference() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the functions of the reference, and the methods of its classes."""
    modules = {"storesvc_client": dir(store), **MODELS}
    paths = [f"{module}.{name}" for module, names in modules.items() for name in names]
    for path in (*paths, *chain.from_iterable(PARTS.values())):
        found = resolve_name(path)
        if inspect.isfunction(found):
            yield path, found
        elif inspect.isclass(found):
            for name, member in inspect.getmembers(found, inspect.isroutine):
                if name[0] != "_" and "storesvc" in getattr(member, "__module__", ""):
                    yield f"{path}.{name}", inspect.unwrap(member)


def test_the_reference_describes_each_argument_or_says_where() -> None:
    lacking = {}
    for path, function in _reference():
        text, _, described = (inspect.getdoc(function) or "").partition("\nArgs:\n")
        found = re.findall(r"^    \**(\w+):", described, re.MULTILINE)
        wanted = inspect.signature(function).parameters
        lost = {*wanted} - {*found, "self", "cls"}
        if found and lost and "Arguments that are not listed are as for" not in text:
            lacking[path] = lost

    assert {} == lacking
