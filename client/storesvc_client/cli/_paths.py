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

from dataclasses import dataclass
from typing import TypeAlias

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


def check_target(text: str) -> str:
    """Returns the store to connect to, as it was given.

    Raises:
        InvalidNameError: No command can work with it.
    """
    if text.startswith("memory:"):
        raise InvalidNameError(
            f"store {text!r}: a memory store ends with the command that opens it; "
            "expected host:port, or a URI such as file:///ckpts"
        )
    if text.startswith(("/", "./", "../", "~")):
        raise InvalidNameError(
            f"store {text!r}: expected host:port, or a URI such as file:///ckpts"
        )
    return text


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
