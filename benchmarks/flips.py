"""Flips one bit of a checkpoint, and counts which restores report the damage.

    python -m benchmarks.flips [--trials 20]

Saves the same arrays with storesvc and with Orbax (its defaults), and exports the
checkpoint of storesvc in the format of Orbax; flips one bit at a random place of a
random data file, restores, and restores the bit. Orbax restores its own checkpoint and
the exported one. Prints how often the damage was reported, or the right data or wrong
data returned.
"""

import argparse
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

import storesvc_client as store

TREE = {
    f"layer-{i}": np.random.default_rng(i).standard_normal(2**18, np.float32)
    for i in range(8)
}


def trial(root: Path, restore: Callable[[], Any], rng: random.Random) -> str:
    """Flips a bit below a root, restores, and repairs the file; returns the outcome."""
    files = [f for f in root.rglob("*") if f.is_file() and f.stat().st_size > 2**16]
    file = rng.choice(files)
    position = rng.randrange(file.stat().st_size)
    original = file.read_bytes()
    flipped = bytearray(original)
    flipped[position] ^= 1 << rng.randrange(8)
    file.write_bytes(flipped)
    try:
        back = restore()
    except Exception:  # noqa: BLE001 - any error reports the damage
        return "reported"
    finally:
        file.write_bytes(original)
    same = all(TREE[k].tobytes() == np.asarray(back[k]).tobytes() for k in TREE)
    return "harmless" if same else "WRONG DATA"


def main() -> None:
    """Prints the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    trials = parser.parse_args().trials
    logging.disable()
    outcomes = ("reported", "harmless", "WRONG DATA")
    print(f"{'one flipped bit':24}" + "".join(f"{o:>12}" for o in outcomes))
    with tempfile.TemporaryDirectory(prefix="storesvc-bench-") as directory:
        ours, theirs = Path(directory) / "storesvc", Path(directory) / "orbax"
        exported = Path(directory) / "exported"
        with store.connect(ours.as_uri()) as client:
            run = client.run("bench/flips")
            run.save(0, TREE).result()
            run.export(0, f"orbax:{exported}")
            item = exported / "0" / "default"
            checkpointer = ocp.StandardCheckpointer()
            checkpointer.save(theirs, TREE)
            checkpointer.wait_until_finished()
            for name, root, restore in (
                ("storesvc", ours, lambda: run.restore(0)),
                (
                    f"orbax {ocp.__version__}",
                    theirs,
                    lambda: checkpointer.restore(theirs, TREE),
                ),
                (
                    "orbax, of an export",
                    exported,
                    lambda: checkpointer.restore(item, TREE),
                ),
            ):
                rng = random.Random(0)
                seen = Counter(trial(root, restore, rng) for _ in range(trials))
                print(f"{name:24}" + "".join(f"{seen[o]:12}" for o in outcomes))


if __name__ == "__main__":
    main()
