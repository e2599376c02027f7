"""R4: each file of a store is truncated to 0 bytes, to 1, to half, and by one byte."""

import os
from functools import partial

from soak import promises
from soak.damages import damaged
from soak.outcomes import Outcome


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
