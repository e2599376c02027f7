"""Trains on a mesh of CPU devices, from the start or from a checkpoint, and saves; in
one process, or in the processes of a job.

A resumed run does what an uninterrupted one does. A batch is a function of the step
alone. A step is one jitted function from state to state. The count of each dropout's
RNG stream is part of the state, so that the masks are the same. The result keeps the
shardings of the argument: chosen by the compiler, they would change, and the next save
would record them. Each save has a digest of its state, which is compared after a
restore.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pydoc_data.topics import topics
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from storesvc.format.names import Which
from storesvc_client import Run, Save
from storesvc_client._pytree.partition_rules import shardings_by_rules
from storesvc_client.demo.digest import digest_of
from storesvc_client.demo.job_log import Committed, Event, Restored, SaveBegun, Step
from storesvc_client.demo.model import (
    RULES,
    WINDOW,
    loss_of,
    make_model,
    make_optimizer,
)
from storesvc_client.easydel import restore_state, save_state
from storesvc_client.trees.easydel import EasyDeLState

__all__ = ["Training", "saved"]

_SEED = 20_260_401
_BATCH_SIZE = 32
_P = PartitionSpec

StateAndLoss: TypeAlias = tuple[EasyDeLState, jax.Array]


class Training:
    """Trains a state on a mesh."""

    def __init__(self, axes: Mapping[str, int]) -> None:
        self._mesh = jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
        )
        self._mesh_text = ",".join(f"{name}={size}" for name, size in axes.items())
        self._tx = make_optimizer()
        self._corpus = _Corpus()

    def start(self) -> EasyDeLState:
        """Returns the state before the first step."""

        def made() -> EasyDeLState:
            return EasyDeLState.create(
                step=jnp.zeros((), jnp.int32),
                model=make_model(),
                tx=self._tx,
                init_opt_state=True,
            )

        # As lists: two traces of `made` have equal leaves, but different tree
        # structures because of the closures in their graphdefs.
        abstract = jax.eval_shape(made)
        shardings = jax.tree.leaves(shardings_by_rules(abstract, self._mesh, RULES))
        make_leaves = jax.jit(lambda: jax.tree.leaves(made()), out_shardings=shardings)
        state: EasyDeLState = jax.tree.unflatten(
            jax.tree.structure(abstract), make_leaves()
        )
        return state

    def resume(self, run: Run, which: Which) -> tuple[EasyDeLState, Restored]:
        """Returns the state of a checkpoint, bitwise as it was saved.

        Raises:
            ValueError: The digest of the state differs from the saved one.
        """
        began = time.monotonic()
        state = restore_state(
            run, which, model=make_model, tx=self._tx, mesh=self._mesh, rules=RULES
        )
        jax.block_until_ready(state)
        seconds = time.monotonic() - began
        checkpoint = run.checkpoint(int(state.step))
        digest = digest_of(state)
        if digest != checkpoint.labels["digest"]:
            raise ValueError(
                f"checkpoint {checkpoint.step}: expected a state of digest "
                f"{checkpoint.labels['digest']}, as saved, got {digest}"
            )
        return state, Restored(
            step=checkpoint.step,
            mesh=self._mesh_text,
            leaf_count=checkpoint.leaf_count,
            size_bytes=checkpoint.size_bytes,
            seconds=seconds,
            digest=digest,
        )

    def steps(
        self, state: EasyDeLState, *, until: int
    ) -> Iterator[tuple[EasyDeLState, Step]]:
        """Yields the state after each step; the one before it is donated."""
        advance = _advance_with(state.shardings, self._mesh)
        rows = NamedSharding(self._mesh, _P(("dp", "fsdp")))
        for step in range(int(state.step) + 1, until + 1):
            text = self._corpus.batch(step)
            # each process of a job provides what its devices need
            batch = jax.make_array_from_callback(text.shape, rows, text.__getitem__)
            state, loss = advance(state, batch)
            yield state, Step(step=step, loss=float(loss), mesh=self._mesh_text)


def _advance_with(
    shardings: Any, mesh: Mesh
) -> Callable[[EasyDeLState, jax.Array], StateAndLoss]:
    def advance(state: EasyDeLState, batch: jax.Array) -> StateAndLoss:
        def loss(graphstate: Any) -> tuple[jax.Array, Any]:
            model = state.merge(graphstate)
            # evaluated first: dropout advances the counts in `model`
            value = loss_of(model, batch)
            return value, nnx.state(model, nnx.Not(nnx.Param))

        grad = jax.value_and_grad(loss, has_aux=True)
        (value, graphother), grads = grad(state.graphstate)
        advanced = state.apply_gradients(grads=grads)
        return advanced.replace(graphother=graphother), value

    replicated = NamedSharding(mesh, _P())
    return jax.jit(advance, donate_argnums=0, out_shardings=(shardings, replicated))


class _Corpus:
    """Batches of the training text: the topics of ``help()``, prose that ships with
    Python, as bytes. A batch is a function of the step alone."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self._bytes = np.frombuffer(text.encode(), np.uint8)

    def batch(self, step: int) -> npt.NDArray[np.int32]:
        """Returns the batch of a step: ``_BATCH_SIZE`` rows of ``WINDOW + 1`` bytes,
        each window with the byte that follows it."""
        draw = np.random.default_rng((_SEED, step))
        starts = draw.integers(len(self._bytes) - WINDOW, size=_BATCH_SIZE)
        columns = np.arange(WINDOW + 1)
        windows: npt.NDArray[np.uint8] = self._bytes[starts[:, None] + columns]
        return windows.astype(np.int32)


def saved(
    steps: Iterable[tuple[EasyDeLState, Step]], run: Run, *, every: int
) -> Iterator[Event]:
    """Yields the steps, and the events of saves in the background at each ``every``
    steps.

    A save that is due while another is in progress is skipped: on slow storage, the job
    would be killed within a save, which the demo does not show.
    """
    pending: Save | None = None
    for state, step in steps:
        yield step
        is_due = step.step % every == 0
        is_busy = pending is not None and not pending.done()
        if pending is not None and (is_due or not is_busy):
            yield _committed(pending)
            pending = None
        if is_due and not is_busy:
            pending, begun = _begin(run, state, step)
            yield begun
    if pending is not None:
        yield _committed(pending)


def _begin(run: Run, state: EasyDeLState, step: Step) -> tuple[Save, SaveBegun]:
    labels = {"digest": digest_of(state), "mesh": step.mesh}
    began = time.monotonic()
    save = save_state(run, state, metrics={"loss": step.loss}, labels=labels)
    blocked = time.monotonic() - began
    return save, SaveBegun(step=step.step, blocked_seconds=blocked)


def _committed(save: Save) -> Committed:
    checkpoint = save.result()
    return Committed(step=checkpoint.step, size_bytes=checkpoint.size_bytes)
