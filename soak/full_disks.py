"""R7: the disk is full, at one write of a save, from a write on, or really full."""

import errno
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

import storesvc_client as store
from soak import promises
from soak.outcomes import Outcome
from soak.watched import WRITES, WatchedServer, watched
from tests.support.small_disk import NoSmallDiskError, mounted

DISK_BYTES = 32 << 20


def full_disks() -> Outcome:
    """Fails every write of a save with a full disk, and fills a small disk."""
    outcome = Outcome()
    with promises.prepared(0) as root, watched(root) as server:
        server.start()
        kept = {0}
        with server.connect() as client:
            for all_that_follow in (False, True):
                for number in count(1):
                    step = max(kept) + 1
                    server.fail_at(
                        number,
                        errno.ENOSPC,
                        kinds=WRITES,
                        all_that_follow=all_that_follow,
                    )
                    lost, is_over = _save_on_full(client, server, step, kept)
                    more = " and all that follow" if all_that_follow else ""
                    outcome.add(f"write {number}{more}", lost)
                    kept.add(step)
                    if is_over:
                        break
        server.stop()
        outcome.losses += promises.losses_at(root, kept=kept)
    try:
        outcome.add("a small disk", _fill_a_small_disk())
    except NoSmallDiskError as e:
        outcome.note = f"no small disk: {e}"
    return outcome


def _save_on_full(
    client: store.Client, server: WatchedServer, step: int, kept: set[int]
) -> tuple[list[str], bool]:
    """Returns the losses, and whether the save ended before that write."""
    lost, is_over = [], False
    try:
        promises.save(client, step)
        is_over = True
    except store.LimitError as e:
        if e.reason != "STORAGE_FULL":
            lost.append(f"expected STORAGE_FULL, got {e.reason}: {e}")
    except store.StoreError as e:
        lost.append(f"expected LimitError, got {type(e).__name__}: {e}")
    lost += promises.losses(client, kept=kept, maybe={step})
    server.mend()
    # the server recovers without a restart
    with suppress(store.AlreadyExistsError):
        promises.save(client, step)
    return lost + promises.losses(client, kept={*kept, step}), is_over


def _fill_a_small_disk() -> list[str]:
    """Saves until a disk is full, then frees space by deletions."""
    with (
        tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch,
        mounted(Path(scratch) / "disk", size_bytes=DISK_BYTES) as disk,
        store.connect((disk / "store").as_uri()) as client,
    ):
        promises.save(client, 0)
        big = client.run("soak/big")
        step = _first_that_fails(lambda s: big.save(s, _big(s)).result())
        lost = promises.losses(client, kept={0})
        for kept in range(step):
            if not np.array_equal(big.restore(kept)["x"], _big(kept)["x"]):
                lost.append(f"big step {kept} came back with other bytes")
        return lost


def _first_that_fails(save: Callable[[int], object]) -> int:
    for step in count():
        try:
            save(step)
        except store.LimitError:
            return step
    raise AssertionError


def _big(step: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return {"x": np.full(1 << 18, step, np.int64)}
