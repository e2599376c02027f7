"""Measures the memory of this process while something is rejected."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Asserts that what is inside takes at most a number of bytes more, at its peak.

    Not ``tracemalloc``: its stop crashes CPython 3.11 while TensorStore has threads.
    """
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    yield
    assert _status("VmHWM") - before < size


def _status(name: str) -> int:
    """Returns a number of bytes that the kernel reports for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(f"{name}:"))
