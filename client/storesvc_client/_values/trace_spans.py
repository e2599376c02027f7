"""Spans of saves and restores in the profiler of jax, shown by XProf and TensorBoard.

jax is used only where the process has imported it already: no other process can profile
with it, and importing it takes longer than a list of checkpoints.

Example:
    >>> with trace_span("storesvc.save.plan"):
    ...     pass
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

_NOTHING: Final = nullcontext()


def trace_span(name: str, **metadata: str) -> AbstractContextManager[Any]:
    """Returns a context that the profiler of jax shows under a name while it records.

    Args:
        name: Name of the span.
        **metadata: Texts that are shown with it.
    """
    # the attribute is missing while another thread is still importing jax
    annotation = getattr(sys.modules.get("jax.profiler"), "TraceAnnotation", None)
    if annotation is None:
        return _NOTHING
    span: AbstractContextManager[Any] = annotation(name, **metadata)
    return span
