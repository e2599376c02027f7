"""What a piece of work costs: seconds, CPU seconds of all processes, memory."""

import os
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK: Final = os.sysconf("SC_CLK_TCK")
_MIB: Final = 1 << 20


@dataclass(slots=True)
class Cost:
    """Of a piece of work."""

    seconds: float = 0
    cpu_seconds: float = 0
    """Of this process and the given ones."""
    extra_mib: float = 0
    """The most memory of this process above what it had."""


@contextmanager
def measured(others: Sequence[int] = ()) -> Iterator[Cost]:
    """Measures what is done inside, by this process and others.

    Yields:
        The cost, filled in at the end.
    """
    cost = Cost()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    held = _status("VmRSS")
    cpu, began = _cpu(others), time.perf_counter()
    try:
        yield cost
    finally:
        cost.seconds = time.perf_counter() - began
        cost.cpu_seconds = _cpu(others) - cpu
        cost.extra_mib = _status("VmHWM") - held


def _cpu(others: Sequence[int]) -> float:
    """CPU seconds so far."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(map(_cpu_of, others))


def _cpu_of(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICK


def _status(field: str) -> float:
    """A field of our status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / _MIB
    raise LookupError(field)
