"""The power fails after each call that changes the audit log or the store of a server.

The log continues in a chain, and has the intent of whatever the store shows: a commit
that no line announces would be a change without a record.
"""

import asyncio
import json
from pathlib import Path
from typing import Final

import storesvc_client as store
from soak import promises
from soak.disks import Change, Disk, cut_states, read_log
from soak.outcomes import Outcome
from soak.watched import watched
from storesvc.audit.log import AuditLog
from storesvc.format.audit_chain import split_lines, verify

STEPS: Final = (0, 1)
LOG: Final = "audit.log"


def audit_power_cuts() -> Outcome:
    """Cuts the power while a server saves, tags and deletes."""
    outcome = Outcome()
    with promises.scratch_folder() as top:
        disk = Disk(top)
        for _, point, cut in cut_states(disk, _record(top)):
            outcome.add(point, _losses(cut))
    return outcome


def _record(top: Path) -> list[Change]:
    """Returns the calls of a server with an audit log."""
    with watched(top / "store", "--audit-log", str(top / LOG)) as server:
        server.log_calls()
        server.start()
        with server.connect() as client:
            promises.save(client, *STEPS)
            run = client.run(promises.RUN)
            run.tags.set("best", 1)
            run.delete(0)
        server.stop()
        return read_log(server.calls_log)


def _losses(cut: Path) -> list[str]:
    """Returns how a store and its audit log contradict each other."""
    file = cut / LOG
    lost = []
    asyncio.run(AuditLog(file, server="next").close())  # as the next server does
    found = verify(split_lines(file.read_bytes(), LOG))
    if found.broken:
        lost.append(f"the log is broken: {found.broken}")
    intents = list[tuple[str, str]]()
    for _, line in split_lines(file.read_bytes(), LOG):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the line that was cut off
        if entry["stage"] == "intent":
            intents.append((entry["method"], entry["detail"]["name"]))
    with promises.copied(cut / "store") as copy:
        lost += _unannounced(copy, intents)
    return lost


def _unannounced(store_root: Path, intents: list[tuple[str, str]]) -> list[str]:
    """Returns what the store shows without an intent in the log."""
    if not (store_root / "store.binpb").exists():
        return []
    with store.connect(store_root.as_uri()) as client:
        run = client.run(promises.RUN)
        try:
            rows = [*run.checkpoints(), *run.checkpoints(deleted=True)]
            tags = [*run.tags.list()]
        except store.NotFoundError:
            return []
    made = [method for method, _ in intents]
    lost = []
    intended = made.count("CommitUpload") + made.count("CreateCheckpoint")
    if len(rows) > intended:
        lost.append(f"{len(rows)} commits, {intended} intents")
    if any(row.delete_time for row in rows) and "DeleteCheckpoint" not in made:
        lost.append("a deletion without an intent")
    if tags and "SetTag" not in made:
        lost.append("a tag without an intent")
    return lost
