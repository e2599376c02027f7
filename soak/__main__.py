"""``python -m soak [NAME ...]``: injects kinds of faults, and prints a table."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Final

from soak.outcomes import CannotRunError, Outcome

NAMES: Final = (
    "kills",
    "job_kills",
    "kill_points",
    "power_cuts",
    "audit_power_cuts",
    "copy_power_cuts",
    "truncations",
    "bit_flips",
    "swapped_files",
    "exchanged_records",
    "full_disks",
    "failed_syncs",
    "rivals",
    "paused_servers",
    "lost_writers",
    "lost_replies",
    "cancels",
    "chaos",
    "unconditional_storages",
    "clock_jumps",
    "identity_clocks",
    "upgrade_kills",
    "collector_races",
    "listings",
    "amplifications",
    "misbehaving",
)
"""Kinds of faults: functions, of modules of the same name unless `_MODULES` has one."""

_MODULES: Final = dict.fromkeys(
    ("truncations", "bit_flips", "swapped_files", "exchanged_records"), "damages"
)


def main() -> int:
    """Returns the exit code: 1 if there were losses."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("name", nargs="*", metavar="NAME", help=", ".join(NAMES))
    names = parser.parse_args().name or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"expected {', '.join(NAMES)}, got {', '.join(unknown)}")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.disable()
    lost, lines = 0, []
    for name in names:
        module = import_module(f"soak.{_MODULES.get(name, name)}")
        harm: Callable[[], Outcome] = getattr(module, name)
        began = time.monotonic()
        try:
            outcome = harm()
        except CannotRunError as e:
            lines.append(f"{name:24} {'-':>7} {'-':>6} {'-':>7}  not run: {e}")
            continue
        finally:
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
        for loss in outcome.losses[:20]:
            print(f"  LOST {loss}", flush=True)
        lost += len(outcome.losses)
        lines.append(
            f"{name:24} {outcome.points:7} {len(outcome.losses):6} "
            f"{time.monotonic() - began:6.0f}s  {outcome.note}"
        )
    print(f"\n{'':24} {'points':>7} {'lost':>6} {'time':>7}", *lines, sep="\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
