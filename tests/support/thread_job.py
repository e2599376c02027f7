"""A job whose processes are threads.

Its board is a dict, and its devices exchange bytes through memory. A process that waits
for absent ones gets an error after ``GATHER_SECONDS``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Condition
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from storesvc_client import PeerFailedError

GATHER_SECONDS = 5.0

T = TypeVar("T")


class ThreadJob:
    """The job: the state that its processes share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.board: dict[str, str] = {}
        self.changed = Condition()
        self.barrier = Barrier(count)
        self.brought: dict[int, NDArray[np.uint8]] = {}

    def process(self, index: int) -> "ThreadProcess":
        """Returns one process of the job."""
        return ThreadProcess(self, index)

    def run(self, part: Callable[["ThreadProcess"], T]) -> list[T | BaseException]:
        """Runs a function in each process; returns the results, or the errors."""
        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(part, self.process(i)) for i in range(self.count)]
            return [future.exception() or future.result() for future in futures]


class ThreadProcess:
    """One process; implements ``Job`` and ``Gather``."""

    def __init__(self, job: ThreadJob, index: int) -> None:
        self.index = index
        self.count = job.count
        self._job = job
        self._passed: Counter[str] = Counter()

    def count_passed(self, what: str) -> int:
        """See ``Job.count_passed``."""
        return self._passed[what]

    def advance(self, what: str, passed: int) -> bool:
        """See ``Job.advance``."""
        was_so = self._passed[what] == passed
        if was_so:
            self._passed[what] += 1
        return was_so

    def post(self, key: str, text: str) -> None:
        """See ``Job.post``."""
        with self._job.changed:
            self._job.board.setdefault(key, text)
            self._job.changed.notify_all()

    def replace(self, key: str, text: str) -> None:
        """See ``Job.replace``."""
        with self._job.changed:
            self._job.board[key] = text
            self._job.changed.notify_all()

    def increment(self, key: str) -> int:
        """See ``Job.increment``."""
        with self._job.changed:
            number = int(self._job.board.get(key, "0")) + 1
            self._job.board[key] = str(number)
            return number

    def delete(self, key: str) -> None:
        """See ``Job.delete``."""
        with self._job.changed:
            for each in [*self._job.board]:
                if each == key or each.startswith(f"{key}/"):
                    del self._job.board[each]

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        """See ``Job.read``."""
        with self._job.changed:
            self._job.changed.wait_for(lambda: key in self._job.board, seconds)
            return self._job.board.get(key)

    def gather(
        self, own: NDArray[np.uint8], processes: Sequence[int]
    ) -> Sequence[NDArray[np.uint8]]:
        """See ``Gather``; works for all processes together only."""
        assert tuple(processes) == tuple(range(self.count))
        self._job.brought[self.index] = own
        self._job.barrier.wait(GATHER_SECONDS)
        brought = [self._job.brought[index] for index in processes]
        self._job.barrier.wait(GATHER_SECONDS)
        return brought


def check_peer_failures(outcomes: Iterable[object], *texts: str) -> None:
    """Checks that processes failed because of another one, whose error has texts."""
    for outcome in outcomes:
        assert isinstance(outcome, PeerFailedError), outcome
        assert all(text in str(outcome) for text in texts), outcome
