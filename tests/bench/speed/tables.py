"""What was measured, as people read it."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

GB: Final = 1e9
PHASES: Final = ("save", "restore")
OURS: Final = ("streamed", "embedded")
BELOW: Final = ("memcpy", "files", "grpc")
"""The floors."""

Measured = Mapping[str, Sequence[Mapping[str, Any]]]
"""By contender, what each round gave."""


def table(work: str, place: str, found: Measured) -> str:
    """Returns the table of a work: medians over the rounds, then ratios of speeds."""
    return "\n".join([*_medians(work, place, found), "", *_ratios(found)])


def _medians(work: str, place: str, found: Measured) -> Iterator[str]:
    size = _size(found)
    rounds = max(map(len, found.values()))
    yield f"{work} on {place}: {size:.2f} GB, medians of {rounds}"
    yield f"{'':12}" + "".join(f"{phase:^26}  " for phase in PHASES).rstrip()
    columns = f"{'GB/s':>8}{'CPU-s/GB':>10}{'MiB':>8}  "
    yield f"{'':12}{columns * len(PHASES)}".rstrip()
    for name in found:
        line = f"{name:12}"
        for phase in PHASES:
            seconds, cpu, extra = (
                median(each[phase][field] for each in found[name])
                for field in ("seconds", "cpu_seconds", "extra_mib")
            )
            line += f"{size / seconds:8.2f}{cpu / size:10.2f}{extra:8.0f}  "
        yield line.rstrip()


def _ratios(found: Measured) -> Iterator[str]:
    others = [name for name in found if name not in OURS]
    yield f"{'speed of ours':20}" + "".join(f"{f'/ {o}':>14}" for o in others)
    for name in OURS:
        for phase in PHASES:
            if name in found:
                line = f"{f'{name} {phase}':20}"
                for other in others:
                    ratio = _seconds(found, other, phase) / _seconds(found, name, phase)
                    line += f"{ratio:14.2f}"
                yield line


def _seconds(found: Measured, name: str, phase: str) -> float:
    return float(median(each[phase]["seconds"] for each in found[name]))


def _size(found: Measured) -> float:
    return float(next(iter(found.values()))[0]["bytes"]) / GB
