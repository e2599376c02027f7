"""The store that the commands work on.

A command asks for its connection with ``@pass_connection``; nothing is imported
and nothing is sent before it is opened.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from storesvc_client import Client

DEFAULT_TARGET: Final = "127.0.0.1:7070"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Where the store is, and how to reach it."""

    target: str
    ca: Path | None
    insecure: bool
    timeout: float
    """Seconds that one call may take."""

    def open(self) -> "Client":
        """Returns a client of the store, to be used as a context manager.

        Raises:
            StoreError: The store cannot be reached.
        """
        import storesvc_client

        return storesvc_client.connect(
            self.target, ca=self.ca, insecure=self.insecure, timeout=self.timeout
        )


pass_connection = click.make_pass_decorator(Connection)
