"""``lora``: a second save of a state in which 99 % of the leaves are unchanged."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from benchmarks.speed.changing import State
from benchmarks.speed.contenders import Contender
from benchmarks.speed.files import bytes_below
from benchmarks.speed.meters import measured
from benchmarks.speed.ours import Ours
from benchmarks.speed.side_by_side import bytes_of, check, target_of
from benchmarks.speed.states import States


def lora(contender: Contender, states: States, directory: Path) -> dict[str, Any]:
    """Returns the seconds and bytes of the second save relative to the first.

    ``stored_share`` compares the growth of the contender's directory; ``sent_share``,
    for this store only, is taken from its report.
    """
    contender.save(0, states.small().state)
    state = states.whole().state
    before = bytes_below(directory)
    with measured(contender.pids) as first:
        contender.save(1, state)
    between = bytes_below(directory)
    changed = with_changes(state)
    sent = {}
    with measured(contender.pids) as second:
        if isinstance(contender, Ours):
            report = contender.run.save(2, changed, base=1).report()
            sent = {"sent_share": report.sent_bytes / report.total_bytes}
        else:
            contender.save(2, changed)
    stored = (bytes_below(directory) - between) / (between - before)
    target = target_of(changed)
    check(changed, contender.restore(2, target), target)
    return {
        "bytes": bytes_of(state),
        "first_seconds": first.seconds,
        "second_seconds": second.seconds,
        "time_share": second.seconds / first.seconds,
        "stored_share": stored,
        **sent,
    }


def with_changes(state: State) -> State:
    """Returns a state with 1 % of the leaves changed, leaves of medium size."""
    keys = sorted(state, key=lambda key: state[key].nbytes)
    middle, count = len(keys) // 2, max(1, len(keys) // 100)
    changed = {key: jnp.negative(state[key]) for key in keys[middle : middle + count]}
    return {**state, **changed}
