"""Completion of parameters in a shell, as values of ``shell_complete=``.

Candidates come from the store that the command line names. The shell waits for them, so
that a call has a short timeout, and an error ends the list.

A path is completed part by part, up to the first part that the command does not accept:
a namespace, a run, a step or tag, the parts of a leaf key.

Completion in bash and zsh takes the place of that of click. Readline divides words at
the characters of ``COMP_WORDBREAKS``, which "@", ":" and "=" are, and replaces only
what follows the last of them; so a candidate loses what comes before. zsh replaces the
whole word, and quotes what it inserts. What a shell would execute or expand is quoted.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
)

from storesvc.format.names import LATEST
from storesvc_client.cli.connection import Connection
from storesvc_client.cli.paths import CheckpointPath, RunPath, is_foreign, parse_path

if TYPE_CHECKING:
    from storesvc_client import Client, Run

Completer: TypeAlias = Callable[
    [click.Context, click.Parameter, str], list[CompletionItem]
]


class Part(IntEnum):
    """A part of a path, from left to right."""

    NAMESPACE = 1
    RUN = 2
    CHECKPOINT = 3
    LEAF = 4


class Which(IntEnum):
    """The checkpoints that a path may end in."""

    ANY = 1
    STEPS = 2
    """No tags, nor latest."""
    DELETED = 3
    """Steps of deleted checkpoints."""


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


def _completer(
    candidates: Callable[[click.Context, str], Iterator[Candidate]],
) -> Completer:
    """Returns a completion: the candidates that begin with the typed text."""

    def complete(
        context: click.Context, _parameter: click.Parameter, text: str
    ) -> list[CompletionItem]:
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
            # not both: they have nothing in common that a shell could put in place of
            # the text
            for each in found or unquoted
            # a key that the shell would show as control characters is not typed either
            if each.value.isprintable()
        ]

    return complete


def complete_path(
    least: Part,
    most: Part,
    *,
    which: Which = Which.ANY,
    items: bool = False,
    contexts: bool = False,
) -> Completer:
    """Returns the completion of a path, up to its next part; see ``PathRule``."""
    rule = PathRule(least=least, most=most, which=which, items=items, contexts=contexts)

    def find_paths(context: click.Context, text: str) -> Iterator[Candidate]:
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

    return _completer(find_paths)


@_completer
def complete_tag(context: click.Context, _text: str) -> Iterator[Candidate]:
    """Yields the tags of the run in the argument ``path``."""
    path = context.params.get("path")
    if isinstance(path, RunPath | CheckpointPath) and not is_foreign(path.run):
        with _connection(context).open() as client:
            for tag in client.run(path.run).tags.list():
                yield Candidate(value=tag.name, note=f"step {tag.step}")


@_completer
def complete_context(_context: click.Context, _text: str) -> Iterator[Candidate]:
    for name in _context_names():
        yield Candidate(value=name)


@_completer
def complete_condition(context: click.Context, _text: str) -> Iterator[Candidate]:
    """Yields the fields of the records at the argument ``path``, and the metrics and
    labels of the newest checkpoints, in quotes where a condition needs them."""
    for name in _fields(context):
        if _NAME.fullmatch(name):
            yield Candidate(value=name)
        elif quote := next((quote for quote in "\"'" if quote not in name), ""):
            yield Candidate(value=f"{quote}{name}{quote}", name=name)


@_completer
def complete_order(context: click.Context, text: str) -> Iterator[Candidate]:
    """Yields the fields of ``complete_condition`` without quotes; each after "-" if the
    text begins with it."""
    sign = "-" if text.startswith("-") else ""
    for name in _fields(context):
        yield Candidate(value=sign + name)


def _fields(context: click.Context) -> Iterator[str]:
    from storesvc_client.cli.parent_details import read_view

    path = context.params.get("path")
    if path is None and context.args:  # click stops at an option without its value
        path = parse_path(context.args[0])
    schema = read_view(path, deleted=bool(context.params.get("deleted"))).schema
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


def _connection(context: click.Context) -> Connection:
    connection = context.find_object(Connection)
    if connection is None:
        raise click.UsageError("expected a store to complete from")
    return replace(connection, timeout=min(connection.timeout, TIMEOUT))


def _context_names() -> list[str]:
    from storesvc_client.cli.contexts import read_config

    return sorted(read_config().contexts)


class _Reader:
    """Reads candidates from a store."""

    def __init__(self, client: "Client", rule: PathRule) -> None:
        self._client = client
        self._rule = rule

    def paths(self, text: str) -> Iterator[Candidate]:
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
        for text, note in self._checkpoint_names(self._client.run(name)):
            value = f"{name}@{text}{ending}"
            yield Candidate(value=value, is_part=is_part, note=note)

    def _checkpoint_names(self, run: "Run") -> Iterator[tuple[str, str | None]]:
        from storesvc_client._views.texts import pairs_text, printable

        if self._rule.which is Which.ANY:
            tags = [*run.tags.list()]  # an error of a run that does not exist
            yield LATEST, None
            for tag in tags:
                yield tag.name, f"step {tag.step}"
        deleted = self._rule.which is Which.DELETED
        for checkpoint in run.checkpoints(deleted=deleted, on_damage=lambda _: None):
            text = printable(pairs_text(checkpoint.metrics))
            yield str(checkpoint.step), text if checkpoint.metrics else None

    def _keys(self, name: str, which: str, text: str) -> Iterator[Candidate]:
        from storesvc.format.names import parse_which
        from storesvc_client._views.texts import natural_key

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


_LIMIT: Final = 4.0
"""Maximum seconds of a completion."""

_PLAIN: Final = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./@:%+=,-"
)
"""Characters that no shell changes."""

_SPECIAL_IN_DOUBLE_QUOTES: Final = frozenset('"$`\\')


def prepare(instruction: str) -> None:
    """Prepares this process for an instruction of a shell, such as "bash_complete": a
    completion writes no errors, and ends soon."""
    add_completion_class(_Bash)
    add_completion_class(_Zsh)
    if instruction.endswith("_complete"):
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stderr.fileno())
        timer = threading.Timer(_LIMIT, os._exit, [1])
        timer.daemon = True
        timer.start()


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedLine:
    """A command line up to the cursor."""

    words: tuple[str, ...]
    """The words before the last one, without quotes."""
    text: str
    """The last word, which may be empty, without quotes."""
    quote: str
    """The quote that is open at the cursor, or ""."""
    replaced_from: int
    """Position in ``text`` from which readline replaces it."""


def parse_line(line: str, breaks: str) -> TypedLine:
    """Returns the words of a line as bash sees them; breaks: its ``COMP_WORDBREAKS``.

    >>> parse_line("storectl ls prod/llama-8b@la", "@:=").replaced_from
    14
    """
    words: list[str] = []
    text, quote, is_word, cut = "", "", False, 0
    chars = iter(line)
    for char in chars:
        if char == quote:
            quote = ""
        elif char == "\\" and quote != "'":
            text, is_word = text + next(chars, ""), True
        elif quote:
            text += char
        elif char in "'\"":
            quote, is_word, cut = char, True, len(text)
        elif char.isspace():
            if is_word:
                words.append(text)
            text, is_word, cut = "", False, 0
        else:
            text, is_word = text + char, True
            cut = len(text) if char in breaks else cut
    return TypedLine(words=tuple(words), text=text, quote=quote, replaced_from=cut)


def quote_value(value: str, quote: str) -> str | None:
    """Returns a value as it is typed after an open quote, or without one; None if it
    cannot be."""
    match quote:
        case "'":
            return None if "'" in value else value
        case '"':
            if "!" in value:  # bash keeps a backslash before it
                return None
            special = _SPECIAL_IN_DOUBLE_QUOTES
            return "".join(f"\\{c}" if c in special else c for c in value)
        case _:
            return "".join(
                c if c in _PLAIN or ord(c) > 127 else f"\\{c}" for c in value
            )


class _Bash(BashComplete):
    """Completion in bash."""

    source_template: ClassVar[str] = """\
%(complete_func)s() {
    local line
    COMPREPLY=()
    while IFS= read -r line; do
        case "$line" in
            dir,* | file,*) compopt -o default ;;
            part,*) compopt -o nospace; COMPREPLY+=("${line#*,}") ;;
            plain,*) COMPREPLY+=("${line#*,}") ;;
        esac
    done < <(COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_LINE"]
        self._typed = parse_line(line, os.environ.get("COMP_WORDBREAKS", ""))
        return [*self._typed.words[1:]], self._typed.text

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the line of a candidate for the shell function."""
        typed = self._typed
        cut = typed.replaced_from
        if typed.text.startswith("-") and not item.value.startswith("-"):
            # click completes the value alone of --option=value
            cut -= typed.text.find("=") + 1
        value = quote_value(item.value[max(cut, 0) :], typed.quote)
        kind = "part" if item.is_part and item.type == "plain" else item.type
        return "" if value is None else f"{kind},{value}"


class _Zsh(ZshComplete):
    """Completion in zsh."""

    source_template: ClassVar[str] = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a described plain parts response
    (( ! $+commands[%(prog_name)s] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
%(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}")

    for type key descr in ${response}; do
        if [[ "$type" == "part" ]]; then
            parts+=("$key")
        elif [[ "$type" == "plain" && "$descr" == "_" ]]; then
            plain+=("$key")
        elif [[ "$type" == "plain" ]]; then
            described+=("$key":"$descr")
        elif [[ "$type" == "dir" ]]; then
            _path_files -/
        elif [[ "$type" == "file" ]]; then
            _path_files -f
        fi
    done

    [ -n "$described" ] && _describe -V unsorted described -U
    [ -n "$plain" ] && compadd -U -V unsorted -a plain
    [ -n "$parts" ] && compadd -U -S '' -V unsorted -a parts
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        words, text = super().get_completion_args()
        name, sign, _ = text.partition("=")
        # click completes the value alone of --option=value, but zsh replaces the word
        self._lead = name + sign if sign and name.startswith("--") else ""
        return words, text

    def format_completion(self, item: CompletionItem) -> str:
        """Returns the lines of a candidate for the shell function."""
        if not item.value.startswith("--"):
            item.value = self._lead + item.value
        if item.is_part:
            return f"part\n{item.value}\n_"
        return super().format_completion(item)
