"""Processes that are forked from one that has imported what they need.

    process = fork("tests.support.jax_job", ["a", "b"], environment, log)
    process.wait(10)

Importing jax, flax and TensorStore takes longer than what most tests of several
processes do with them. In all else the processes are as if they were started: each has
its own environment and output, and ends as any interpreter does.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

PRELOADED: Final = (
    *("jax", "jax.experimental.multihost_utils", "flax.nnx", "optax"),
    *("grpc.aio", "tensorstore", "storesvc.server.embedded"),
    *("tests.support.job_parts", "tests.loop.loop_parts"),
)
"""Imported before the forks."""


class Forked:
    """A process, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid: Final = pid
        self.returncode: int | None = None
        """Exit code, or -N if signal N ended it; None while it runs."""

    def poll(self) -> int | None:
        """Returns its exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = _parent().ask({"poll": self.pid})
        return self.returncode

    def wait(self, seconds: float) -> int:
        """Waits until it ends, and returns its exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        end = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), seconds)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def fork(
    module: str, arguments: Sequence[str], environment: dict[str, str], log: Path
) -> Forked:
    """Starts a process.

    Args:
        module: Its ``main`` is called.
        arguments: Arguments of ``main``.
        environment: All environment variables of the process. What is read by an import
            of ``PRELOADED`` was read before.
        log: File to which it appends its output.
    """
    start = [module, list(arguments), environment, str(log)]
    return Forked(_parent().ask({"start": start}))


class _Parent:
    """The process that forks the others; it ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # BLAS would start threads, which do not outlast a fork
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request: dict[str, Any]) -> Any:
        """Returns its reply to a request."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        with self._lock:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            return json.loads(replies.readline())


@cache
def _parent() -> _Parent:
    return _Parent()


def _serve() -> tuple[str, list[str]] | None:
    """Forks and reports until the requests end. In a process that is forked, returns
    the module to run and its arguments."""
    for line in iter(sys.stdin.buffer.readline, b""):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        else:
            module, arguments, environment, log = request["start"]
            reply = os.fork()
            if reply == 0:
                os.environ.clear()
                os.environ.update(environment)
                _redirect(log)
                return module, arguments
        print(json.dumps(reply), flush=True)
    return None


def _redirect(log: str) -> None:
    """Lets this process read nothing, and append its output to a file."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    threads = [*Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, "other threads do not outlast a fork"
    gc.freeze()
    task = _serve()
    if task is not None:
        module, arguments = task
        importlib.import_module(module).main(*arguments)


if __name__ == "__main__":
    _main()
