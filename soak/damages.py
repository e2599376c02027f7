"""A store with one damaged file reports the damage or returns the right bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import storesvc_client as store
from soak import promises

DAMAGE_ERRORS = (store.DataLossError, store.PreconditionError)
"""Errors that report damage, also of the format version."""


def damaged(root: Path, file: Path, damage: Callable[[Path], object]) -> list[str]:
    """Damages a copy of a store; returns the losses of readers and of a writer.

    Args:
        root: Root of a store with the steps 0 and 1.
        file: File of the store.
        damage: Changes or removes a file.
    """
    with promises.copied(root) as copy:
        damage(copy / file.relative_to(root))
        try:
            with store.connect(copy.as_uri()) as client:
                return list(_losses(client))
        except DAMAGE_ERRORS:
            return []
        except store.StoreError as e:
            return [f"expected DataLossError, got {type(e).__name__}: {e}"]


def _losses(client: store.Client) -> Iterator[str]:
    run = client.run(promises.RUN)
    for step in (0, 1):
        if not _reports_or_is_whole(client, step):
            yield f"step {step} came back with other bytes"
    # A save after the damage shares unchanged chunks with the newest step.
    try:
        promises.save(client, promises.NEXT)
    except DAMAGE_ERRORS:
        return
    if not _reports_or_is_whole(client, promises.NEXT):
        yield "a step that was saved after the damage came back with other bytes"
    # A save that shares no chunks must be whole.
    step = promises.NEXT + 1
    run.save(step, promises.tree(step), base=None).result()
    if not promises.is_whole(run.restore(step), step):
        yield "a step that shares no chunks came back with other bytes"


def _reports_or_is_whole(client: store.Client, step: int) -> bool:
    try:
        return promises.is_whole(client.run(promises.RUN).restore(step), step)
    except DAMAGE_ERRORS:
        return True
