"""A type checker knows the type of a restored state: that of ``like=`` or ``init``.

``make types`` checks each ``assert_type``; here the same calls run.
"""

from dataclasses import dataclass
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import storesvc_client as store


@jax.tree_util.register_dataclass
@dataclass
class State:
    step: int
    weights: jax.Array


def make() -> State:
    return State(0, jnp.ones(3))


def test_a_restore_has_the_type_of_its_target(run: store.Run) -> None:
    run.save(1, make()).result()

    back = assert_type(run.restore(1, like=make()), State)
    opened = assert_type(run.open(1).restore(like=make()), State)
    untyped = assert_type(run.restore(1), Any)

    assert 0 == back.step == opened.step == untyped["step"]


def test_a_loop_has_the_type_of_its_initial_state(run: store.Run) -> None:
    with run.loop(every=store.Steps(1), create=True) as loop:
        state, start = assert_type(loop.restore_or(make), tuple[State, int])
        for step in loop.steps(start, 1):
            loop.after(step, state)
    with run.loop(every=store.Steps(1), create=True) as loop:
        back, start = assert_type(loop.restore_or(state), tuple[State, int])

    assert 1 == start
    np.testing.assert_array_equal(state.weights, back.weights)
