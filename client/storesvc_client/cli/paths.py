"""Parses paths into a store, and the addresses of stores.

A path narrows from left to right:

    prod                                 a namespace
    prod/llama-8b                        a run
    prod/llama-8b@latest                 a checkpoint, by step, tag or ``latest``
    prod/llama-8b@500:params/**/kernel   its leaves, by key or glob

    orbax:gs://bucket/run@500:params/**  the same of a checkpoint of another project

No run, step or tag contains "@" or ":", so a key may contain both. The key of a tree
that is a single leaf is empty: ``prod/rng@latest:`` names that leaf, and
``prod/rng@latest`` names the checkpoint.

>>> parse_path("prod/llama-8b@latest:params/**/kernel").glob
'params/**/kernel'

A place is a run or a checkpoint, and the store that has it:

    prod/llama-8b@best                       in the store of the command
    lab:prod/llama-8b@best                   in the store of a context
    gs://bucket/ckpts//prod/llama-8b@best    in a store by its root
    ckpt.example:7070//prod/llama-8b         in a store by its server

The address of a store and a path in it are separated by "//", which no run, step or tag
contains; a context and a path by ":", which none of them contains either.

>>> parse_qualified_path("lab:prod/llama-8b@best").store
ContextName(name='lab')

``ForeignStore`` opens checkpoints of other projects, for commands that read them as
they read a store's.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self, TypeAlias
from urllib.parse import urlsplit

import click

from storesvc.format.names import (
    InvalidNameError,
    RunName,
    Which,
    check_id,
    parse_which,
)
from storesvc.storage.location import parse_root
from storesvc_client._foreign.formats import FORMATS

if TYPE_CHECKING:
    from storesvc_client import Client, ForeignRun


@dataclass(frozen=True, slots=True)
class NamespacePath:
    """``prod``"""

    namespace: str

    def __str__(self) -> str:
        return self.namespace


@dataclass(frozen=True, slots=True)
class RunPath:
    """``prod/llama-8b``"""

    run: str

    def __str__(self) -> str:
        return self.run


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """``prod/llama-8b@latest``"""

    run: str
    which: Which

    def __str__(self) -> str:
        return f"{self.run}@{self.which}"


@dataclass(frozen=True, slots=True)
class LeafPath:
    """``prod/llama-8b@latest:params/**/kernel``"""

    checkpoint: CheckpointPath
    glob: str

    def __str__(self) -> str:
        return f"{self.checkpoint}:{self.glob}"


StorePath: TypeAlias = NamespacePath | RunPath | CheckpointPath | LeafPath


_FORMATS_TEXT: Final = ", ".join(f"{kind}:" for kind in FORMATS)

_STEP_OF_FOREIGN: Final = re.compile(r"@(0|[1-9][0-9]*|latest)(?::(.*))?\Z", re.DOTALL)
"""Step and glob after the URL of a run of another project, which may contain both
characters itself."""


def is_foreign(text: str) -> bool:
    """Returns whether a path leads to checkpoints of another project: whether it begins
    with the name of a format."""
    kind, colon, _ = text.partition(":")
    return bool(colon) and kind in FORMATS


def leads_to(kind: str, path: object) -> bool:
    """Returns whether a path leads to checkpoints of a format."""
    return str(path or "").startswith(f"{kind}:")


def parse_foreign_path(text: str) -> "RunPath | CheckpointPath | LeafPath":
    """Returns the path of checkpoints of another project; its run is their URL.

    >>> parse_foreign_path("orbax:gs://bucket/run@500:params/**").glob
    'params/**'
    """
    found = _STEP_OF_FOREIGN.search(text)
    if found is None:
        return RunPath(text)
    checkpoint = CheckpointPath(text[: found.start()], parse_which(found[1]))
    return checkpoint if found[2] is None else LeafPath(checkpoint, found[2])


def parse_path(text: str) -> StorePath:
    run, at, rest = text.partition("@")
    if not at:
        return _parse_run(text)
    which, colon, glob = rest.partition(":")
    checkpoint = CheckpointPath(str(RunName.parse(run)), parse_which(which))
    return LeafPath(checkpoint, glob) if colon else checkpoint


DEFAULT_PORT: Final = 7070


def parse_target(text: str) -> str:
    """Returns the store to connect to: the URI of a root, or HOST:PORT.

    A path becomes a URI, and a server without a port gets the default port of
    ``serve``:

    >>> parse_target("/ckpts"), parse_target("ckpt.example,other:7171")
    ('file:///ckpts', 'ckpt.example:7070,other:7171')
    """
    if is_foreign(text) and "/" in text:  # a host may have the name of a format
        raise InvalidNameError(
            f"store {text!r}: expected a store, got checkpoints of another project; "
            f"give them as the path of a command, such as storectl ls {text}"
        )
    if text.startswith("memory:"):
        raise InvalidNameError(
            f"store {text!r}: a memory store ends with the command that opens it; "
            "expected host:port, or a URI such as file:///ckpts"
        )
    root = parse_root(text)
    return root if "://" in root else ",".join(map(_with_port, root.split(",")))


def _with_port(server: str) -> str:
    """Adds the default port to a server of a list; ``connect`` rejects invalid ones."""
    try:
        url = urlsplit(f"//{server}")
        is_bare = (
            url.hostname
            and url.port is None
            and url.username is None
            and url.netloc == server
        )
    except ValueError:
        return server
    return f"{server}:{DEFAULT_PORT}" if is_bare and server[-1] != ":" else server


def _parse_run(text: str) -> NamespacePath | RunPath:
    if text.startswith(("/", "./", "../", "~")) or "://" in text:
        raise InvalidNameError(
            f"path {text!r}: expected a path in a store, such as prod/llama-8b; the "
            "store itself goes with --store, and a location of another project begins "
            f"with its format: {_FORMATS_TEXT}"
        )
    if ":" in text:
        raise InvalidNameError(
            f"path {text!r}: expected a checkpoint before the colon, "
            "such as prod/llama-8b@latest:params/**, or a format of another project: "
            f"{_FORMATS_TEXT}"
        )
    if "/" not in text:
        check_id(text, "namespace")
        return NamespacePath(text)
    return RunPath(str(RunName.parse(text)))


Readable: TypeAlias = "Client | ForeignStore"
"""A source of runs for a command that only reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptions:
    """Options of commands that read checkpoints of other projects; see
    ``open_foreign``."""

    keep_names: bool = False
    trust_uncommitted: bool = False

    def check(self, *paths: object) -> None:
        """Raises ``UsageError`` if an option goes with none of the paths."""
        if self.keep_names and not any(leads_to("safetensors", path) for path in paths):
            raise click.UsageError(
                "--keep-names goes with safetensors, such as safetensors:/models/llama"
            )
        if self.trust_uncommitted and not any(
            leads_to("orbax", path) for path in paths
        ):
            raise click.UsageError(
                "--trust-uncommitted goes with checkpoints of Orbax, such as "
                "orbax:gs://bucket/llama"
            )

    def select_options(self, path: object) -> "ForeignOptions":
        """Returns those that go with a path."""
        return ForeignOptions(
            keep_names=self.keep_names and leads_to("safetensors", path),
            trust_uncommitted=self.trust_uncommitted and leads_to("orbax", path),
        )


class ForeignStore:
    """Opens runs of other projects by their URLs; a context manager like a client."""

    def __init__(self, options: ForeignOptions | None = None) -> None:
        """Opens nothing yet."""
        self._options = options or ForeignOptions()
        self._runs: dict[str, ForeignRun] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, name: str) -> "ForeignRun":
        """Returns the run at a URL, which begins with the name of its format."""
        from storesvc_client import open_foreign

        if name not in self._runs:
            of_run = self._options.select_options(name)
            self._runs[name] = open_foreign(
                name,
                keep_names=of_run.keep_names,
                trust_uncommitted=of_run.trust_uncommitted,
            )
        return self._runs[name]


@dataclass(frozen=True, slots=True)
class ContextName:
    """The store of a context."""

    name: str


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """A store by its address."""

    target: str


StorePart: TypeAlias = ContextName | StoreTarget | None
"""The store of a place; None: the one of the command."""


@dataclass(frozen=True, slots=True)
class QualifiedPath:
    """A namespace, a run or a checkpoint of a store."""

    store: StorePart
    path: NamespacePath | RunPath | CheckpointPath


def parse_qualified_path(text: str) -> QualifiedPath:
    try:
        return _parse_qualified_path(text)
    except InvalidNameError as e:  # a context may have the name of a format
        if not is_foreign(text):
            raise
        raise InvalidNameError(
            f"place {text!r}: expected a run of a store, got a format of another "
            "project; storectl import reads it, and storectl export writes it"
        ) from e


def _parse_qualified_path(text: str) -> QualifiedPath:
    address, slashes, path = text.rpartition("//")
    if slashes:
        if not address or address.endswith((":", "/")):
            raise InvalidNameError(
                f"place {text!r}: expected a run after the store, such as "
                f"{text.rstrip('/')}//prod/llama-8b"
            )
        return QualifiedPath(
            StoreTarget(parse_target(address)), _parse_path(path, text)
        )
    context, colon, path = text.partition(":")
    if colon and "/" not in context and "@" not in context:
        check_id(context, "context")
        return QualifiedPath(ContextName(context), _parse_path(path, text))
    return QualifiedPath(None, _parse_path(text, text))


def _parse_path(text: str, whole: str) -> NamespacePath | RunPath | CheckpointPath:
    path = parse_path(text)
    if isinstance(path, LeafPath):
        raise InvalidNameError(
            f"place {whole!r}: expected a run or a checkpoint, such as "
            "prod/llama-8b or prod/llama-8b@latest"
        )
    return path
