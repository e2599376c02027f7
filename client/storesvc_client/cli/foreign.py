"""Checkpoints of other projects, for commands that read them as they read a store's."""

from typing import TYPE_CHECKING, Self, TypeAlias

if TYPE_CHECKING:
    from storesvc_client import Client, ForeignRun

Readable: TypeAlias = "Client | ForeignStore"
"""A source of runs for a command that only reads."""


class ForeignStore:
    """Opens runs of other projects by their URLs; a context manager like a client."""

    def __init__(self) -> None:
        self._runs: dict[str, ForeignRun] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, name: str) -> "ForeignRun":
        """Returns the run at a URL, which begins with the scheme of its format."""
        from storesvc_client import open_foreign

        if name not in self._runs:
            self._runs[name] = open_foreign(name)
        return self._runs[name]
