"""Tables of the results, for people."""

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Final

from benchmarks.speed.bars import Found, Rounds, Verdict
from benchmarks.speed.links import bounds
from benchmarks.speed.works import OURS

GB: Final = 1e9
PHASES: Final = ("save", "restore")

_READ: Final = {
    "tmpfs": "",
    "disk": "; restores read files that were dropped from the page cache",
}


SMALL_GB: Final = 0.1
"""Size below which the table shows seconds, as they do not depend on the bytes."""


def table(work: str, place: str, found: Found) -> str:
    """Returns the table of a work: medians over the rounds, and ratios of speeds."""
    measured = {name: rounds for name, rounds in found.items() if _is_here(rounds)}
    if not measured:
        return "\n".join([f"{work} on {place}", *_absent(found)])
    size = next(iter(measured.values()))[0]["bytes"] / GB
    count = max(map(len, measured.values()))
    title = f"{work} on {place}: {size:.2f} GB, medians of {count}{_READ[place]}"
    if not all("restore" in rounds[0] for rounds in measured.values()):
        return "\n".join([title, *_figures(measured), *_absent(found)])
    lines = [title, *_phases(size, measured)]
    if work == "gcs":
        lines += _bounds(size, measured)
    lines += [*_absent(found), "", *_ratios(measured)]
    return "\n".join(lines)


def bars_table(verdicts: Iterable[Verdict]) -> str:
    """Returns the table of the bars."""
    lines = [f"{'bar':68}{'measured':>10}{'bar':>9}"]
    for verdict in verdicts:
        bar, value = verdict.bar, verdict.value
        figure = "-" if value is None else f"{value:.2f}"
        limit = f"{bar.sense} {bar.limit:g}"
        lines.append(f"{bar.what:68}{figure:>10}{limit:>9}  {verdict}")
    return "\n".join(lines)


def speed(rounds: Rounds, phase: str) -> float:
    """Returns the GB/s of a contender in a phase."""
    return float(rounds[0]["bytes"]) / GB / _seconds(rounds, phase)


def _is_here(rounds: Rounds) -> bool:
    return "absent" not in rounds[0]


def _absent(found: Found) -> Iterator[str]:
    for name, rounds in found.items():
        if not _is_here(rounds):
            yield f"{name:12}  {rounds[0]['absent']}"


def _phases(size: float, found: Found) -> Iterator[str]:
    yield f"{'':18}" + "".join(f"{phase:^34}  " for phase in PHASES).rstrip()
    is_small = size < SMALL_GB
    time, cpu_time = ("s", "CPU-s") if is_small else ("GB/s", "CPU-s/GB")
    columns = f"{time:>8}{'first':>8}{cpu_time:>10}{'MiB':>8}  "
    yield f"{'':18}{columns * len(PHASES)}".rstrip()
    for name, rounds in found.items():
        line = f"{name:18}"
        for phase in PHASES:
            cpu, extra = (
                median(each[phase][field] for each in rounds)
                for field in ("cpu_seconds", "extra_mib")
            )
            took = _seconds(rounds, phase)
            first = median(each["first"][phase] for each in rounds)
            if not is_small:
                took, first, cpu = size / took, size / first, cpu / size
            line += f"{took:8.2f}{first:8.2f}{cpu:10.2f}{extra:8.0f}  "
        yield line.rstrip()


def _bounds(size: float, found: Found) -> Iterator[str]:
    """Yields the speeds that the link bounds, and the part of them that this store
    reaches."""
    bound = {phase: each / GB for phase, each in bounds(size * GB).items()}
    rows = {"link, bound": bound}
    if "bucket" in found:
        reached = {phase: speed(found["bucket"], phase) for phase in PHASES}
        rows["of the bound"] = {
            phase: reached[phase] / bound[phase] for phase in PHASES
        }
    for name, values in rows.items():
        cells = (f"{values[phase]:8.2f}" for phase in PHASES)
        yield f"{name:18}" + (" " * 28).join(cells)


def _ratios(found: Found) -> Iterator[str]:
    others = [name for name in found if name not in OURS]
    ours = [name for name in OURS if name in found]
    if not others or not ours:
        return
    yield f"{'speed of ours':24}" + "".join(f"{f'/ {o}':>14}" for o in others)
    for name in ours:
        for phase in PHASES:
            line = f"{f'{name} {phase}':24}"
            for other in others:
                ratio = _seconds(found[other], phase) / _seconds(found[name], phase)
                line += f"{ratio:14.2f}"
            yield line


def _figures(found: Found) -> Iterator[str]:
    """Yields a line for each figure, with a column for each contender."""
    yield f"{'':20}" + "".join(f"{name:>18}" for name in found)
    fields = dict.fromkeys(
        field for rounds in found.values() for field in rounds[0] if field != "bytes"
    )
    for field in fields:
        line = f"{field.replace('_', ' '):20}"
        for rounds in found.values():
            values = [each[field] for each in rounds if field in each]
            line += f"{median(values):18,.2f}" if values else f"{'-':>18}"
        yield line


def _seconds(rounds: Rounds, phase: str) -> float:
    return float(median(each[phase]["seconds"] for each in rounds))
