"""Spans of saves and restores in the profiler of jax, shown by XProf and TensorBoard.

jax is used only where the process has imported it already: no other process can profile
with it, and importing it takes longer than a list of checkpoints.

Example:
    >>> if (annotation := trace_annotation()) is not None:
    ...     with annotation("storesvc.save.plan"):
    ...         pass
"""

import sys
from contextlib import AbstractContextManager
from typing import Protocol


class TraceAnnotation(Protocol):
    """The class of jax that creates a span."""

    def __call__(self, name: str, /, **metadata: str) -> AbstractContextManager[object]:
        """Returns a context that the profiler shows under a name while it records."""


def trace_annotation() -> TraceAnnotation | None:
    """Returns the class of spans; None in a process without jax."""
    # the attribute is missing while another thread is still importing jax
    found: TraceAnnotation | None = getattr(
        sys.modules.get("jax.profiler"), "TraceAnnotation", None
    )
    return found
