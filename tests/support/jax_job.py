"""Starts jobs of several jax processes.

    outcomes = run_job("tests.support.job_parts:saves", 4, devices=2, target=root)

Each process calls the part with the arguments, and passes its result back as JSON. jax
aborts a process that lost another one (SIGABRT), so no part runs in the test process.
"""

import importlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from tests.support.forked import Forked, fork

SECONDS = 120
"""Longest duration of a job."""

_PORT_TAKEN = -11
"""Exit code of jax if another process has taken the coordinator's port: SIGSEGV."""


@dataclass(slots=True)
class JaxJob:
    """The processes of a job."""

    part: str
    """``MODULE:FUNCTION``, called by each."""
    count: int
    devices: int
    """Devices of each process."""
    arguments: dict[str, Any]
    directory: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()))
    processes: list[Forked] = field(default_factory=list)

    def start(self) -> None:
        """Starts all of them."""
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = "127.0.0.1:{1}".format(*free.getsockname())
        flags = f"--xla_force_host_platform_device_count={self.devices}"
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        rest = [str(self.directory), json.dumps(self.arguments)]
        self.processes = [
            fork(
                "tests.support.jax_job",
                [self.part, coordinator, str(self.count), str(index), *rest],
                environment,
                self.directory / f"{index}.log",
            )
            for index in range(self.count)
        ]

    def wait(self) -> list[int]:
        """Waits for their ends, and returns their exit codes."""
        end = time.monotonic() + SECONDS
        try:
            for process in self.processes:
                process.wait(max(0.0, end - time.monotonic()))
        finally:
            self.kill()
        return [process.wait(0) for process in self.processes]

    def await_condition(self, holds: Callable[[], object]) -> None:
        """Waits until a condition holds, while all processes run."""
        end = time.monotonic() + SECONDS
        while not holds():
            assert time.monotonic() < end, self.log()
            assert all(each.poll() is None for each in self.processes), self.log()
            time.sleep(0.02)

    def await_outcomes(self, *indices: int) -> None:
        """Waits until some processes have returned, and kills the others."""
        end = time.monotonic() + SECONDS
        try:
            while not all((self.directory / f"{i}.json").exists() for i in indices):
                assert time.monotonic() < end, self.log()
                assert all(self.processes[i].poll() in (None, 0) for i in indices), (
                    self.log()
                )
                time.sleep(0.05)
        finally:
            self.kill()

    def kill(self) -> None:
        """Kills the processes that still run."""
        for process in self.processes:
            process.kill()
            process.wait(SECONDS)

    def outcome(self, index: int) -> Any:
        """Returns the result of a process."""
        return json.loads((self.directory / f"{index}.json").read_text())

    def log(self) -> str:
        """Returns the output of all processes."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in logs)


def run_job(part: str, count: int, *, devices: int, **arguments: Any) -> list[Any]:
    """Runs a job, and returns the results of its processes.

    Args:
        part: ``MODULE:FUNCTION``, called by each process.
        count: Number of processes.
        devices: Devices of each process.
        arguments: Keyword arguments of the part.
    """
    job = JaxJob(part, count, devices, arguments)
    codes: Sequence[int] = [_PORT_TAKEN]
    while _PORT_TAKEN in codes and codes[0] == _PORT_TAKEN:
        job.start()
        codes = job.wait()
    assert [0] * count == codes, job.log()
    return [job.outcome(index) for index in range(count)]


def main(
    part: str, coordinator: str, count: str, index: str, directory: str, text: str
) -> None:
    """Runs a part in one process of a job."""
    import jax

    # each process compiles its own, as on machines of their own
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(
        coordinator,
        int(count),
        int(index),
        initialization_timeout=60,
        heartbeat_timeout_seconds=100,
        shutdown_timeout_seconds=30,
    )
    module, _, function = part.partition(":")
    outcome = getattr(importlib.import_module(module), function)(**json.loads(text))
    written = Path(directory, f"{index}.partial")
    written.write_text(json.dumps(outcome))
    written.rename(written.with_suffix(".json"))
    with suppress(RuntimeError):
        jax.distributed.shutdown()
