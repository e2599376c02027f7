"""Connects the processes of a ``jax.distributed`` job.

They meet on a board, exchange bytes over their devices, and stop together when jax's
preemption service says so.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import count
from threading import Lock
from typing import Any, Final

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc_client._chunks.buffers import Bytes
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
        with self._lock:
            return self._passed[what]

    def advance(self, what: str, passed: int) -> bool:
        with self._lock:
            was_so = self._passed[what] == passed
            if was_so:
                self._passed[what] += 1
            return was_so

    def post(self, key: str, text: str) -> None:
        try:
            self._board.key_value_set(key, text)
        except JaxRuntimeError as e:
            if "ALREADY_EXISTS" not in str(e):
                raise _unreachable(e) from e

    def replace(self, key: str, text: str) -> None:
        try:
            self._board.key_value_set(key, text, allow_overwrite=True)
        except JaxRuntimeError as e:
            raise _unreachable(e) from e

    def increment(self, key: str) -> int:
        try:
            return int(self._board.key_value_increment(key, 1))
        except JaxRuntimeError as e:
            raise _unreachable(e) from e

    def delete(self, key: str) -> None:
        try:
            self._board.key_value_delete(key)
        except JaxRuntimeError as e:
            raise _unreachable(e) from e

    def read(self, key: str, *, seconds: float = 0.0) -> str | None:
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            milliseconds = int(1000 * min(left, TURN_SECONDS))
            try:
                if milliseconds <= 0:
                    text: str = self._board.key_value_try_get(key)
                else:
                    text = self._board.blocking_key_value_get(key, milliseconds)
            except JaxRuntimeError as e:
                if "NOT_FOUND" not in str(e) and "DEADLINE_EXCEEDED" not in str(e):
                    raise _unreachable(e) from e
            else:
                return text
            if left <= TURN_SECONDS:
                return None


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


_calls = count()
"""Number of each call of ``reached_sync_point``. Steps would not do: a loop may leave
some out, and jax knows only one sequence for all loops of a process."""


def reached_sync_point() -> Callable[[], bool] | None:
    """Returns the function that every process of a job calls as often as the others,
    once a step: it returns True once, when all stop because one received SIGTERM. None
    if jax does not catch SIGTERM for this process."""
    from jax._src.distributed import global_state
    from jax.experimental.multihost_utils import reached_preemption_sync_point

    # jax has no public way to find out; with the option jax_enable_preemption_service
    # off, reached_preemption_sync_point raises an error.
    manager = global_state.preemption_sync_manager
    if manager is None:
        return None
    # A step that saves nothing does little else. Without a frame of Python, here and in
    # jax's function, it takes half as long in a loop whose caches are cold.
    ask = getattr(manager, "reached_sync_point", reached_preemption_sync_point)
    return map(ask, _calls).__next__


def all_gather(own: Bytes, processes: Sequence[int]) -> Sequence[Bytes]:
    """Implements ``spread.Gather`` with the first device of each process."""
    mesh, together = _program(tuple(processes))
    here = mesh.devices[processes.index(jax.process_index())]
    try:
        brought = jax.make_array_from_single_device_arrays(
            (len(processes), len(own)),
            NamedSharding(mesh, PartitionSpec("process")),
            [jax.device_put(own[None], here)],
        )
        rows: Bytes = np.asarray(together(brought).addressable_data(0))
    except (JaxRuntimeError, ValueError) as e:  # the type depends on the cause
        cause = str(e).partition("\n")[0]
        raise UnavailableError(
            f"the exchange of bytes between {len(processes)} processes of this "
            f"jax.distributed job failed: {cause}; start the job again"
        ) from e
    return list(rows)


@lru_cache(maxsize=64)
def _program(processes: tuple[int, ...]) -> tuple[Mesh, Any]:
    """Returns the mesh of the devices that take part, and the program that they run."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[process] for process in processes]), ("process",))
    # Not device_put, which synchronizes all processes of the job, not only these.
    replicated = NamedSharding(mesh, PartitionSpec())
    return mesh, jax.jit(lambda rows: rows, out_shardings=replicated)
