"""Saves a training run in the background, at most one save at a time."""

import time
from collections.abc import Iterable, Iterator

from storesvc_client import Run, Save
from storesvc_client.demo.digest import digest_of
from storesvc_client.demo.job_log import Committed, Event, SaveBegun, Step
from storesvc_client.easydel import save_state
from storesvc_client.trees.easydel import EasyDeLState

__all__ = ["saved"]


def saved(
    steps: Iterable[tuple[EasyDeLState, Step]], run: Run, *, every: int
) -> Iterator[Event]:
    """Yields the steps, and the events of saves at each ``every`` steps.

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
