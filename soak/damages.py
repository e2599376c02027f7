"""A store with one damaged file reports the damage or returns the right bytes.

- R4: each file of a store is truncated to 0 bytes, to 1, to half, and by one byte;
- R5: one bit flips, at random places, and in each byte of records and manifests;
- R6: files are missing, exchanged, or rolled back; records are replaced by records of
  other places or kinds.
"""

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from pathlib import Path

import storesvc_client as store
from soak import promises
from soak.outcomes import Outcome
from tests.support import recorded_history

RANDOM_FLIPS = 300

DAMAGE_ERRORS = (store.DataLossError, store.PreconditionError)
"""Errors that report damage, also of the format version."""


def damaged(root: Path, file: Path, damage: Callable[[Path], object]) -> list[str]:
    """Damages a copy of a store; returns the losses of readers and of a writer.

    Args:
        root: Root of a store with the steps 0 and 1.
        file: File of the store.
        damage: Changes or removes a file.
    """
    with promises.copied(root) as copy:
        damage(copy / file.relative_to(root))
        try:
            with store.connect(copy.as_uri()) as client:
                return list(_losses(client))
        except DAMAGE_ERRORS:
            return []
        except store.StoreError as e:
            return [f"expected DataLossError, got {type(e).__name__}: {e}"]


def _losses(client: store.Client) -> Iterator[str]:
    run = client.run(promises.RUN)
    for step in (0, 1):
        if not _reports_or_is_whole(client, step):
            yield f"step {step} came back with other bytes"
    # A save after the damage shares unchanged chunks with the newest step.
    try:
        promises.save(client, promises.NEXT)
    except DAMAGE_ERRORS:
        return
    if not _reports_or_is_whole(client, promises.NEXT):
        yield "a step that was saved after the damage came back with other bytes"
    # A save that shares no chunks must be whole.
    step = promises.NEXT + 1
    run.save(step, promises.tree(step), base=None).result()
    if not promises.is_whole(run.restore(step), step):
        yield "a step that shares no chunks came back with other bytes"


def _reports_or_is_whole(client: store.Client, step: int) -> bool:
    try:
        return promises.is_whole(client.run(promises.RUN).restore(step), step)
    except DAMAGE_ERRORS:
        return True


def truncations() -> Outcome:
    """Truncates every file, one after another, and restores."""
    outcome = Outcome()
    with promises.prepared(0, 1) as root:
        for file in sorted(f for f in root.rglob("*") if f.is_file()):
            size = file.stat().st_size
            for length in sorted({0, 1, size // 2, size - 1} & set(range(size))):
                point = f"{file.relative_to(root)} cut from {size} to {length}"
                cut = partial(os.truncate, length=length)
                outcome.add(point, damaged(root, file, cut))
    return outcome


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


def swapped_files() -> Outcome:
    """Removes each file, and replaces it by each other file of its directory."""
    outcome = Outcome()
    with promises.prepared(0, 1) as root:
        files = sorted(f for f in root.rglob("*") if f.is_file())
        for file in _vital(root, files):
            point = f"{file.relative_to(root)} missing"
            outcome.add(point, damaged(root, file, Path.unlink))
        for file, other in permutations(files, 2):
            if _kind(root, file) == _kind(root, other):
                point = f"{file.relative_to(root)} holds {other.relative_to(root)}"
                put = partial(shutil.copyfile, other)
                outcome.add(point, damaged(root, file, put))
    return outcome


def _vital(root: Path, files: list[Path]) -> list[Path]:
    """Returns the files that other files refer to; nothing refers to a record."""
    return [f for f in files if _kind(root, f) in ("manifests", "pool", "files")]


def _kind(root: Path, file: Path) -> str:
    """Returns the directory, which determines the kind of a file."""
    parts = file.relative_to(root).parts
    return parts[3] if parts[0] == "data" else parts[0]


def exchanged_records() -> Outcome:
    """Replaces each record by each other one, collects, and restores the record."""
    outcome = Outcome()

    async def main() -> None:
        recorded = await recorded_history.record()
        for place, other in permutations(recorded.records, 2):
            point = f"{place} holds {other}"
            held = recorded.last[other]
            found = await recorded_history.losses(recorded, place, held)
            outcome.add(point, found)

    asyncio.run(main())
    return outcome
