"""What one is that saves and restores: this store, its peers, the floors."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax

from tests.bench.speed.states import State

Target: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]


class NotInstalledError(Exception):
    """What a contender needs is not here."""


class Contender(Protocol):
    """Saves and restores states below a directory of its own."""

    pids: Sequence[int]
    """Its other processes."""

    def save(self, step: int, state: State) -> None:
        """Saves a state; returns once it would survive a power cut."""

    def restore(self, step: int, target: Target) -> Any:
        """Returns a state, where the target says."""

    def close(self) -> None:
        """Ends its processes."""


Maker: TypeAlias = Callable[[Path], Contender]
"""Makes one below a directory; raises ``NotInstalledError``."""
