"""R8: each fsync of a save fails once with EIO, and the kernel drops the pages.

Acknowledged data must be on the disk nevertheless: a repeated sync that succeeds after
a failed one proves nothing, so the data must be written again.
"""

import errno
import tempfile
from itertools import count
from pathlib import Path

from soak import promises
from soak.disks import Disk, Survivors, read_log
from soak.outcomes import Outcome
from soak.watched import watched


def failed_syncs() -> Outcome:
    """Fails every fsync of a save, one in each save."""
    outcome = Outcome()
    with (
        tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch,
        tempfile.TemporaryDirectory(prefix="storesvc-soak-") as empty,
    ):
        disk = Disk(Path(empty))
        replayed = 0
        with watched(Path(empty) / "store") as server:
            server.log_calls()
            server.start()
            with server.connect() as client:
                promises.save(client, 0)
                kept = {0}
                for number in count(1):
                    server.fail_at(
                        number, errno.EIO, kinds="sync", all_that_follow=False
                    )
                    promises.save(client, number)  # repeats what failed
                    server.mend()
                    kept.add(number)
                    changes = read_log(server.calls_log)
                    disk.apply(changes[replayed:])
                    errors = {change.error for change in changes[replayed:]}
                    replayed = len(changes)
                    if errno.EIO not in errors:
                        break
                    cut = Path(scratch) / str(number)
                    disk.lay_out(cut, Survivors.NOTHING)
                    lost = promises.losses_at(cut / "store", kept=kept)
                    outcome.add(f"fsync {number} failed", lost)
    return outcome
