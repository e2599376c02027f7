"""I25: a crash test of others, ckpt-chaos (https://pypi.org/project/ckpt-chaos), kills
loops of storesvc, Orbax and Keras at each event of their files, and resumes them.

It sees the events that Python reports: not the writes of TensorStore's own code, which
``power_cuts`` and ``kills`` cut.
"""

import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from soak.outcomes import CannotRunError, Outcome

PROGRAMS: Final = Path(__file__).with_name("programs")
CONTENDERS: Final = ("ours", "orbax", "keras")


def chaos() -> Outcome:
    """Returns the outcome of ours; the note has the counts of all."""
    if find_spec("ckpt_chaos") is None:
        raise CannotRunError("pip install ckpt-chaos==0.1.8")
    outcome, notes = Outcome(), list[str]()
    for name in CONTENDERS:
        verdicts = _run(PROGRAMS / f"loop_of_{name}.py")
        if name == "ours":
            for point, verdict in verdicts:
                outcome.add(point, [] if verdict == "PASS" else [verdict])
        counts = {kind: [v for _, v in verdicts].count(kind) for _, kind in verdicts}
        notes.append(f"{name}: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
    outcome.note = "; ".join(notes)
    return outcome


def _run(program: Path) -> list[tuple[str, str]]:
    """Returns each crash point of a program, and the verdict."""
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ckpt_chaos", "run"),
                *("--step-regex", r"resumed from step (\d+)"),
                *("--result-file", "{out}/final.npy"),
                *("--", sys.executable, str(program), "{out}"),
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.findall(
        r"^(#\d+ .*?\]|no crash \(control\)) .*? "
        r"(PASS|HARD_FAIL|SILENT_DIVERGENCE|LOST_WORK)\b",
        done.stdout,
        re.MULTILINE,
    )
    if not found:
        raise CannotRunError(f"ckpt-chaos: {done.stdout[-500:]}{done.stderr[-500:]}")
    return found
