"""Candidates of a shell that completes paths, tags, contexts and fields.

Candidates come from the store that the command line names. The shell waits for them, so
that a call has a short timeout, and an error ends the list.

A path is completed part by part, up to the first part that the command does not accept:
a namespace, a run, a step or tag, the parts of a leaf key.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from storesvc.format.names import LATEST
from storesvc_client.cli.completion import Part, Which
from storesvc_client.cli.connection import Connection
from storesvc_client.cli.paths import CheckpointPath, RunPath, is_foreign, parse_path

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from storesvc_client import Checkpoint, Client, Run

TIMEOUT: Final = 1.0
"""Maximum seconds of one call to the store."""

ENOUGH: Final = 2.0
"""Seconds after which what was found is all that the shell gets."""

_NEWEST: Final = 100
"""Checkpoints whose metrics and labels are candidates: a page of the server."""

_NAME: Final = re.compile(r"""[^\s&|~()<>=!'"]+""")
"""Name that needs no quotes of the language of --where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A completed value."""

    value: str
    is_part: bool = False
    """True if more may follow, so that the shell adds no space."""
    note: str | None = None
    """Text that some shells show next to it."""
    name: str = ""
    """The value without its quotes. If no value begins with the typed text, those whose
    name does are found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRule:
    """The paths that a parameter accepts."""

    least: Part
    """Last part that a path must have."""
    most: Part
    """Last part that it may have."""
    which: Which
    items: bool
    """True if a path ends in an item, and not in leaves."""
    contexts: bool
    """True if a context may come before it."""


def paths(rule: PathRule, context: click.Context, text: str) -> Iterator[Candidate]:
    """Yields paths that begin with a text, up to their next part."""
    connection, prefix = _connection(context), ""
    name, colon, rest = text.partition(":")
    if rule.contexts and colon and "/" not in name and "@" not in name:
        connection, prefix, text = connection.to_context(name), f"{name}:", rest
    elif rule.contexts and "/" not in text:
        for known in _context_names():
            yield Candidate(value=f"{known}:", is_part=True)
    if is_foreign(text):
        return
    with connection.open() as client:
        for found in _Reader(client, rule).paths(text):
            yield replace(found, value=prefix + found.value)


def tags(context: click.Context, _text: str) -> Iterator[Candidate]:
    """Yields the tags of the run in the argument ``path``."""
    path = context.params.get("path")
    if isinstance(path, RunPath | CheckpointPath) and not is_foreign(path.run):
        with _connection(context).open() as client:
            for tag in client.run(path.run).tags.list():
                yield Candidate(value=tag.name, note=f"step {tag.step}")


def context_names(_context: click.Context, _text: str) -> Iterator[Candidate]:
    """Yields the names of the contexts."""
    for name in _context_names():
        yield Candidate(value=name)


def conditions(context: click.Context, _text: str) -> Iterator[Candidate]:
    """Yields the fields of the records at the argument ``path``, and the metrics and
    labels of the newest checkpoints, in quotes where a condition needs them."""
    for name in _fields(context):
        if _NAME.fullmatch(name):
            yield Candidate(value=name)
        elif quote := next((quote for quote in "\"'" if quote not in name), ""):
            yield Candidate(value=f"{quote}{name}{quote}", name=name)


def orders(context: click.Context, text: str) -> Iterator[Candidate]:
    """Yields the fields that ``conditions`` yields, without quotes; each after "-" if
    the text begins with it."""
    sign = "-" if text.startswith("-") else ""
    for name in _fields(context):
        yield Candidate(value=sign + name)


def _fields(context: click.Context) -> Iterator[str]:
    from storesvc_client.cli.records.fields import schema_of

    path = context.params.get("path")
    if path is None and context.args:  # click stops at an option without its value
        path = parse_path(context.args[0])
    schema = schema_of(path, deleted=bool(context.params.get("deleted")))
    seen = set(schema.fields)
    yield from schema.fields
    if not isinstance(path, RunPath) or is_foreign(path.run):
        return
    with _connection(context).open() as client:
        run = client.run(path.run)
        for newest in islice(run.checkpoints(on_damage=lambda _: None), _NEWEST):
            for name in (*newest.metrics, *newest.labels):
                if name not in seen:
                    seen.add(name)
                    yield name


def completed(
    candidates: Callable[[click.Context, str], Iterator[Candidate]],
    context: click.Context,
    text: str,
) -> "list[CompletionItem]":
    """Returns the candidates that begin with the typed text."""
    from click.shell_completion import CompletionItem

    found, unquoted = list[Candidate](), list[Candidate]()
    ends = time.monotonic() + ENOUGH
    with suppress(Exception), context:  # a shell that completes shows no errors
        for candidate in candidates(context, text):
            if candidate.value.startswith(text):
                found.append(candidate)
            elif candidate.name.startswith(text):
                unquoted.append(candidate)
            if time.monotonic() > ends:
                break
    return [
        CompletionItem(each.value, help=each.note, is_part=each.is_part)
        # not both: a shell would replace the text by what they have in common, nothing
        for each in found or unquoted
        # a key that the shell would show as control characters is not typed either
        if each.value.isprintable()
    ]


def _connection(context: click.Context) -> Connection:
    connection = context.find_object(Connection)
    if connection is None:
        raise click.UsageError("expected a store to complete from")
    return replace(connection, timeout=min(connection.timeout, TIMEOUT))


def _context_names() -> list[str]:
    from storesvc_client.cli.config_file import read_config

    return sorted(read_config().contexts)


class _Reader:
    """Reads candidates from a store."""

    def __init__(self, client: "Client", rule: PathRule) -> None:
        self._client = client
        self._rule = rule

    def paths(self, text: str) -> Iterator[Candidate]:
        """Yields paths that begin with a text."""
        run, at, rest = text.partition("@")
        which, colon, key = rest.partition(":")
        if colon and self._rule.most >= Part.LEAF:
            return self._keys(run, which, key)
        if at and self._rule.most >= Part.CHECKPOINT:
            return self._checkpoints(run)
        if "/" in run and self._rule.most >= Part.RUN:
            return self._runs(run.partition("/")[0])
        return self._namespaces()

    def _namespaces(self) -> Iterator[Candidate]:
        seen = set[str]()
        is_part = self._rule.most > Part.NAMESPACE
        for run in self._client.runs(on_damage=lambda _: None):
            name = run.name.partition("/")[0]
            if name not in seen:  # at once: the shell waits for a short time only
                seen.add(name)
                yield Candidate(value=f"{name}/" if is_part else name, is_part=is_part)

    def _runs(self, namespace: str) -> Iterator[Candidate]:
        ending = "@" if self._rule.least > Part.RUN else ""
        for run in self._client.runs(namespace, on_damage=lambda _: None):
            yield Candidate(
                value=f"{run.name}{ending}", is_part=self._rule.most > Part.RUN
            )

    def _checkpoints(self, name: str) -> Iterator[Candidate]:
        ending = ":" if self._rule.least > Part.CHECKPOINT else ""
        is_part = self._rule.most > Part.CHECKPOINT
        for text, note in self._names_of_checkpoints(self._client.run(name)):
            value = f"{name}@{text}{ending}"
            yield Candidate(value=value, is_part=is_part, note=note)

    def _names_of_checkpoints(self, run: "Run") -> Iterator[tuple[str, str | None]]:
        if self._rule.which is Which.ANY:
            tags = [*run.tags.list()]  # an error of a run that does not exist
            yield LATEST, None
            for tag in tags:
                yield tag.name, f"step {tag.step}"
        deleted = self._rule.which is Which.DELETED
        for checkpoint in run.checkpoints(deleted=deleted, on_damage=lambda _: None):
            yield str(checkpoint.step), _note(checkpoint)

    def _keys(self, name: str, which: str, text: str) -> Iterator[Candidate]:
        from storesvc.format.names import parse_which
        from storesvc_client._values.texts import natural_key

        opened = self._client.run(name).open(parse_which(which))
        known = opened.items if self._rule.items else opened.leaves
        for key in sorted(next_parts(known, text), key=natural_key):
            value = f"{name}@{which}:{key}"
            yield Candidate(value=value, is_part=key.endswith("/"))


def next_parts(keys: Iterable[str], text: str) -> set[str]:
    """Returns the keys that begin with a text, cut after the next "/".

    >>> sorted(next_parts(["params/a/b", "params/a/c", "step"], "p"))
    ['params/']
    """
    found = set[str]()
    for key in keys:
        if key.startswith(text):
            end = key.find("/", len(text))
            found.add(key if end < 0 else key[: end + 1])
    return found


def _note(checkpoint: "Checkpoint") -> str | None:
    from storesvc_client._values.texts import pairs_text, printable

    text = pairs_text(checkpoint.metrics)
    return printable(text) if checkpoint.metrics else None
