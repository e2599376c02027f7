"""What people type: paths into a store, and stores.

A path grows to the right, and each part narrows it:

    prod                                 a namespace
    prod/llama-8b                        a run
    prod/llama-8b@latest                 a checkpoint, by step, tag or ``latest``
    prod/llama-8b@500:params/**/kernel   leaves of it, by key or glob

No run, step or tag holds "@" or ":", so a key may hold both. The key of a
tree that is a single leaf is empty: ``prod/rng@latest:`` names that leaf, where
``prod/rng@latest`` names the checkpoint.

>>> parse_path("prod/llama-8b@latest:params/**/kernel").glob
'params/**/kernel'
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from storesvc.format.names import (
    InvalidNameError,
    RunName,
    Which,
    check_id,
    parse_which,
)


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


def parse_path(text: str) -> StorePath:
    """Returns what the text names.

    Raises:
        InvalidNameError: It names nothing that a store could hold.
    """
    run, at, rest = text.partition("@")
    if not at:
        return _parse_run(text)
    which, colon, glob = rest.partition(":")
    checkpoint = CheckpointPath(str(RunName.parse(run)), parse_which(which))
    return LeafPath(checkpoint, glob) if colon else checkpoint


DEFAULT_PORT: Final = 7070


def parse_target(text: str) -> str:
    """Returns the store to connect to: the URI of a root, or HOST:PORT.

    A path becomes a URI, and a server without a port gets the one that ``serve``
    listens at:

    >>> parse_target("/ckpts"), parse_target("ckpt.example,other:7171")
    ('file:///ckpts', 'ckpt.example:7070,other:7171')

    Raises:
        InvalidNameError: No command can work with it.
    """
    if text.startswith("memory:"):
        raise InvalidNameError(
            f"store {text!r}: a memory store ends with the command that opens it; "
            "expected host:port, or a URI such as file:///ckpts"
        )
    root = parse_root(text)
    return root if "://" in root else ",".join(map(_with_port, root.split(",")))


def parse_root(text: str) -> str:
    """Returns the root of a store as a URI, where it is given as a path."""
    if not text.startswith(("/", "./", "../", "~/")) and text not in (".", "..", "~"):
        return text
    return Path(os.path.abspath(Path(text).expanduser())).as_uri()  # noqa: PTH100 - resolve() would follow links


def _with_port(server: str) -> str:
    """A server of a list; what is none is refused by whoever connects."""
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
    if ":" in text:
        raise InvalidNameError(
            f"path {text!r}: expected a checkpoint before the colon, "
            "such as prod/llama-8b@latest:params/**"
        )
    if "/" not in text:
        check_id(text, "namespace")
        return NamespacePath(text)
    return RunPath(str(RunName.parse(text)))
