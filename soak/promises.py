"""Checks, through a client, the guarantees of a store after any kind of damage."""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import storesvc_client as store
from tests.support.server_process import ServerProcess

RUN = "soak/run"
NEXT = 9_999
"""Step that only the check saves."""


NEWEST = 5
"""Newest steps that are restored, in addition to the oldest."""


def tree(step: int) -> dict[str, Any]:
    """Returns the state of a step; one leaf is equal in all steps."""
    rng = np.random.default_rng(step)
    return {
        "moving": rng.integers(0, 256, 3000).astype(np.uint8),
        "still": np.arange(2000, dtype=np.uint16),
        "step": step,
    }


def save(client: store.Client, *steps: int) -> None:
    """Saves steps, and waits for each: an odd one in one call, an even one that names
    its base in the calls of a larger save."""
    run = client.run(RUN)
    for step in steps:
        newest = None if step % 2 else run.latest_step()
        base = "latest" if newest is None else newest
        run.save(step, tree(step), base=base).result()


def is_whole(found: Any, step: int) -> bool:
    """Returns whether a state equals the state of a step in every byte."""
    expected = tree(step)
    return set(found) == set(expected) and all(
        np.asarray(found[k]).tobytes() == np.asarray(v).tobytes()
        for k, v in expected.items()
    )


def losses(
    client: store.Client, *, kept: Iterable[int], maybe: Iterable[int] = ()
) -> list[str]:
    """Returns the guarantees that a store breaks.

    Args:
        client: Client of the store.
        kept: Steps that were acknowledged and not deleted.
        maybe: Steps that may be absent, or there and whole.
    """
    kept, maybe = set(kept), set(maybe)
    run = client.run(RUN)
    try:
        found = [checkpoint.step for checkpoint in run.checkpoints()]
    except store.NotFoundError:
        found = []
    lost = []
    if not kept <= set(found) <= kept | maybe:
        lost.append(f"expected steps {kept}, perhaps {maybe}, got {found}")
    if found and run.latest().step != max(found):
        lost.append(f"latest is {run.latest().step}, and not the newest of {found}")
    # a list may be long: restore only the newest steps and the oldest
    for step in (*found[:NEWEST], *found[NEWEST:][-1:]):
        try:
            if not is_whole(run.restore(step), step):
                lost.append(f"step {step} came back with other bytes")
        except store.StoreError as e:
            lost.append(f"step {step} cannot be restored: {e}")
    return lost


def losses_at(
    root: Path, *, kept: Iterable[int], maybe: Iterable[int] = ()
) -> list[str]:
    """Returns the guarantees that the store in a directory breaks; works on a copy.

    A new client must be able to open it, read it, and save the absent steps.
    """
    kept, maybe = set(kept), set(maybe)
    with copied(root) as copy:
        try:
            with store.connect(copy.as_uri()) as client:
                lost = losses(client, kept=kept, maybe=maybe)
                saved = {step for step in (*maybe, NEXT) if _is_saved(client, step)}
                lost += losses(client, kept=kept | saved, maybe=maybe)
        except store.StoreError as e:
            return [f"it cannot be used any more: {type(e).__name__}: {e}"]
    return lost


def _is_saved(client: store.Client, step: int) -> bool:
    """Saves a step; returns False if it exists, or is deleted and not purged."""
    try:
        save(client, step)
    except store.AlreadyExistsError:
        return False
    return True


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Copies a directory for as long as the context lasts."""
    with scratch_folder() as scratch:
        copy = scratch / "store"
        if root.exists():
            shutil.copytree(root, copy)
        yield copy


@contextmanager
def prepared(*steps: int) -> Iterator[Path]:
    """Makes a store of these steps for as long as the context lasts."""
    with scratch_folder() as scratch:
        root = scratch / "store"
        with store.connect(root.as_uri()) as client:
            save(client, *steps)
        yield root


@contextmanager
def served() -> Iterator[ServerProcess]:
    """Serves a new store for as long as the context lasts."""
    with scratch_folder() as scratch:
        server = ServerProcess(scratch / "store", scratch)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yields a new folder that is removed after the context."""
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        yield Path(scratch)
