"""R5: one bit flips, at random places, and in each byte of records and manifests."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from soak import promises
from soak.damages import damaged
from soak.outcomes import Outcome

RANDOM_FLIPS = 300


def bit_flips() -> Outcome:
    """Flips bits of a store, one at a time, and restores."""
    outcome = Outcome()
    with promises.prepared(0, 1) as root:
        for file, position, bit in _flips(root, random.Random(0)):
            point = f"{file.relative_to(root)} byte {position} bit {bit}"
            flip = partial(_flip, position=position, bit=bit)
            outcome.add(point, damaged(root, file, flip))
    return outcome


def _flips(root: Path, rng: random.Random) -> Iterator[tuple[Path, int, int]]:
    files = sorted(f for f in root.rglob("*") if f.is_file() and f.stat().st_size)
    for _ in range(RANDOM_FLIPS):
        file = rng.choice(files)
        yield file, rng.randrange(file.stat().st_size), rng.randrange(8)
    for file in files:
        if file.parent.name in ("checkpoints", "manifests", "files"):
            for position in range(file.stat().st_size):
                yield file, position, rng.randrange(8)


def _flip(file: Path, *, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)
