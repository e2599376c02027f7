"""``/uploads``: checkpoints that are being written."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from storesvc_client import DataLossError, UploadInfo
from storesvc_client.console.rendering import Page, command
from storesvc_client.console.visit import Visit

_SHOWN: Final = 8
"""Maximum writers that one row names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRow:
    """A live upload."""

    upload: UploadInfo
    finished: float
    """Share of the writers that have finished."""
    waits_for: str
    lease_left: timedelta
    """Zero once the lease has expired."""


def page(visit: Visit) -> Page:
    """Returns the live uploads of all runs."""
    parent = visit.query.get("in") or None
    damaged: list[DataLossError] = []
    found = [*visit.client.uploads(parent, on_damage=damaged.append)]
    rows = list[UploadRow]()
    for upload in found:
        writers = upload.unfinished_writers
        named = ", ".join(map(str, writers[:_SHOWN]))
        left = upload.renew_time + upload.lease - visit.now
        row = UploadRow(
            upload=upload,
            finished=upload.finished_writer_count / max(upload.writer_count, 1),
            waits_for=f"{named}, ..." if len(writers) > _SHOWN else named,
            lease_left=max(left, timedelta()),
        )
        rows.append(row)
    return Page(
        template="uploads.html",
        title="Uploads",
        document=found,
        command=command("uploads", *([parent] if parent else [])),
        section="Uploads",
        values={
            "rows": rows,
            "damaged": damaged,
        },
    )
