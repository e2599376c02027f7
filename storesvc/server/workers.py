"""Worker processes that share one port, and their supervisor.

Each worker is a complete server. All state is in the bucket, so any worker serves any
call, and the kernel spreads the connections over the workers. The supervisor replaces a
worker that exits. Workers exit when the supervisor does, for whatever reason.
"""

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Final

from storesvc.errors import InvalidFieldError

LEAST_SECONDS: Final = 1.0
"""Minimum time between two starts of a worker: a crash loop must not use all CPU."""

END_SECONDS: Final = 30.0
"""Maximum time for a worker to exit before it is killed: more than its drain takes."""

_log = logging.getLogger(__name__)

# A fork would copy the locks that other threads hold, without those threads.
_spawn = multiprocessing.get_context("spawn")


class Lifeline:
    """A worker's end of the connection to its supervisor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ready(self) -> None:
        """Reports that the worker accepts calls."""
        self._connection.send("")

    def refuse(self, cause: str) -> None:
        """Reports why the worker cannot start."""
        self._connection.send(cause)

    def fileno(self) -> int:
        """Returns a file descriptor that becomes readable when the supervisor exits."""
        return self._connection.fileno()


class _Worker:
    """A worker, as the supervisor sees it."""

    def __init__(self, work: Callable[[Lifeline], None]) -> None:
        self.connection, others = _spawn.Pipe()
        self.started = time.monotonic()
        self.process = _spawn.Process(target=_run, args=(work, others))
        self.process.start()
        others.close()

    def refusal(self) -> str:
        """Returns the cause if the worker could not start, else ""."""
        try:
            cause: str = self.connection.recv()
        except EOFError:
            return "it ended before it accepted calls"
        return cause

    def last_words(self) -> str:
        """Returns the last unread message of the worker, after a colon; "": none."""
        last = ""
        with suppress(EOFError):
            while self.connection.poll():
                last = self.connection.recv() or last
        return last and f": {last}"

    def end(self) -> None:
        """Waits for the exit of the process; kills it after `END_SECONDS`."""
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def supervise(
    count: int, work: Callable[[Lifeline], None], *, ready: Callable[[], None]
) -> None:
    """Runs workers until SIGTERM or SIGINT, which it forwards.

    Args:
        count: Number of workers.
        work: Runs one worker, until SIGTERM or until the supervisor exits.
        ready: Called once all workers accept calls.

    Raises:
        InvalidFieldError: A worker failed to start before all accepted calls.
    """
    workers: list[_Worker] = []
    with _signals() as stop:
        try:
            workers += (_Worker(work) for _ in range(count))
            if _await_all(workers, stop):
                ready()
                _keep(workers, work, stop)
        finally:
            for worker in workers:
                worker.process.terminate()
            for worker in workers:
                worker.end()


def _await_all(workers: Sequence[_Worker], stop: int) -> bool:
    """Waits until all workers accept calls; returns False on a signal."""
    missing = {worker.connection: worker for worker in workers}
    while missing:
        readable = wait([*missing, stop])
        if stop in readable:
            return False
        for connection in readable:
            assert isinstance(connection, Connection)
            if cause := missing.pop(connection).refusal():
                raise InvalidFieldError(cause)
    return True


def _keep(workers: list[_Worker], work: Callable[[Lifeline], None], stop: int) -> None:
    """Replaces each worker that exits, until a signal."""
    while stop not in wait([*(worker.process.sentinel for worker in workers), stop]):
        for at, worker in enumerate(workers):
            if worker.process.is_alive():
                continue
            _log.warning(
                "worker %s exited unexpectedly, with exit code %s%s; starting another",
                worker.process.pid,
                worker.process.exitcode,
                worker.last_words(),
            )
            worker.end()
            early = worker.started + LEAST_SECONDS - time.monotonic()
            if early > 0 and wait([stop], early):
                return
            workers[at] = _Worker(work)


@contextmanager
def _signals() -> Iterator[int]:
    """Yields a file descriptor that becomes readable on SIGTERM or SIGINT."""
    stop, sending = os.pipe()

    def notify(number: int, frame: object) -> None:
        del number, frame
        os.write(sending, b"x")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, notify) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        os.close(stop)
        os.close(sending)


def _run(work: Callable[[Lifeline], None], connection: Connection) -> None:
    work(Lifeline(connection))
