"""Workers: processes that do the same work, and one that looks after them.

Each is a whole server; all state lies in the bucket, so any of them takes any call, and
the kernel spreads connections over those that listen at one port. One that dies is
followed by another. They end with who looks after them, however that ends.
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
"""Between two starts of one worker: one that dies at once must not take all CPU."""

END_SECONDS: Final = 30.0
"""How long one may take to end before it is killed: more than it takes to drain."""

_log = logging.getLogger(__name__)

# A fork would have the threads' locks and none of the threads.
_spawn = multiprocessing.get_context("spawn")


class Lifeline:
    """A worker's end of what binds it to who looks after it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ready(self) -> None:
        """Tells that it works."""
        self._connection.send("")

    def refuse(self, cause: str) -> None:
        """Tells why it cannot work."""
        self._connection.send(cause)

    def fileno(self) -> int:
        """Returns what can be read from as soon as nobody looks after it any more."""
        return self._connection.fileno()


class _Worker:
    """One of them, as who looks after it sees it."""

    def __init__(self, work: Callable[[Lifeline], None]) -> None:
        self.connection, others = _spawn.Pipe()
        self.started = time.monotonic()
        self.process = _spawn.Process(target=_run, args=(work, others))
        self.process.start()
        others.close()

    def refusal(self) -> str:
        """Returns why it does not work; "": it works, or did."""
        try:
            cause: str = self.connection.recv()
        except EOFError:
            return "it ended before it took calls"
        return cause

    def last_words(self) -> str:
        """Returns what it told that nobody read, behind a colon."""
        told = ""
        with suppress(EOFError):
            while self.connection.poll():
                told = self.connection.recv() or told
        return told and f": {told}"

    def end(self) -> None:
        """Waits for its end."""
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def supervise(
    count: int, work: Callable[[Lifeline], None], *, ready: Callable[[], None]
) -> None:
    """Has workers at work until SIGTERM or SIGINT, which it hands on.

    Args:
        count: How many.
        work: What each does, until SIGTERM or until nobody looks after it.
        ready: Called once all work.

    Raises:
        InvalidFieldError: One cannot work, before all did.
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
    """Whether all work; False: they shall not."""
    missing = {worker.connection: worker for worker in workers}
    while missing:
        told = wait([*missing, stop])
        if stop in told:
            return False
        for connection in told:
            assert isinstance(connection, Connection)
            if cause := missing.pop(connection).refusal():
                raise InvalidFieldError(cause)
    return True


def _keep(workers: list[_Worker], work: Callable[[Lifeline], None], stop: int) -> None:
    """Starts another for each that ends."""
    while stop not in wait([*(worker.process.sentinel for worker in workers), stop]):
        for at, worker in enumerate(workers):
            if worker.process.is_alive():
                continue
            _log.warning(
                "worker %s ended by itself, with exit code %s%s; another one starts",
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
    """Yields what can be read from as soon as SIGTERM or SIGINT came."""
    stop, told = os.pipe()

    def tell(number: int, frame: object) -> None:
        del number, frame
        os.write(told, b"x")

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, tell) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        os.close(stop)
        os.close(told)


def _run(work: Callable[[Lifeline], None], connection: Connection) -> None:
    work(Lifeline(connection))
