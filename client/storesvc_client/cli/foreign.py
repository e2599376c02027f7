"""Checkpoints of other projects, for commands that read them as they read a store's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

import click

from storesvc_client.cli.paths import is_of

if TYPE_CHECKING:
    from storesvc_client import Client, ForeignRun

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
        if self.keep_names and not any(is_of("safetensors", path) for path in paths):
            raise click.UsageError(
                "--keep-names goes with safetensors, such as safetensors:/models/llama"
            )
        if self.trust_uncommitted and not any(is_of("orbax", path) for path in paths):
            raise click.UsageError(
                "--trust-uncommitted goes with checkpoints of Orbax, such as "
                "orbax:gs://bucket/llama"
            )

    def of(self, path: object) -> "ForeignOptions":
        """Returns those that go with a path."""
        return ForeignOptions(
            keep_names=self.keep_names and is_of("safetensors", path),
            trust_uncommitted=self.trust_uncommitted and is_of("orbax", path),
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
        """Returns the run at a URL, which begins with the scheme of its format."""
        from storesvc_client import open_foreign

        if name not in self._runs:
            of_run = self._options.of(name)
            self._runs[name] = open_foreign(
                name,
                keep_names=of_run.keep_names,
                trust_uncommitted=of_run.trust_uncommitted,
            )
        return self._runs[name]
