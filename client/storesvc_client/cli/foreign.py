"""Checkpoints of other projects, for commands that read them as they read a store's."""

from typing import TYPE_CHECKING, Self, TypeAlias

import click

if TYPE_CHECKING:
    from storesvc_client import Client, ForeignRun

Readable: TypeAlias = "Client | ForeignStore"
"""A source of runs for a command that only reads."""


class ForeignStore:
    """Opens runs of other projects by their URLs; a context manager like a client."""

    def __init__(self, *, keep_names: bool = False) -> None:
        """Opens nothing yet.

        Args:
            keep_names: Whether the names of tensors of safetensors are kept whole.

        """
        self._keep_names = keep_names
        self._runs: dict[str, ForeignRun] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, name: str) -> "ForeignRun":
        """Returns the run at a URL, which begins with the scheme of its format."""
        from storesvc_client import open_foreign

        if name not in self._runs:
            self._runs[name] = open_foreign(name, keep_names=self._keep_names)
        return self._runs[name]


def names_error() -> click.UsageError:
    """Returns the error of ``--keep-names`` without safetensors."""
    return click.UsageError(
        "--keep-names goes with safetensors, such as safetensors:/models/llama"
    )
