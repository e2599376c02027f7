"""Every class of EasyDeL's registry, saved, and restored by class in another process.

    python -m tests.easydel.sweep [REGEX]

One process builds a small state of each class on one mesh, runs a step, saves the
state, and runs the next step. The other process restores it on another mesh, by the
class alone and by a factory, compares all bytes, and runs the same step. Prints a
table, and fails if a row fails.
"""

import json
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import jax
from easydel.infra.base_state import EasyDeLState

import storesvc_client as store
from storesvc_client.easydel import restore_state, save_state
from tests.easydel.digests import digests
from tests.easydel.registry import (
    DIMS,
    NO_FACTORY,
    OTHER_DIMS,
    UNBUILDABLE,
    Registered,
    optimizer,
    registered,
    stepped,
)

COLUMNS = (
    "built",
    "saved",
    "rehearsed",
    "by class",
    "bytes",
    "next step",
    "by factory",
)
"""Checks of each class, in order; the checks after a failed one are skipped."""


def save_each(folder: Path, names: list[str]) -> None:
    """Builds, steps and saves a state of each class; writes the digests."""
    every = registered()
    for name in names:
        row: dict[str, Any] = {"done": []}
        try:
            _save(folder, every[name], row)
        except Exception as e:  # noqa: BLE001 - any of EasyDeL's own
            row["error"] = _error_of(e)
        jax.clear_caches()
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_text(json.dumps(row))
        unfinished.rename(folder / f"{name}.json")


def _save(folder: Path, one: Registered, row: dict[str, Any]) -> None:
    state = one.state(DIMS)
    row["done"].append("built")
    row["leaves"] = digests(state)
    with store.connect((folder / one.name).as_uri()) as client:
        save = save_state(client.run("tests/registry"), state, rehearse="strict")
        save.result()
        row["done"].append("saved")
        assert save.rehearsal is not None
        assert save.rehearsal.result().ok
        row["done"].append("rehearsed")
    row["next"] = digests(stepped(state))


def restore_each(folder: Path, names: list[str]) -> bool:
    """Restores each state once it is saved; prints its row, and returns whether all
    states that can be built were restored."""
    print(f"{'class':50}" + "".join(f"{column:>10}" for column in COLUMNS))
    every = registered()
    failed = []
    for name in names:
        row = _await(folder / f"{name}.json")
        if "error" not in row:
            try:
                _restore(folder, every[name], row)
            except Exception as e:  # noqa: BLE001 - as above
                row["error"] = _error_of(e)
        jax.clear_caches()
        done = row["done"]
        line = "".join(f"{'yes' if c in done else '-':>10}" for c in COLUMNS)
        error = row.get("error", "")
        print(f"{name:50}{line}  {error.splitlines()[0][:200] if error else ''}")
        expected = UNBUILDABLE.get(name) or NO_FACTORY.get(name)
        if (expected is None and error) or (expected and expected not in error):
            failed.append(f"{name}: {error or 'is built now'}")
    print(f"{len(names)} classes, {len(failed)} failed")
    print(*failed, sep="\n", flush=True)
    return not failed


def _restore(folder: Path, one: Registered, row: dict[str, Any]) -> None:
    back = _restored(folder, one, one.model_class)
    row["done"].append("by class")
    _compare(row["leaves"], digests(back))
    row["done"].append("bytes")
    _compare(row["next"], digests(stepped(back)))
    row["done"].append("next step")
    made = _restored(folder, one, lambda: one.model(OTHER_DIMS))
    _compare(row["leaves"], digests(made))
    row["done"].append("by factory")


def _restored(folder: Path, one: Registered, model: Any) -> Any:
    with store.connect((folder / one.name).as_uri()) as client:
        return restore_state(
            client.run("tests/registry"),
            model=model,
            tx=optimizer(),
            mesh=one.config(OTHER_DIMS).mesh,
            state_class=EasyDeLState,
        )


def _compare(expected: dict[str, str], actual: dict[str, str]) -> None:
    other = [key for key in expected if expected[key] != actual.get(key)]
    other += [key for key in actual if key not in expected]
    assert not other, f"{len(other)} of {len(expected)} leaves differ: {other[:3]}"


def _await(file: Path) -> dict[str, Any]:
    while not file.exists():
        _pause(file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _pause(file: Path) -> None:
    saver = _saver
    assert saver is not None
    assert saver.poll() is None, f"no {file.name}: saver ended"
    try:
        saver.wait(0.1)
    except subprocess.TimeoutExpired:
        return


_saver: "subprocess.Popen[bytes] | None" = None


def _error_of(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"{type(error).__name__}: {error} ({where})"


def sweep(names: list[str], folder: Path) -> bool:
    """Saves in another process and restores in this one; returns whether all passed."""
    global _saver  # noqa: PLW0603 - one process, which this one waits for
    with (folder / "log").open("wb") as log:
        _saver = subprocess.Popen(
            [sys.executable, "-m", "tests.easydel.sweep", "--save", folder, *names],
            stdout=log,
            stderr=log,
        )
    try:
        return restore_each(folder, names)
    finally:
        _saver.kill()
        _saver.wait()


def _main(*arguments: str) -> int:
    if arguments[:1] == ("--save",):
        save_each(Path(arguments[1]), [*arguments[2:]])
        return 0
    pattern = re.compile(arguments[0] if arguments else "")
    names = [name for name in registered() if pattern.search(name)]
    with tempfile.TemporaryDirectory() as folder:
        return 0 if sweep(names, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
