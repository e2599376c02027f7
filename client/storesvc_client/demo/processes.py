"""Starts and ends the processes of the demo: a store server and training processes.

Each is a context manager and ends with its block. They run in their own sessions, so
that Ctrl-C reaches them only through these blocks.

A training process prints a line of JSON for each event. Floats travel as hexadecimal
text, so that equal text means equal bits.

>>> parse(line(Step(step=3, loss=2.5, mesh="dp=2,fsdp=2,tp=2")))
Step(step=3, loss=2.5, mesh='dp=2,fsdp=2,tp=2')
>>> parse("a warning of some library") is None
True

The job that will be killed waits at the kill point: on a slow machine the kill may
arrive late, when the job would have begun its next save or have ended. The process that
kills it finds the same point from the same events.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One update of the parameters."""

    step: int
    """Number of the update, from 1."""

    loss: float
    mesh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveBegun:
    """A save whose snapshot is complete."""

    step: int
    blocked_seconds: float
    """Seconds for which the save blocked training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint that the store has acknowledged."""

    step: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored state, bitwise equal to the saved one."""

    step: int
    mesh: str
    leaf_count: int
    size_bytes: int
    seconds: float
    digest: str
    """Digest of the restored leaves; the process stops if the saved one differs."""


Event: TypeAlias = Step | SaveBegun | Committed | Restored

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (Step, SaveBegun, Committed, Restored)
}


def line(event: Event) -> str:
    """Returns an event as a line, without a line break."""
    fields = {
        name: value.hex() if isinstance(value, float) else value
        for name, value in dataclasses.asdict(event).items()
    }
    return json.dumps({"event": type(event).__name__, **fields})


def parse(text: str) -> Event | None:
    """Returns the event of a line, or None for any other line."""
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("event")]
    except (ValueError, KeyError, AttributeError):
        return None
    floats = {field.name for field in dataclasses.fields(kind) if field.type is float}
    values: dict[str, Any] = {
        name: float.fromhex(value) if name in floats else value
        for name, value in fields.items()
    }
    return kind(**values)


_READY_SECONDS = 30.0
_STOP_SECONDS = 20.0
_STORECTL_SECONDS = 30.0


class DemoError(RuntimeError):
    """A process of the demo failed or timed out."""


class _Process:
    """A child process whose stderr goes to a file."""

    def __init__(
        self, name: str, command: list[str], log: Path, environment: dict[str, str]
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | environment,
                text=True,
                errors="replace",
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running():
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def running(self) -> bool:
        """Returns whether the process still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def failure(self, what: str) -> DemoError:
        """Returns an error with the last lines of the process's stderr."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return DemoError("\n".join([f"{self.name} {what}; its last lines:", *lines]))


class Server(_Process):
    """A store server on loopback, on a free port, over a directory."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._ready = directory / "ready"
        command = [
            *(sys.executable, "-m", "storesvc_client.cli", "serve"),
            *("--root", root.absolute().as_uri()),
            *("--port", "0"),
            *("--ready-file", str(self._ready)),
        ]
        super().__init__("The store server", command, directory / "server.log", {})

    def address(self) -> str:
        """Returns HOST:PORT, once the server serves there."""
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self._ready.exists() and (text := self._ready.read_text()).endswith(
                "\n"
            ):
                return text.strip()
            if not self.running():
                raise self.failure(f"ended with exit code {self._process.returncode}")
            time.sleep(0.02)
        raise self.failure(f"did not serve within {_READY_SECONDS:.0f} s")


class Trainer(_Process):
    """A training process."""

    def __init__(self, name: str, arguments: list[str], directory: Path) -> None:
        super().__init__(
            name,
            [sys.executable, "-m", "storesvc_client.demo.train", *arguments],
            directory / f"{name.replace(' ', '-')}.log",
            # processes on one mesh run the same program: compile it once
            {
                "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
            },
        )

    def events(self) -> Iterator[Event]:
        """Yields what the process prints, until it ends."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if (event := parse(text)) is not None:
                yield event

    def exit_code(self) -> int:
        """Returns the exit code of a process whose events have ended; negative for a
        signal."""
        try:
            return self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired as e:
            raise self.failure(f"did not end in {_STOP_SECONDS:.0f} s") from e

    def check(self) -> None:
        """Waits for the end of a process whose events have ended."""
        if (code := self.exit_code()) != 0:
            raise self.failure(f"ended with exit code {code}")


def storectl(*arguments: str, width: int) -> subprocess.CompletedProcess[str]:
    """Returns the output and the exit code of ``storectl`` with these arguments."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "storesvc_client.cli", *arguments],
            env=os.environ | {"COLUMNS": str(width)},
            capture_output=True,
            text=True,
            timeout=_STORECTL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise DemoError(
            f"storectl {arguments}: timed out after {e.timeout:.0f} s"
        ) from e


STEPS_SINCE: Final = 2
"""Steps between the last acknowledged save and the kill; a resumed job repeats them."""

_POLL_SECONDS: Final = 0.5
"""Interval of checks that the parent process still runs."""


def is_kill_point(events: Sequence[Event], *, checkpoint: int) -> bool:
    """Returns whether a job is at its kill point.

    The kill point is two steps after an acknowledged save, with no save begun since.
    """
    since = [
        at for at, event in enumerate(reversed(events)) if not isinstance(event, Step)
    ]
    if not since or since[0] < STEPS_SINCE:
        return False
    last = events[-1 - since[0]]
    return isinstance(last, Committed) and last.step >= checkpoint


def stop_at_kill_point(events: Iterable[Event], *, checkpoint: int) -> Iterator[Event]:
    """Yields the events of a job, and stops it at its kill point.

    The job waits there until its parent process ends.
    """
    parent, seen = os.getppid(), list[Event]()
    for event in events:
        seen.append(event)
        yield event
        if is_kill_point(seen, checkpoint=checkpoint):
            while os.getppid() == parent:
                time.sleep(_POLL_SECONDS)
            return
