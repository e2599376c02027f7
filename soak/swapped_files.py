"""R6: files that are missing, exchanged, or rolled back."""

import shutil
from functools import partial
from itertools import permutations
from pathlib import Path

from soak import promises
from soak.damages import damaged
from soak.outcomes import Outcome


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
