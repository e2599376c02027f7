"""A store with one file damaged: it tells, or it does not matter; never other bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import storesvc_client as store
from tests.soak import promises

TOLD = (store.DataLossError, store.PreconditionError)
"""Damage, and a damaged format version."""


def damaged(root: Path, file: Path, damage: Callable[[Path], object]) -> list[str]:
    """Returns what readers, and a writer, lose by damage to a copy of a store.

    Args:
        root: Of a store that holds the steps 0 and 1.
        file: Which file of it.
        damage: Changes or removes it.
    """
    with promises.copied(root) as copy:
        damage(copy / file.relative_to(root))
        try:
            with store.connect(copy.as_uri()) as client:
                return list(_losses(client))
        except TOLD:
            return []
        except store.StoreError as e:
            return [f"expected DataLossError, got {type(e).__name__}: {e}"]


def _losses(client: store.Client) -> Iterator[str]:
    run = client.run(promises.RUN)
    for step in (0, 1):
        if not _tells_or_is_whole(client, step):
            yield f"step {step} came back with other bytes"
    # A save beside the damage, which shares what did not change with the newest.
    try:
        promises.save(client, promises.NEXT)
    except TOLD:
        return
    if not _tells_or_is_whole(client, promises.NEXT):
        yield "what was saved beside the damage came back with other bytes"
    # One that shares nothing is whole, whatever else is damaged.
    step = promises.NEXT + 1
    run.save(step, promises.tree(step), base=None).result()
    if not promises.is_whole(run.restore(step), step):
        yield "what shares nothing with the damage came back with other bytes"


def _tells_or_is_whole(client: store.Client, step: int) -> bool:
    try:
        return promises.is_whole(client.run(promises.RUN).restore(step), step)
    except TOLD:
        return True
