"""Tables of the results, for people."""

from collections.abc import Iterator
from statistics import median
from typing import Any, Final, assert_never

from benchmarks.shapes import ratios
from benchmarks.shapes.bars import by_size
from benchmarks.shapes.drawing import SHAPES
from benchmarks.speed.bars import Found, Results
from benchmarks.speed.works import LOCAL

PHASES: Final = ("save", "restore")

LEGEND: Final = """\
GB/s, or the time: the best and the median round after the first, and the first of a
process. x orbax: the speed by that of Orbax, the best of both and the median of rounds.
back: the time until save returns, by that of one copy of the state into memory that was
touched before (memcpy; memcpy-new: into memory that was not). CPU x: CPU seconds by the
ones of the floor: two sums, a write and fsync (sums); for streams grpc-files. Medians
of rounds."""

_GB: Final = 1e9
_MB: Final = 1e6


def table(name: str, found: Found) -> str:
    """Returns the table of a shape; the first round is shown apart."""
    here = {n: rounds for n, rounds in found.items() if "absent" not in rounds[0]}
    absent = [f"{n:18}{r[0]['absent']}" for n, r in found.items() if n not in here]
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
    columns = ("best", "median", third, "best", "median", "user", "sys")
    line = f"{'':18}"
    for phase in PHASES:
        line += f"{f'{phase}, {units[0]}':>24}{'x orbax':>16}{units[1]:>16}"
        line += f"{'back':>8}{'CPU x':>8}" if phase == "save" else ""
    yield line.rstrip()
    heads = "".join(f"{column:>8}" for column in columns)
    yield f"{'':18}{heads}{'':16}{heads}"
    for name in found:
        cells = [
            *_cells(found, name, "save", gigabytes, units[0]),
            _ratio(found, "save", ratios.returned, name, "memcpy", not _copies(name)),
            _ratio(found, "save", ratios.cpu, name, _floor(name), name not in LOCAL),
            *_cells(found, name, "restore", gigabytes, units[0]),
        ]
        yield f"{name:18}" + "".join(f"{cell:>8}" for cell in cells)


def _cells(
    found: Found, name: str, phase: str, gigabytes: float | None, unit: str
) -> Iterator[str]:
    """Yields the cells of a phase."""
    scale = 1000 if unit == "ms" else 1
    rounds = found[name]
    later = [float(each[phase]["seconds"]) for each in rounds[1:]]
    third = float(rounds[0][phase]["seconds"])
    if unit == "ms" and phase == "save":
        third = _median(rounds[1:], phase, "slowest")
    for each in (min(later), median(later), third):
        yield f"{gigabytes / each if gigabytes else scale * each:.2f}"
    try:
        best = min(ratios.seconds(r, phase) for r in ratios.measured(found, "orbax"))
        yield f"{best / min(later):.2f}" if name != "orbax" else ""
    except LookupError:
        yield ""
    yield _ratio(found, phase, ratios.seconds, "orbax", name, name == "orbax")
    for mode in ("user", "sys"):
        used = _median(rounds[1:], phase, mode)
        yield f"{used / gigabytes if gigabytes else scale * used:.2f}"


def _ratio(
    found: Found,
    phase: str,
    figure: ratios.Figure,
    above: str,
    below: str,
    is_left_out: bool,
) -> str:
    try:
        middle = ratios.ratio(found, phase, figure, above, below).middle
    except LookupError:
        return ""
    return "" if is_left_out else f"{middle:.2f}"


def _copies(name: str) -> bool:
    """Returns whether saves of a contender go on after they returned."""
    return name.startswith("orbax") or (name in LOCAL and "none" not in name)


def _floor(name: str) -> str:
    """Returns the name of the floor of a contender."""
    if not name.startswith("streamed"):
        return "sums"
    return "grpc-files-tls" if name.endswith("tls") else "grpc-files"


def ratios_table(results: Results) -> str:
    """Returns the ratios of speed to Orbax: of each shape, the worst, the median."""
    columns = [
        (name, phase)
        for name in LOCAL
        for phase in PHASES
        if any(ratios.to_orbax(found, name, phase) for found in results.values())
    ]
    if not columns:
        return ""
    names = dict.fromkeys(name for name, _ in columns)
    lines = [
        f"{'':16}" + "".join(f"{name:>20}" for name in names),
        f"{'speed / orbax':16}" + "".join(f"{phase:>10}" for _, phase in columns),
    ]
    shown: dict[tuple[str, str], list[float]] = {column: [] for column in columns}
    is_undecided = False
    for shape, found in results.items():
        line = f"{shape:16}"
        for column in columns:
            each = ratios.to_orbax(found, *column)
            if each is None:
                line += f"{'- ':>10}"
                continue
            is_undecided |= not each.is_decided
            line += f"{each.middle:9.2f}{' ' if each.is_decided else '?'}"
            if shape in by_size(results):
                shown[column].append(each.middle)
        lines.append(line)
    for says, over in (("worst", min), ("median", median)):
        cells = (f"{over(v):9.2f} " if v else f"{'- ':>10}" for v in shown.values())
        lines.append(f"{says:16}{''.join(cells)}")
    lines.append("Worst and median leave out small leaves and small checkpoints.")
    if is_undecided:
        lines.append(
            f"?: not decided, of fewer than {ratios.LEAST_ROUNDS} rounds, or the "
            f"interval of 95 % is wider than {ratios.WIDTH:.0%}."
        )
    return "\n".join(lines)


def _median(rounds: Any, phase: str, field: str) -> float:
    return float(median(each[phase][field] for each in rounds))
