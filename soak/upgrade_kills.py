"""SIGKILL of a server of this version during its first saves on an older store: the
golden store of the present format.

The checkpoint, the tag and the hold of the old store are whole after each kill, and so
is what was saved before it; the next server saves on.
"""

import shutil
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

import storesvc_client as store
from soak import promises
from soak.disks import read_log
from soak.outcomes import Outcome
from soak.watched import WatchedServer, watched
from tests.support.server_process import EndedError

KILLS: Final = 35
STEPS: Final = (2000, 2001, 2002)
RUN: Final = "golden/run"
OLD_STEP: Final = 1234
_GOLDEN: Final = Path(__file__).parents[1] / "tests" / "golden" / "v2"


def upgrade_kills() -> Outcome:
    """Kills servers at moments that are spread over all calls of the first saves."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        root = Path(scratch) / "whole"
        shutil.copytree(_GOLDEN, root)
        with watched(root) as server:
            server.log_calls()
            server.start()
            _save(server.address, [])
            server.stop()
            count = len(read_log(server.calls_log))
        points = sorted({1 + at * count // KILLS for at in range(KILLS)})
        for number in points:
            root = Path(scratch) / f"kill-{number}"
            shutil.copytree(_GOLDEN, root)
            outcome.add(f"killed before call {number} of {count}", _kill(root, number))
    outcome.note = f"{len(points)} kills in {count} calls"
    return outcome


def _kill(root: Path, number: int) -> list[str]:
    """Returns what is lost after a kill."""
    saved = list[int]()
    with watched(root) as server, ThreadPoolExecutor() as pool:
        server.kill_at(number)
        with suppress(EndedError):
            server.start()
        if server.is_running:
            saving = pool.submit(_save, server.address, saved)
            is_killed = _await_end(saving, server)
            lost = _losses(root, saved)
            server.mend()
            if is_killed:
                server.start()
            saving.result()  # the client goes on at the next server
        else:
            lost = _losses(root, saved)
            server.mend()
            server.start()
            _save(server.address, saved)
        server.stop()
    return lost + _losses(root, list(STEPS))


def _await_end(saving: "Future[None]", server: WatchedServer) -> bool:
    """Waits until the saves or their server have ended; returns whether it was the
    server."""
    while server.is_running:
        if saving.done():
            return False
        wait([saving], timeout=0.02)
    return True


def _save(address: str, saved: list[int]) -> None:
    """Saves the steps that the golden run does not have yet, and notes each."""
    with store.connect(address) as client:
        for step in STEPS:
            client.run(RUN).save(step, promises.tree(step)).result()
            saved.append(step)


def _losses(root: Path, saved: list[int]) -> list[str]:
    """Returns what is lost in a copy of a store."""
    saved, lost = [*saved], []
    with promises.copied(root) as copy, store.connect(copy.as_uri()) as client:
        run = client.run(RUN)
        if np.asarray(run.restore(OLD_STEP)["a"]["step"]) != OLD_STEP:
            lost.append("the old checkpoint came back with other values")
        if not run.verify(OLD_STEP).ok:
            lost.append("the old checkpoint is damaged")
        if [("best", OLD_STEP)] != [(tag.name, tag.step) for tag in run.tags.list()]:
            lost.append("the old tag is lost")
        if ["golden"] != [hold.owner for hold in run.holds.list()]:
            lost.append("the old hold is lost")
        found = set(run.steps()) - {OLD_STEP}
        if not set(saved) <= found <= set(STEPS):
            lost.append(f"expected {saved}, perhaps more of {STEPS}, got {found}")
        lost += [
            f"step {step} came back with other bytes"
            for step in found
            if not promises.is_whole(run.restore(step), step)
        ]
    return lost
