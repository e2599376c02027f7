"""What a piece of work costs: seconds, CPU seconds, memory, bytes read from files."""

import ctypes
import gc
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

_TICK: Final = os.sysconf("SC_CLK_TCK")
_MIB: Final = 1 << 20
_BLOCK_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Cost:
    """Of a piece of work."""

    seconds: float = 0
    cpu_seconds: float = 0
    """Of this process and the others."""
    others_cpu_seconds: float = 0
    extra_mib: float = 0
    """The most memory of this process above what it had."""
    others_extra_mib: float = 0
    """The same of the others."""
    read_bytes: int = 0
    """That all of them read from files: what the kernel counts as ``rchar``. Sockets
    and mapped files are not in it, the page cache is."""


def back_memory(size: int) -> None:
    """Touches so much memory, and frees it.

    A virtual machine gives pages that were free for a second back to its host, and to
    get them again can take ten times as long as a copy. That is nobody's merit and
    nobody's fault: so it is done here, before what is measured.
    """
    blocks = [np.empty(_BLOCK_BYTES, np.uint8) for _ in range(size // _BLOCK_BYTES)]
    for block in blocks:
        block[:: mmap.PAGESIZE] = 1


@contextmanager
def measured(others: Sequence[int] = ()) -> Iterator[Cost]:
    """Measures what is done inside, by this process and others with their children.

    Yields:
        The cost, filled in at the end.
    """
    cost, own, others = Cost(), [os.getpid()], family(others)
    settle()
    for pid in (*own, *others):
        reset_peak(pid)
    held, others_held = memory_mib(own), memory_mib(others)
    cpu, others_cpu, read = _cpu(own), _cpu(others), read_bytes((*own, *others))
    began = time.perf_counter()
    try:
        yield cost
    finally:
        cost.seconds = time.perf_counter() - began
        cost.others_cpu_seconds = _cpu(others) - others_cpu
        cost.cpu_seconds = _cpu(own) - cpu + cost.others_cpu_seconds
        cost.extra_mib = memory_mib(own, "VmHWM") - held
        cost.others_extra_mib = memory_mib(others, "VmHWM") - others_held
        cost.read_bytes = read_bytes((*own, *others)) - read


def settle() -> None:
    """Gives back what this process no longer needs, lest it hide what comes next."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def family(pids: Sequence[int]) -> list[int]:
    """Returns processes and all that descend from them, such as a server's workers."""
    found = list(pids)
    for pid in found:  # grows meanwhile
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found.extend(map(int, children.read_text().split()))
    return found


def reset_peak(pid: int) -> None:
    """Makes the memory that a process has now its peak."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_mib(pids: Sequence[int], field: str = "VmRSS") -> float:
    """Returns the resident memory of processes together; of "VmHWM", their peaks."""
    return sum(_status(pid, field) for pid in pids)


def read_bytes(pids: Sequence[int]) -> int:
    """Returns the bytes that processes have read from files; see ``Cost``."""
    return sum(
        int(Path(f"/proc/{pid}/io").read_text().split()[1])  # rchar comes first
        for pid in pids
    )


def _cpu(pids: Sequence[int]) -> float:
    """CPU seconds so far."""
    return sum(map(_cpu_of, pids))


def _cpu_of(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICK


def _status(pid: int, field: str) -> float:
    """A field of a process's status, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / _MIB
    raise LookupError(field)
