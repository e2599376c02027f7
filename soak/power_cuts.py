"""R3: the power fails after each call that changes a file; unsynced changes are lost,
all or some of them.

Records a server's calls while it creates a store, saves, deletes and collects. Then
builds, for each moment, the directories that a power cut could leave in extreme cases.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from soak import promises
from soak.disks import Change, Disk, cut_states, read_log
from soak.kill_points import collect
from soak.outcomes import Outcome
from soak.watched import WatchedServer, watched

Save: TypeAlias = Callable[[WatchedServer, int], None]

_SAVING: Final = """
import sys
from soak import promises
from tests.support.restrictions import connect
address, direct, step = sys.argv[1:]
with connect(address, direct=direct) as client:
    promises.save(client, int(step))
"""

STEPS = (0, 1, 2)
DELETED = 0


def power_cuts() -> Outcome:
    """Cuts the power at every point of a store's first saves, streamed and direct."""
    outcome = Outcome()
    for save in (_through_server, _directly):
        _cut_everywhere(save, outcome)
    return outcome


def _cut_everywhere(save: Save, outcome: Outcome) -> None:
    with promises.scratch_folder() as top:
        disk = Disk(top)
        changes, acknowledged, deleting = record(top / "store", save)

        def kept_after(number: int) -> list[int]:
            kept = {step for step, at in acknowledged.items() if at <= number}
            return sorted(kept - {DELETED} if number > deleting else kept)

        for number, point, cut in cut_states(disk, changes, kept_after):
            kept = kept_after(number)
            maybe = set(STEPS).difference(kept)
            found = promises.losses_at(cut / "store", kept=kept, maybe=maybe)
            outcome.add(point, found)


def _through_server(server: WatchedServer, step: int) -> None:
    with server.connect() as client:
        promises.save(client, step)


def _directly(server: WatchedServer, step: int) -> None:
    """Saves in direct mode, in a process whose calls are logged too."""
    subprocess.run(
        [
            sys.executable,
            "-c",
            _SAVING,
            server.address,
            server.root.as_uri(),
            str(step),
        ],
        env=os.environ | server.environment,
        check=True,
    )


def record(root: Path, save: Save) -> tuple[list[Change], dict[int, int], int]:
    """Returns the calls of processes that save and delete, the number of calls before
    each step was acknowledged, and before the deletion was requested."""
    acknowledged = {}
    with watched(root) as server:
        server.log_calls()
        server.start()
        for step in STEPS:
            save(server, step)
            acknowledged[step] = len(read_log(server.calls_log))
        deleting = len(read_log(server.calls_log))
        with server.connect() as client:
            collect(client)
        server.stop()
        return read_log(server.calls_log), acknowledged, deleting
