"""Makes a real save, kills the process of another one, resumes, restores, and flips a
bit of what was stored.

``python -m storesvc_client._doctor.drill`` is the process that is killed: it reads its
arguments as JSON from stdin, prints a line when it begins to save, and saves.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from storesvc_client import Client, DataLossError, NotFoundError, StoreError, connect
from storesvc_client._doctor.findings import Finding, passed, problem
from storesvc_client._views.texts import size_text

MIB: Final = 1 << 20

_START_SECONDS: Final = 120.0
"""Maximum time for the process to import, connect and begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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


def check_saves(place: Place, measured: dict[str, float]) -> list[Finding]:
    """Saves, kills a save, resumes and restores.

    Raises:
        StoreError: The store rejects what must work.
    """
    with place.connect() as client:
        run = client.run(place.run)
        seconds = _time(lambda: run.save(1, place.make_state(1)).result())
        was_killed = _kill_a_save(place, 2, after=seconds / 2)
        resumed = _time(lambda: _save_if_absent(place, client, 2))
        begin = time.perf_counter()
        restored = {step: run.restore(step) for step in (1, 2)}
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
    killed = "a save was killed halfway" if was_killed else "a process saved"
    return [
        passed(
            "save",
            f"{size_text(place.state_bytes)} in {seconds:.2f} s; {killed}, the step "
            f"was saved again in {resumed:.2f} s, and both restored bit for bit",
        )
    ]


def _time(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _save_if_absent(place: Place, client: Client, step: int) -> None:
    run = client.run(place.run)
    try:
        run.checkpoint(step)
    except NotFoundError:
        run.save(step, place.make_state(step)).result()


def _kill_a_save(place: Place, step: int, *, after: float) -> bool:
    """Kills a process that saves a step; returns whether it had not ended before."""
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
            process.stdout.readline()  # empty if it failed, which the next save shows
            with suppress(subprocess.TimeoutExpired):
                process.wait(after)
        finally:
            process.kill()
        process.wait(_START_SECONDS)
    return process.returncode == -signal.SIGKILL


def check_flip(place: Place, flip: Callable[[], str]) -> list[Finding]:
    """Flips a bit of a data file; the store must find it.

    Args:
        place: The store, with both steps of ``check_saves``.
        flip: Flips the bit, and returns the file's name.
    """
    file = flip()
    with place.connect() as client:
        run = client.run(place.run)
        damages = [damage for step in (1, 2) for damage in run.verify(step).damages]
        rejected = 0
        for step in (1, 2):
            with suppress(DataLossError):
                run.restore(step)
                continue
            rejected += 1
    if damages and rejected:
        return [passed("flipped-bit", f"found by verify and by restore in {file}")]
    return [
        problem(
            "flipped-bit.missed",
            f"expected a flipped bit of {file} to be found, got none by "
            f"{'restore' if damages else 'verify'}",
        )
    ]


def delete_run(place: Place) -> list[Finding]:
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
    place, step = Place(**arguments["place"]), arguments["step"]
    state = place.make_state(step)
    with place.connect() as client:
        run = client.run(place.run)
        print("begins", flush=True)
        run.save(step, state).result()


if __name__ == "__main__":
    main()
