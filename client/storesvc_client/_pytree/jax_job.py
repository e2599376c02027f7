"""Connects the processes of a ``jax.distributed`` job."""

import socket
import time
from collections import Counter
from functools import cache
from threading import Lock
from typing import Any, Final

import jax
from jax.errors import JaxRuntimeError

from storesvc_client._job.job import Job, introduce
from storesvc_client.errors import UnavailableError

TURN_SECONDS: Final = 1.0
"""Maximum seconds of one wait for the board; between waits, Ctrl-C is handled."""


def find_job() -> Job | None:
    """Returns the job that this process belongs to, or None if it runs alone."""
    if not jax.distributed.is_initialized():
        return None
    with _job_lock:  # one job object, and so one count of rounds, for all threads
        return _find_job()


_job_lock = Lock()


@cache
def _find_job() -> Job | None:
    if jax.process_count() == 1:
        return None
    # jax has no public access to the key-value store. Its public barriers and
    # broadcasts would make every process wait for all others.
    from jax._src.distributed import global_state

    job = _JaxJob(global_state.client)
    introduce(job, socket.gethostname())
    return job


class _JaxJob:
    """Implements ``Job`` on the coordination service of jax."""

    def __init__(self, board: Any) -> None:
        self.index = jax.process_index()
        self.count = jax.process_count()
        self._board = board
        self._lock = Lock()
        self._passed: Counter[str] = Counter()

    def count_passed(self, what: str) -> int:
        """See ``Job.count_passed``."""
        with self._lock:
            return self._passed[what]

    def advance(self, what: str, passed: int) -> bool:
        """See ``Job.advance``."""
        with self._lock:
            was_so = self._passed[what] == passed
            if was_so:
                self._passed[what] += 1
            return was_so

    def post(self, key: str, text: str) -> None:
        """See ``Job.post``."""
        try:
            self._board.key_value_set(key, text)
        except JaxRuntimeError as e:
            if "ALREADY_EXISTS" not in str(e):
                raise _unreachable(e) from e

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        """See ``Job.read``."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            text = self._read(key, int(1000 * min(left, TURN_SECONDS)))
            if text is not None or left <= TURN_SECONDS:
                return text

    def _read(self, key: str, milliseconds: int) -> str | None:
        try:
            if milliseconds <= 0:
                text: str = self._board.key_value_try_get(key)
            else:
                text = self._board.blocking_key_value_get(key, milliseconds)
        except JaxRuntimeError as e:
            if "NOT_FOUND" in str(e) or "DEADLINE_EXCEEDED" in str(e):
                return None
            raise _unreachable(e) from e
        return text


def _unreachable(e: JaxRuntimeError) -> UnavailableError:
    cause = str(e).partition("\n")[0]
    return UnavailableError(
        f"the coordination service of this jax.distributed job failed: {cause}; start "
        "the job again"
    )


def decided_by_first(decision: bool) -> bool:  # noqa: FBT001 - the value itself
    """Returns the decision of process 0; every process of the job calls this at the
    same step, and waits for the others."""
    from jax.experimental import multihost_utils

    return bool(multihost_utils.broadcast_one_to_all(decision))
