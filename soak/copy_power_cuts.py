"""The power fails after each call that changes the target of an export or an import.

The target is absent or complete, and complete once the call has returned.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import storesvc_client as store
from soak import promises
from soak.disks import Change, Disk, cut_states, read_log
from soak.outcomes import Outcome
from soak.watched import compiled

STEP: Final = 3

_EXPORT: Final = """
import sys, storesvc_client as store
from soak import promises
root, target = sys.argv[1:]
with store.connect(root) as client:
    client.run(promises.RUN).export(3, target)
"""
_IMPORT: Final = """
import sys, storesvc_client as store
from soak import promises
root, source = sys.argv[1:]
with store.connect(root) as client:
    client.run(promises.RUN).import_from(source)
"""


def copy_power_cuts() -> Outcome:
    """Cuts the power during exports to npz and safetensors, and an import.

    Exports to Orbax link and copy files in the kernel, which the log has no line for.
    """
    outcome = Outcome()
    with promises.scratch_folder() as scratch:
        root = (scratch / "store").as_uri()
        with store.connect(root) as client:
            client.run(promises.RUN).save(STEP, _tree()).result()
        for form, name, is_whole in (
            ("npz", "out.npz", _is_whole_npz),
            ("safetensors", "out", _is_whole_safetensors),
        ):
            target = f"{form}:{{top}}/{name}"
            _cut(outcome, form, _EXPORT, (root, target), name, is_whole)
        exported = f"safetensors:{scratch}/source"
        with store.connect(root) as client:
            client.run(promises.RUN).export(STEP, exported)
        into = "file://{top}/store", exported
        _cut(outcome, "import", _IMPORT, into, "store", _is_whole_store)
    return outcome


def _cut(
    outcome: Outcome,
    what: str,
    script: str,
    arguments: tuple[str, str],
    name: str,
    is_whole: Callable[[Path], bool],
) -> None:
    """Records a process, and checks what each cut leaves of its target.

    Args:
        outcome: Gets the points.
        what: Name of the points.
        script: Program of the process.
        arguments: Its arguments, with ``{top}`` for the directory of the target.
        name: Name of the target.
        is_whole: Returns whether the target is complete; False: it is absent; raises
            if it is neither.
    """
    with promises.scratch_folder() as scratch:
        top = scratch / "top"
        top.mkdir()
        disk = Disk(top)
        filled = [each.replace("{top}", str(top)) for each in arguments]
        changes = _record(top, scratch / "calls", script, *filled)

        def is_last(number: int) -> bool:
            return number == len(changes)

        for number, point, cut in cut_states(disk, changes, is_last):
            try:
                is_lost = not is_whole(cut / name) and is_last(number)
                lost = ["it is absent"] if is_lost else []
            except Exception as e:  # noqa: BLE001 - whatever reads it may fail
                lost = [f"it is neither absent nor complete: {e!r:.200}"]
            outcome.add(f"{what} {point}", lost)


def _record(top: Path, log: Path, script: str, *arguments: str) -> list[Change]:
    """Returns the calls of a process that change files in a directory."""
    watching = {
        "LD_PRELOAD": str(compiled("syscalls.c")),
        "SOAK_ROOT": str(top),
        "SOAK_LOG": str(log),
    }
    subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | watching,
        check=True,
    )
    return read_log(log)


def _tree() -> dict[str, Any]:
    """Returns arrays: not every format has Python numbers."""
    return {k: v for k, v in promises.tree(STEP).items() if k != "step"}


def _check(found: Any) -> bool:
    expected = _tree()
    assert set(found) == set(expected), f"other names: {set(found)}"
    for key, value in expected.items():
        assert np.asarray(found[key]).tobytes() == np.asarray(value).tobytes(), key
    return True


def _is_whole_npz(target: Path) -> bool:
    return target.exists() and _check(dict(np.load(target)))


def _is_whole_safetensors(target: Path) -> bool:
    from safetensors.numpy import load_file

    file = target / "model.safetensors"
    return file.exists() and _check(load_file(file))


def _is_whole_store(root: Path) -> bool:
    with promises.copied(root) as copy, store.connect(copy.as_uri()) as client:
        run = client.run(promises.RUN)
        try:
            steps = run.steps()
        except store.NotFoundError:
            return False
        return bool(steps) and run.verify(steps[0]).ok and _check(run.restore(steps[0]))
