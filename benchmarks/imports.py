"""Compares imports of other projects' checkpoints with plain reads of their files.

    python -m benchmarks imports [--gb 2] [--rounds 5] [--staging-mib 1024]
        [--on tmpfs] [--only orbax orbax-raw ...]

``read`` opens the arrays of a source with TensorStore alone and reads all into memory,
as a program that loads the checkpoint. ``scan`` drops each array once it was read, so
that its memory serves the next one: one array at a time, or four, whichever is faster.
Of safetensors, both read the bytes of each tensor. ``import`` is
``Run.import_from`` into an embedded store on the same storage, sums and fsync included.
Each runs in a new process, all in each round, in a random order, and a ratio is that
of one round. MiB is the peak of the process above its memory before the import, which
the budget bounds.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from os import environ
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.speed.files import bytes_below
from benchmarks.speed.meters import back_memory, measured
from benchmarks.speed.rounds import PLACES, SETTINGS

GB: Final = 10**9
MIB: Final = 1 << 20
BAR: Final = 0.7
"""Speed of an import, as a part of that of the read."""

WIDTH: Final = 1024
HIDDEN: Final = 4096
WORDS: Final = 32_000
BYTES_OF_A_PARAMETER: Final = 8
"""One parameter in float32, two moments in bfloat16."""

_METADATA: Final = (".zarray", "zarr.json")


def shapes_of(gb: float) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a decoder whose training state has so many GB."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (WORDS, WIDTH),
        "norm": (WIDTH,),
        "head": (WIDTH, WORDS),
    }
    layer, limit = 0, gb * GB / BYTES_OF_A_PARAMETER
    while sum(map(np.prod, shapes.values())) < limit:
        for name in ("q", "k", "v", "o"):
            shapes[f"layers/{layer}/attention/{name}"] = (WIDTH, WIDTH)
        for name in ("up", "gate"):
            shapes[f"layers/{layer}/mlp/{name}"] = (WIDTH, HIDDEN)
        shapes[f"layers/{layer}/mlp/down"] = (HIDDEN, WIDTH)
        shapes[f"layers/{layer}/norm"] = (WIDTH,)
        layer += 1
    return shapes


def _state(gb: float) -> dict[str, Any]:
    """Returns a training state of normally distributed numbers, over eight devices."""
    import jax
    import ml_dtypes

    from benchmarks.speed.states import fsdp

    draw, found = np.random.default_rng(0), dict[str, Any]()
    shapes = shapes_of(gb)
    placed = fsdp(shapes)
    for part, dtype in (
        ("params", np.float32),
        ("mu", ml_dtypes.bfloat16),
        ("nu", ml_dtypes.bfloat16),
    ):
        for key, shape in shapes.items():
            drawn = draw.standard_normal(shape, np.float32).astype(dtype)
            found[f"{part}/{key}"] = jax.device_put(drawn, placed[key])
    return found


def _orbax(folder: Path, gb: float, **options: bool) -> None:
    from benchmarks.speed.peers import Orbax

    class Configured(Orbax):
        """Orbax with options."""

    Configured.options = options
    writer = Configured(folder)
    writer.save(0, _state(gb))
    writer.close()


def _jax(folder: Path, gb: float) -> None:
    from benchmarks.speed.peers import JaxSerialization

    JaxSerialization(folder).save(0, _state(gb))


def _safetensors(folder: Path, gb: float) -> None:
    from benchmarks.speed.peers import Safetensors

    Safetensors(folder).save(0, _state(gb))


SOURCES: Final[Mapping[str, tuple[str, Callable[[Path, float], None]]]] = {
    "orbax": ("orbax", _orbax),
    "orbax-raw": ("orbax", partial(_orbax, use_zarr3=True, use_compression=False)),
    "orbax-files": ("orbax", partial(_orbax, use_ocdbt=False)),
    "orbax-files-raw": (
        "orbax",
        partial(_orbax, use_ocdbt=False, use_compression=False),
    ),
    "jax": ("jax", _jax),
    "safetensors": ("safetensors", _safetensors),
}
"""Scheme and writer of each source: Orbax with its defaults (zarr 2 in OCDBT, zstd),
with zarr 3 without compression in OCDBT, with a folder for each array, and that without
compression; jax's serialization; one safetensors file."""


def _specs(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the spec of each zarr array below a folder, in OCDBT or as files."""
    import tensorstore as ts

    for manifest in folder.rglob("manifest.ocdbt"):
        if manifest.parent.name.startswith("ocdbt.process"):
            continue
        base = {"driver": "ocdbt", "base": f"file://{manifest.parent}/"}
        for key in map(bytes.decode, ts.KvStore.open(base).result().list().result()):
            if key.endswith(_METADATA):
                at = key.rpartition("/")[0]
                driver = "zarr3" if key.endswith("zarr.json") else "zarr"
                yield {"driver": driver, "kvstore": {**base, "path": f"{at}/"}}
    for path in folder.rglob(".zarray"):
        yield {"driver": "zarr", "kvstore": f"file://{path.parent}/"}


def _arrays(folder: Path) -> Iterator[Callable[[], Any]]:
    """Yields a function that starts to read an array, for all below a folder."""
    import tensorstore as ts

    for opening in [ts.open(spec, open=True, read=True) for spec in _specs(folder)]:
        yield opening.result().read


def _tensors(folder: Path) -> Iterator[Callable[[], Any]]:
    """Yields a function that starts to read the bytes of a tensor, for all."""
    import tensorstore as ts

    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        files = ts.KvStore.open(f"file://{path.parent}/").result()
        for tensor in header.values():
            start, stop = (8 + length + at for at in tensor["data_offsets"])
            yield partial(files.read, path.name, byte_range=slice(start, stop))


def _read_all(reads: Iterable[Callable[[], Any]]) -> int:
    """Reads everything into memory; returns the size in bytes."""
    started = [read() for read in reads]
    found = [each.result() for each in started]
    return sum(map(_size, found))


def _scan(reads: Iterable[Callable[[], Any]], *, at_once: int) -> int:
    """Reads everything, some at a time, and drops it; returns the size in bytes."""
    size, started = 0, deque[Any]()
    for read in reads:
        started.append(read())
        if len(started) == at_once:
            size += _size(started.popleft().result())
    return size + sum(_size(each.result()) for each in started)


def _size(found: Any) -> int:
    return int(found.nbytes) if isinstance(found, np.ndarray) else len(found.value)


READS: Final[Mapping[str, Sequence[Callable[..., int]]]] = {
    "read": (_read_all,),
    "scan": (partial(_scan, at_once=1), partial(_scan, at_once=4)),
}


def _read(what: str, name: str, source: Path) -> dict[str, float]:
    """Measures a plain read, or the faster of two."""
    import_module("tensorstore")  # not measured
    found = []
    for way in READS[what]:
        back_memory(int(1.5 * bytes_below(source)))
        with measured() as cost:
            reads = _tensors if name == "safetensors" else _arrays
            size = way(reads(source))
        found.append({**asdict(cost), "bytes": size})
    return min(found, key=lambda each: each["seconds"])


def _import(
    name: str, source: Path, target: Path, staging_mib: int
) -> dict[str, float]:
    """Measures an import."""
    import storesvc_client as store

    staging = staging_mib * MIB
    back_memory(int(1.5 * bytes_below(source)))
    with store.connect(f"file://{target}", staging_bytes=staging) as client:
        run = client.run("bench/imports")
        list(client.runs())  # the embedded server has started
        with measured() as cost:
            (done,) = run.import_from(f"{SOURCES[name][0]}:{source}")
        size = done.checkpoint.stored_bytes
        assert done.sent_bytes == size
    return {**asdict(cost), "bytes": size}


def _worker(*arguments: str) -> dict[str, float]:
    """Runs one part in a new process; returns what it measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.imports", "--worker", *arguments],
        env=environ | SETTINGS,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _work(what: str, name: str, *rest: str) -> dict[str, float]:
    """Does one part in this process."""
    match what, rest:
        case "make", (source, gb):
            SOURCES[name][1](Path(source), float(gb))
            return {}
        case "read" | "scan", (source,):
            return _read(what, name, Path(source))
        case "import", (source, target, staging_mib):
            return _import(name, Path(source), Path(target), int(staging_mib))
    raise ValueError(what)


def _rounds(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures a source; returns the read and the import of each round."""
    found = []
    place = PLACES[options.on]
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="storesvc-bench-", dir=place) as folder:
        source = Path(folder).absolute() / "source"
        source.mkdir()
        _worker("make", name, str(source), str(options.gb))
        for _ in range(options.rounds):
            one = {}
            for what in random.sample((*READS, "import"), 3):
                if what in READS:
                    one[what] = _worker(what, name, str(source))
                    continue
                with tempfile.TemporaryDirectory(dir=folder) as target:
                    one[what] = _worker(
                        what, name, str(source), target, str(options.staging_mib)
                    )
            found.append(one)
    return found


def _row(name: str, found: Sequence[Mapping[str, Any]]) -> tuple[str, float, float]:
    """Returns the line of a source, its ratio, and its largest peak in MiB."""

    def per_gb(what: str, field: str) -> float:
        costs = (float(each[what][field] / each[what]["bytes"]) for each in found)
        return GB * median(costs)

    def ratios(what: str) -> list[float]:
        return [
            each[what]["seconds"]
            / each[what]["bytes"]
            / (each["import"]["seconds"] / each["import"]["bytes"])
            for each in found
        ]

    peak = max(each["import"]["extra_mib"] for each in found)
    line = f"{name:16}"
    for what in (*READS, "import"):
        line += f"{1 / per_gb(what, 'seconds'):8.2f}{per_gb(what, 'cpu_seconds'):10.2f}"
    for what in READS:
        some = ratios(what)
        line += f"{median(some):8.2f}{min(some):7.2f}{max(some):7.2f}"
    return f"{line}{peak:7.0f}", median(ratios("read")), peak


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staging-mib", type=int, default=1024)
    parser.add_argument("--on", choices=PLACES, default="tmpfs")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    return parser.parse_args()


def main() -> None:
    """Prints the table, and the limits that are met or missed."""
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(_work(*sys.argv[2:])))
        return
    options = _parsed()
    print(
        f"{options.gb:g} GB on {options.on}, {options.rounds} rounds, budget "
        f"{options.staging_mib} MiB\n{'':16}{'read':^18}{'scan':^18}{'import':^18}"
        f"{'import / read':^22}{'import / scan':^22}{'peak':>7}\n{'':16}"
        + f"{'GB/s':>8}{'CPU-s/GB':>10}" * 3
        + f"{'median':>8}{'min':>7}{'max':>7}" * 2
        + f"{'MiB':>7}"
    )
    for name in options.only:
        line, ratio, peak = _row(name, _rounds(name, options))
        speed = "met" if ratio >= BAR else "missed"
        memory = "met" if peak <= options.staging_mib else "missed"
        print(f"{line}  speed {speed}, memory {memory}", flush=True)


if __name__ == "__main__":
    main()
