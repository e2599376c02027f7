"""R3: the power fails after each call that changes a file; what was not synced is
gone, or a part of it.

Records a server's calls while it makes a store, saves, deletes and collects, then lays
out, for each moment, the folders that a power cut could leave at the extremes.
"""

import tempfile
from hashlib import blake2b
from pathlib import Path

import storesvc_client as store
from tests.soak import promises
from tests.soak.disks import Change, Disk, Survivors, read_log
from tests.soak.kills import collect
from tests.soak.outcomes import Outcome
from tests.soak.watched import watched

STEPS = (0, 1, 2)
DELETED = 0


def power_cuts() -> Outcome:
    """Cuts the power at every point of the first saves of a store."""
    outcome = Outcome()
    with (
        tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch,
        tempfile.TemporaryDirectory(prefix="storesvc-soak-") as empty,
    ):
        top = Path(empty)
        disk = Disk(top)
        changes, acknowledged, deleting = record(top / "store")
        seen: set[bytes] = set()
        for number, change in enumerate(changes, start=1):
            disk.apply([change])
            kept = {step for step, at in acknowledged.items() if at <= number}
            kept -= {DELETED} if number > deleting else set()
            for survivors in Survivors:
                cut = Path(scratch) / f"cut-{number}-{survivors.name}"
                disk.lay_out(cut, survivors)
                digest = _digest(cut, kept)
                if digest in seen:
                    continue
                seen.add(digest)
                point = f"after call {number} ({change.kind}) {survivors.value}"
                maybe = set(STEPS) - kept
                found = promises.losses_at(cut / "store", kept=kept, maybe=maybe)
                outcome.add(point, found)
    return outcome


def record(root: Path) -> tuple[list[Change], dict[int, int], int]:
    """Returns the calls of a server that saves and deletes, after how many of them
    each step was acknowledged, and after how many the deletion was asked for."""
    acknowledged = {}
    with watched(root) as server:
        server.log_calls()
        server.start()
        with store.connect(server.address) as client:
            for step in STEPS:
                promises.save(client, step)
                acknowledged[step] = len(read_log(server.calls_log))
            deleting = len(read_log(server.calls_log))
            collect(client)
        server.stop()
        return read_log(server.calls_log), acknowledged, deleting


def _digest(directory: Path, kept: set[int]) -> bytes:
    """What tells one state of a disk from another."""
    state = blake2b(repr(sorted(kept)).encode())
    for path in sorted(directory.rglob("*")):
        state.update(repr(path.relative_to(directory)).encode())
        if path.is_file():
            state.update(b"%d " % path.stat().st_size + path.read_bytes())
    return state.digest()
