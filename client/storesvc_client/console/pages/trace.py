"""``/trace/NAMESPACE/RUN@STEP``: how long each part of a save took."""

from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from storesvc_client import WriterReport
from storesvc_client.console.rendering import (
    Crumb,
    Page,
    checkpoint_url,
    command,
    crumbs_to_run,
    save_phases,
)
from storesvc_client.console.visit import Visit

_PHASES: Final = {
    "await previous": "waits for the previous save of the run",
    "plan": "divides the tree into chunks",
    "snapshot": "copies arrays to memory of the host",
    "wait": "waits for memory of the staging buffers",
    "begin": "asks the store to begin the upload",
    "digest": "computes the digests of chunks",
    "find": "asks which chunks the store has; they are not sent again",
    "write": "writes data files",
    "sync": "makes data files durable",
    "send": "sends chunks to the server",
    "acknowledge": "waits, after the last send, until the server has stored all",
    "finish": "ends the part of this process",
    "await others": "waits for the other processes of the job",
    "commit": "makes the checkpoint visible",
}
"""Meaning of the phases of a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRow:
    """A process of a save."""

    report: WriterReport
    chart: Markup | None


def page(visit: Visit) -> Page:
    """Returns the phases of the processes of a save, the slowest first."""
    run = visit.run
    found = run.trace(visit.which)
    longest = max((writer.seconds for writer in found.writers), default=0.0)
    writers = sorted(found.writers, key=lambda writer: -writer.seconds)
    return Page(
        template="trace.html",
        title=f"Save of {run.name}@{found.step}",
        document=found,
        command=command("trace", f"{run.name}@{visit.which}"),
        crumbs=(
            *crumbs_to_run(run.name),
            Crumb(name=f"@{found.step}", address=checkpoint_url(run.name, found.step)),
        ),
        values={
            "found": found,
            "writers": [
                WriterRow(report=writer, chart=save_phases(writer, longest))
                for writer in writers
            ],
            "longest": longest,
            "phases": {
                name: text
                for name, text in _PHASES.items()
                if any(s.name == name for writer in writers for s in writer.timeline)
            },
            "sent_bytes": sum(writer.sent_bytes for writer in writers),
            "reused_bytes": sum(w.total_bytes - w.sent_bytes for w in writers),
        },
    )
