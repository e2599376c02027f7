"""``blocked``: time until ``save`` returns to a loop that then donates all leaves."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.speed.meters import settle
from benchmarks.speed.ours import Ours
from benchmarks.speed.side_by_side import bytes_of, differing, target_of
from benchmarks.speed.states import State, States

SAVES: Final = 2
"""Saves of the state; the first one cannot reuse buffers of an earlier save."""


def blocked(contender: Ours, states: States, directory: Path) -> dict[str, Any]:
    """Returns the seconds until ``save`` returned, the seconds of one copy of the same
    bytes, and the number of leaves that were restored with other bits.

    Every leaf is donated, and so overwritten in place, as soon as ``save`` returns.
    """
    del directory
    contender.save(0, states.small())
    reference = states.whole()
    target = target_of(reference)
    copied, kept, wrong = [], [], 0
    for step in range(1, SAVES + 1):
        state = states.whole()
        copied.append(_seconds_of(lambda: _copy(reference)))
        began = time.perf_counter()
        save = contender.run.save(step, state, base=None)
        kept.append(time.perf_counter() - began)
        _overwrite(state)
        save.result()
        del state
        wrong += len(differing(reference, contender.restore(step, target)))
    shares = [one / other for one, other in zip(kept, copied, strict=True)]
    return {
        "bytes": bytes_of(reference),
        "memcpy_seconds": median(copied),
        "blocked_seconds": median(kept),
        "blocked_per_memcpy": median(shares),
        "wrong_leaves": wrong,
    }


def _copy(state: State) -> Any:
    return [
        np.asarray(shard.data).copy()
        for leaf in state.values()
        for shard in leaf.addressable_shards
        if not shard.replica_id
    ]


def _seconds_of(task: Callable[[], Any]) -> float:
    settle()
    began = time.perf_counter()
    kept = task()
    taken = time.perf_counter() - began
    del kept  # after the clock stopped: freeing memory is not part of a copy
    settle()
    return taken


def _overwrite(state: State) -> None:
    """Writes other values into the memory of each leaf."""
    other = jax.jit(jnp.negative, donate_argnums=0)
    for leaf in state.values():
        other(leaf).block_until_ready()
        assert leaf.is_deleted()
