"""Tables of the results, for people."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Final, assert_never

from benchmarks.shapes import ratios
from benchmarks.shapes.bars import by_size
from benchmarks.shapes.drawing import SHAPES
from benchmarks.speed.bars import Found, Results

PHASES: Final = ("save", "restore")
OURS: Final = ("direct", "streamed", "streamed-tls")

_GB: Final = 1e9
_MB: Final = 1e6


def table(name: str, found: Found) -> str:
    """Returns the table of a shape; the first round is shown apart."""
    here = {n: rounds for n, rounds in found.items() if "absent" not in rounds[0]}
    absent = [f"{n:16}{r[0]['absent']}" for n, r in found.items() if n not in here]
    if not here:
        return "\n".join([name, *absent])
    first = next(iter(here.values()))
    size, leaves, count = first[0]["bytes"], first[0]["leaves"], len(first) - 1
    title = f"{name}: {SHAPES[name].says}; {size / _MB:,.1f} MB, {leaves:,} leaves, "
    title += f"{count} rounds after the first"
    match SHAPES[name].judged:
        case "size":
            lines = _lines(here, size / _GB, ("GB/s", "CPU-s/GB"), "first")
        case "leaves":  # their count matters, not their bytes
            lines = _lines(here, None, ("s", "CPU-s"), "first")
        case "saves":
            lines = _lines(here, None, ("ms", "CPU-ms"), "slowest")
        case never:
            assert_never(never)
    return "\n".join([title, *lines, *absent])


def _lines(
    found: Found, gigabytes: float | None, units: tuple[str, str], third: str
) -> Iterator[str]:
    """Yields the lines of contenders: speeds if the size is given, else times."""
    scale = 1000 if units[0] == "ms" else 1
    yield f"{'':16}" + "".join(f"{phase:^42}" for phase in PHASES).rstrip()
    yield f"{'':16}" + (f"{units[0]:^24}{units[1]:>16}  " * len(PHASES)).rstrip()
    columns = ("best", "median", third, "user", "sys")
    heads = "".join(f"{column:>8}" for column in columns) + "  "
    yield f"{'':16}{heads * len(PHASES)}".rstrip()
    for name, rounds in found.items():
        line = f"{name:16}"
        for phase in PHASES:
            times = [float(each[phase]["seconds"]) for each in rounds]
            last = times[0]
            if third == "slowest":
                last = _median(rounds[1:], phase, "slowest")
            for each in (min(times[1:]), median(times[1:]), last):
                shown = gigabytes / each if gigabytes else scale * each
                line += f"{shown:8.2f}"
            for mode in ("user", "sys"):
                used = _median(rounds[1:], phase, mode)
                line += f"{used / gigabytes if gigabytes else scale * used:8.2f}"
            line += "  "
        yield line.rstrip()


def ratios_table(results: Results) -> str:
    """Returns the ratios of speed to Orbax: of each shape, the worst, the median."""
    columns = [
        (name, phase)
        for name in OURS
        for phase in PHASES
        if any(ratios.to_orbax(found, name, phase) for found in results.values())
    ]
    if not columns:
        return ""
    heads = "".join(f"{f'{name} {phase}':>24}" for name, phase in columns)
    lines = [f"{'speed / orbax':16}{heads}"]
    shown: dict[tuple[str, str], list[float]] = {column: [] for column in columns}
    is_undecided = False
    for shape, found in results.items():
        line = f"{shape:16}"
        for column in columns:
            each = ratios.to_orbax(found, *column)
            if each is None:
                line += f"{'-':>24}"
                continue
            is_undecided |= not each.is_decided
            line += f"{_shown(each):>24}"
            if shape in by_size(results):
                shown[column].append(each.middle)
        lines.append(line)
    for says, over in (("worst", min), ("median", median)):
        cells = (
            f"{over(v):>10.2f}{'':14}" if v else f"{'':24}" for v in shown.values()
        )
        lines.append(f"{says:16}{''.join(cells)}".rstrip())
    lines.append("Brackets hold the median with 95 %. Worst and median leave out small")
    lines.append("leaves and small checkpoints, which have bars of their own.")
    if is_undecided:
        lines.append(
            f"?: not decided, of fewer than {ratios.LEAST_ROUNDS} rounds or wider than "
            f"{ratios.WIDTH:.0%}; more --rounds may decide."
        )
    return "\n".join(lines)


def _shown(each: ratios.Interval) -> str:
    mark = " " if each.is_decided else "?"
    return f"{each.middle:.2f} [{each.low:.2f}, {each.high:.2f}]{mark}"


def _median(rounds: Sequence[Any], phase: str, field: str) -> float:
    return float(median(each[phase][field] for each in rounds))
