"""Measures seconds, CPU seconds, memory, and bytes read from files."""

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
    """Cost of a piece of work."""

    seconds: float = 0
    cpu_seconds: float = 0
    """CPU seconds of this process and the others."""
    others_cpu_seconds: float = 0
    extra_mib: float = 0
    """Peak memory of this process minus its memory at the start."""
    others_extra_mib: float = 0
    """Peak memory of the others minus their memory at the start."""
    read_bytes: int = 0
    """Bytes that all of them read from files: ``rchar`` of the kernel, which includes
    the page cache, but neither sockets nor mapped files."""


def back_memory(size: int) -> None:
    """Touches ``size`` bytes of memory, and frees them.

    A virtual machine returns pages that were free for a second to its host; to get them
    back can take ten times as long as a copy. This must not count for or against a
    contender, so it is done before the measurement.
    """
    blocks = [np.empty(_BLOCK_BYTES, np.uint8) for _ in range(size // _BLOCK_BYTES)]
    for block in blocks:
        block[:: mmap.PAGESIZE] = 1


@contextmanager
def measured(others: Sequence[int] = ()) -> Iterator[Cost]:
    """Measures the work inside the context, by this process, others and their children.

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
    """Returns free memory of this process to the system, so that reusing it does not
    hide later allocations."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def family(pids: Sequence[int]) -> list[int]:
    """Returns processes and all their descendants."""
    found = list(pids)
    for pid in found:  # the loop appends to it
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found.extend(map(int, children.read_text().split()))
    return found


def reset_peak(pid: int) -> None:
    """Sets the peak memory of a process to its current memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_mib(pids: Sequence[int], field: str = "VmRSS") -> float:
    """Returns the sum of the processes' resident memory; with "VmHWM", of the peaks."""
    return sum(_status(pid, field) for pid in pids)


def read_bytes(pids: Sequence[int]) -> int:
    """Returns the bytes that processes have read from files; see ``Cost``."""
    return sum(
        int(Path(f"/proc/{pid}/io").read_text().split()[1])  # rchar comes first
        for pid in pids
    )


def available_bytes() -> int:
    """Returns the memory of the machine that processes can still take."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise LookupError("MemAvailable")


def _cpu(pids: Sequence[int]) -> float:
    """Returns the CPU seconds that the processes have used."""
    return sum(map(_cpu_of, pids))


def _cpu_of(pid: int) -> float:
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICK


def _status(pid: int, field: str) -> float:
    """Returns a field of a process's status, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / _MIB
    raise LookupError(field)
