"""Makes a real save, kills the process of another one, resumes, restores, and flips a
bit of what was stored.

``python -m storesvc_client._doctor.drill`` is the process that is killed: it reads its
arguments as JSON from stdin, prints a line when it begins to save, and saves.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from storesvc_client import (
    Client,
    DataLossError,
    NotFoundError,
    StoreError,
    UnavailableError,
    connect,
)
from storesvc_client._doctor.findings import Finding, passed, problem
from storesvc_client._views.texts import size_text

MIB: Final = 1 << 20

_START_SECONDS: Final = 120.0
"""Maximum time for the process to import, connect and begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRun:
    """A store for the drill, and the run in it."""

    target: str
    options: Mapping[str, Any]
    """Options of ``connect`` that are texts or booleans; ``token_file`` is a path."""
    run: str
    state_bytes: int

    def connect(self) -> Client:
        """Returns a new client of the store."""
        options = dict(self.options)
        if file := options.pop("token_file", None):
            options["token"] = Path(file)
        return connect(self.target, **options)

    def make_state(self, step: int) -> dict[str, Any]:
        """Returns the state of a step, always the same."""
        return make_state(step, self.state_bytes)


def make_state(seed: int, size_bytes: int) -> dict[str, Any]:
    """Returns a state of so many bytes, the same for the same seed."""
    drawn = np.random.default_rng(seed)
    count = size_bytes // 4 // 4
    return {
        f"layer{number}": drawn.integers(0, 1 << 32, count, dtype=np.uint32)
        for number in range(4)
    }


def check_saves(place: DrillRun, measured: dict[str, float]) -> list[Finding]:
    """Saves, kills a save, resumes and restores.

    Raises:
        StoreError: The store rejects what must work.
    """
    with place.connect() as client:
        run = client.run(place.run)
        run.save(0, {"warm": 0}).result()  # imports and connections are not measured
        seconds = _time(lambda: run.save(1, place.make_state(1)).result())
        killed = next(
            (
                step
                for step, share in ((2, 0.5), (3, 0.2), (4, 0.0))
                if _kill_a_save(place, client, step, after=seconds * share)
            ),
            None,
        )
        done = "no save was slow enough to kill before its commit"
        if killed is not None:
            again = _time(lambda: run.save(killed, place.make_state(killed)).result())
            done = f"a save was killed before its commit, made again in {again:.2f} s"
        begin = time.perf_counter()
        restored = {step: run.restore(step) for step in (1, killed or 2)}
        measured["restore_mib_per_second"] = (
            2 * place.state_bytes / MIB / (time.perf_counter() - begin)
        )
    measured["save_mib_per_second"] = place.state_bytes / MIB / seconds
    wrong = [
        f"{place.run}@{step}:{name}"
        for step, state in restored.items()
        for name, leaf in place.make_state(step).items()
        if not np.array_equal(leaf, state[name])
    ]
    if wrong:
        return [
            problem(
                "save.wrong",
                f"expected to restore what was saved, got other bytes of {wrong[0]}",
            )
        ]
    return [
        passed(
            "save",
            f"{size_text(place.state_bytes)} in {seconds:.2f} s; {done}; both steps "
            "were restored bit for bit",
        )
    ]


def _time(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _kill_a_save(place: DrillRun, client: Client, step: int, *, after: float) -> bool:
    """Kills a process so many seconds after it began to save a step; returns whether
    the step is absent then.

    Raises:
        UnavailableError: The process ended before it began.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        json.dump({"place": asdict(place), "step": step}, process.stdin)
        process.stdin.close()
        try:
            has_begun = bool(process.stdout.readline())
            with suppress(subprocess.TimeoutExpired):
                process.wait(after)
        finally:
            process.kill()
        process.wait(_START_SECONDS)
    if not has_begun:
        raise UnavailableError(
            f"{place.run}: expected a second process to save a step, got one that "
            f"ended with the code {process.returncode}; its output says why"
        )
    try:
        client.run(place.run).checkpoint(step)
    except NotFoundError:
        return True
    return False


def check_flip(place: DrillRun, flip: Callable[[], str]) -> list[Finding]:
    """Saves, and flips a bit of what was stored; verify and the restore must find it.

    Args:
        place: An empty store: a file of a save that was killed would be no damage.
        flip: Flips the bit, and returns the file's name.
    """
    with place.connect() as client:
        client.run(place.run).save(1, place.make_state(1)).result()
    file = flip()
    with place.connect() as client:
        run = client.run(place.run)
        damages = run.verify(1).damages
        try:
            run.restore(1)
        except DataLossError:
            if damages:
                return [passed("flipped-bit", f"found by verify and restore in {file}")]
    missed = "restore" if damages else "verify"
    return [
        problem(
            "flipped-bit.missed",
            f"expected a flipped bit of {file} to be found, got none by {missed}",
        )
    ]


def delete_run(place: DrillRun) -> list[Finding]:
    """Deletes and purges what the drill saved on a server."""
    try:
        with place.connect() as client:
            run = client.run(place.run)
            for upload in client.uploads(place.run):
                run.uploads.abort(upload.id)
            for step in run.steps():
                run.delete(step)
                run.purge(step)
    except StoreError as e:
        return [problem("clean-up.left", f"{place.run}: {e}")]
    return []


def main() -> None:
    """Saves one step, as the arguments on stdin say."""
    arguments = json.load(sys.stdin)
    place, step = DrillRun(**arguments["place"]), arguments["step"]
    state = place.make_state(step)
    with place.connect() as client:
        run = client.run(place.run)
        print("begins", flush=True)
        run.save(step, state).result()


if __name__ == "__main__":
    main()
