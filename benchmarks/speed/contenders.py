"""Protocol of the contenders: this store, its peers, the floors."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import jax

from benchmarks.speed.changing import State

Target: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]


class NotInstalledError(Exception):
    """The library of a contender is not installed."""


class Contender(Protocol):
    """Saves and restores states in its own directory."""

    pids: Sequence[int]
    """IDs of its other processes."""

    def save(self, step: int, state: State) -> None:
        """Saves a state; returns once it would survive a power cut."""

    def restore(self, step: int, target: Target) -> Any:
        """Returns a state with the shardings of the target."""

    def close(self) -> None:
        """Ends its processes."""


Maker: TypeAlias = Callable[[Path], Contender]
"""Makes a contender in a directory; raises ``NotInstalledError``."""
