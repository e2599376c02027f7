"""A store with one file damaged: it tells, or it does not matter; never other bytes."""

from collections.abc import Callable
from pathlib import Path

import storesvc_client as store
from tests.soak import promises

TOLD = (store.DataLossError, store.PreconditionError)
"""Damage, and a damaged format version."""


def damaged(root: Path, file: Path, damage: Callable[[Path], object]) -> list[str]:
    """Returns what a reader loses by damage that is undone afterwards.

    Args:
        root: Of a store that holds the steps 0 and 1.
        file: Which file of it.
        damage: Changes or removes it.
    """
    original = file.read_bytes()
    damage(file)
    try:
        with store.connect(root.as_uri()) as client:
            return [
                f"step {step} came back with other bytes"
                for step in (0, 1)
                if not _tells_or_is_whole(client, step)
            ]
    except TOLD:
        return []
    except store.StoreError as e:
        return [f"expected DataLossError, got {type(e).__name__}: {e}"]
    finally:
        file.write_bytes(original)


def _tells_or_is_whole(client: store.Client, step: int) -> bool:
    try:
        return promises.is_whole(client.run(promises.RUN).restore(step), step)
    except TOLD:
        return True
