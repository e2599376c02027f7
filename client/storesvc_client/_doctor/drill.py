"""Makes a real save, kills the process of another one, resumes, restores, flips a bit
of what was stored, and compares the ways to a store.

``python -m storesvc_client._doctor.drill`` is the process that is killed: it reads its
arguments as JSON from stdin, prints a line when it begins to save, and saves.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from storesvc_client import (
    Client,
    DataLossError,
    NotFoundError,
    Run,
    StoreError,
    UnavailableError,
    connect,
)
from storesvc_client._doctor.findings import Finding, judge, passed, problem
from storesvc_client._views.texts import size_text

MIB: Final = 1 << 20

_START_SECONDS: Final = 120.0
"""Maximum time for the process to import, connect and begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillRun:
    """A store for the drill, and the run in it."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``connect`` that are texts or booleans; ``token_file`` is a path."""
    run: str = "doctor/drill"
    state_bytes: int = 0

    def connect(self) -> Client:
        """Returns a new client of the store."""
        options = dict(self.options)
        if file := options.pop("token_file", None):
            options["token"] = Path(file)
        return connect(self.target, **options)

    def make_state(self, step: int) -> dict[str, Any]:
        """Returns the state of a step, always the same."""
        drawn = np.random.default_rng(step)
        count = self.state_bytes // 4 // 4
        return {
            f"layer{number}": drawn.integers(0, 1 << 32, count, dtype=np.uint32)
            for number in range(4)
        }

    def save(self, run: Run, step: int) -> float:
        """Saves the state of a step; returns the seconds."""
        state, begin = self.make_state(step), time.perf_counter()
        run.save(step, state).result()
        return time.perf_counter() - begin

    def restore(self, run: Run, step: int) -> float:
        """Restores a step, and compares each bit; returns the seconds."""
        begin = time.perf_counter()
        state = run.restore(step)
        seconds = time.perf_counter() - begin
        for name, leaf in self.make_state(step).items():
            if not np.array_equal(leaf, state[name]):
                raise DataLossError(
                    "expected to restore what was saved, got other bytes of "
                    f"{self.run}@{step}:{name}"
                )
        return seconds

    def rate(self, seconds: float) -> float:
        """Returns MiB per second."""
        return self.state_bytes / MIB / seconds


def check_saves(place: DrillRun, measured: dict[str, float]) -> list[Finding]:
    """Saves, kills a save, resumes and restores."""
    with place.connect() as client:
        run = client.run(place.run)
        run.save(0, {"warm": 0}).result()  # imports and connections are not measured
        seconds = place.save(run, 1)
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
            again = place.save(run, killed)
            done = f"a save was killed before its commit, made again in {again:.2f} s"
        restored = place.restore(run, 1) + place.restore(run, killed or 2)
    measured["save_mib_per_second"] = place.rate(seconds)
    measured["restore_mib_per_second"] = 2 * place.rate(restored)
    shown = f"{size_text(place.state_bytes)} in {seconds:.2f} s; {done}; "
    return [passed("save", f"{shown}both steps were restored bit for bit")]


def _kill_a_save(place: DrillRun, client: Client, step: int, *, after: float) -> bool:
    """Kills a process so many seconds after it began to save a step; returns whether
    the step is absent then."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is ours
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
    """Saves in an empty store, where each file is needed, and flips a bit, in the file
    that `flip` returns; verify and the restore must find it."""
    with place.connect() as client:
        place.save(client.run(place.run), 1)
    file, missed = flip(), list[str]()
    with place.connect() as client:
        run = client.run(place.run)
        if not run.verify(1).damages:
            missed.append("verify")
        with suppress(DataLossError):
            run.restore(1)
            missed.append("restore")
    shown = " and ".join(missed)
    wrong = f"expected a flipped bit of {file} to be found, got none by {shown}"
    fine = f"found by verify and restore in {file}"
    return judge("flipped-bit.missed", wrong if missed else "", fine)


_ROUNDS: Final = 3
COMPARED: Final = 2 * _ROUNDS
"""Saves that are compared."""

_WORTH: Final = 1.1
"""Ratio of the times from which direct is worth it."""


def compare_ways(
    place: DrillRun, root: str, reach: Callable[[], bool], measured: dict[str, float]
) -> list[Finding]:
    """Saves and restores through the server and directly in the root of its store, and
    says what to choose; `reach` returns whether this machine reaches the root."""
    refusals = []
    for more in ({}, {"lend_credentials": True}):
        options = {"direct": root, **more}
        direct = replace(place, options={**place.options, **options})
        try:
            seconds = _measure_ways(place, direct)
        except DataLossError:
            raise
        except StoreError as e:
            refusals.append(str(e))
            continue
        rates = {name: place.rate(each) for name, each in seconds.items()}
        measured |= {f"{name}_mib_per_second": rate for name, rate in rates.items()}
        shown = ", ".join(
            f"{name.replace('_', ' ')} {rate:.0f} MiB/s" for name, rate in rates.items()
        )
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        ratio = place.rate(seconds["direct_save"] + seconds["direct_restore"])
        ratio /= place.rate(seconds["streamed_save"] + seconds["streamed_restore"])
        advice = f"connect with {given}"
        if ratio < _WORTH:
            advice = "connect without direct=, which needs access to the storage"
        shown = f"{shown}; direct is {ratio:.1f} times as fast: {advice}"
        return [passed("direct", shown)]
    code = "direct.rejected" if reach() else "direct.unreachable"
    return [problem(code, refusals[0])]


def _measure_ways(streamed: DrillRun, direct: DrillRun) -> dict[str, float]:
    """Returns the fewest seconds of a save and of a restore in either way."""
    with streamed.connect() as one, direct.connect() as other:
        runs = {"streamed": one.run(direct.run), "direct": other.run(direct.run)}
        seconds = dict[str, float]()
        for step in range(10, 10 + COMPARED):
            way = ("streamed", "direct")[step % 2]
            for name, act in (("save", direct.save), ("restore", direct.restore)):
                found = act(runs[way], step)
                key = f"{way}_{name}"
                seconds[key] = min(found, seconds.get(key, found))
        return seconds


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
